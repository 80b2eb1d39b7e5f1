"""A share of the parameters that the CPU steps, where ranks train together and where their
checkpoints are written: FSDP1, FSDP2, DTensor, DDP with and without hooks, accelerate, and
distributed checkpoints that ranks of another number load. The ranks meet by gloo: their tensors lie
on the host on any machine. And transformers' Trainer, which saves and resumes."""

import sys
from pathlib import Path
from typing import Any

import pytest
import refit
import torch
import torch.multiprocessing
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import cpu_share_scenes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WIDTH = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have left what they saw. One that hangs fails all scenes by the timeout."""
    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("FSDP2 of this PyTorch runs on GPUs only: 2.6")
    made = tmp_path_factory.mktemp("shares")
    torch.multiprocessing.spawn(cpu_share_scenes.play, (str(made),), nprocs=2, join=True)
    return made


def seen(folder: Path, ranks: int) -> list[dict[str, Any]]:
    names = [folder / f"rank{rank}of{ranks}" for rank in range(ranks)]
    return [torch.load(name, weights_only=True) for name in names]


@pytest.mark.parametrize("scene", [one.__name__ for one in cpu_share_scenes.SCENES])
def test_ranks_end_with_the_bits_of_ranks_without_refit(folder: Path, scene: str) -> None:
    assert [one[scene] for one in seen(folder, 2)] == [True, True]


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_loads_a_checkpoint(folder: Path, ranks: int) -> None:
    others = ranks, str(folder)
    torch.multiprocessing.spawn(cpu_share_scenes.play_others, others, nprocs=ranks, join=True)
    assert [one["loaded"] for one in seen(folder, ranks)] == [True] * ranks


class Predicts(nn.Module):
    """A model as a Trainer takes it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(inputs).pow(2).mean()}


def trained(folder: Path, steps: int, fraction: float | None, resume: bool) -> list[torch.Tensor]:
    """What a Trainer that accumulates, clips, and saves behind each 4th step ends with."""
    transformers = pytest.importorskip("transformers")
    model = Predicts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    source = torch.Generator().manual_seed(5)
    batches = [{"inputs": torch.randn(WIDTH, generator=source)} for _ in range(96)]
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_grad_norm=0.01,
            save_steps=4,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=batches,
        optimizers=(optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)),
    )
    if fraction is None:
        trainer.train(resume_from_checkpoint=resume)
    else:
        with refit.Controller(optimizer, model, host_fraction=fraction) as controller:
            trainer.train(resume_from_checkpoint=resume)
            assert cpu_share_scenes.told(controller) is None
            assert len(cpu_share_scenes.named(controller)) == (3 if fraction == 1.0 else 1)
    states = (optimizer.state[one] for one in model.parameters())
    return [*model.parameters(), *(one[key] for one in states for key in sorted(one))]


def test_a_trainer_ends_with_the_same_bits_and_resumes_either_way(tmp_path: Path) -> None:
    expected = trained(tmp_path / "alone", 8, None, False)
    for fraction in (0.5, 1.0):
        assert all(
            map(torch.equal, expected, trained(tmp_path / str(fraction), 8, fraction, False))
        )
    before: float | None
    behind: float | None
    for before, behind in ((1.0, None), (None, 1.0), (0.5, 1.0)):
        folder = tmp_path / f"{before}-{behind}"
        trained(folder, 4, before, False)
        assert all(map(torch.equal, expected, trained(folder, 8, behind, True)))
