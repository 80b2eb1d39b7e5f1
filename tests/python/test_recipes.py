"""The recipes in docs/recipes.md run as they stand there."""

import copy
import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import refit  # noqa: E402
from broadcasting import TIMEOUT, both  # noqa: E402
from torch import nn  # noqa: E402


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = {"q": 8, "k": 4, "v": 4, "o": 8}
        self.attn = nn.ModuleDict(
            {name: nn.Linear(8, width, bias=False) for name, width in widths.items()}
        )

    def forward(self, x: Any) -> Any:
        attn = self.attn
        return attn["o"](attn["q"](x)) + attn["k"](x).sum() + attn["v"](x).sum()


class Engine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 16, bias=False, dtype=torch.bfloat16)
        self.out = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)


class Scene:
    """What the recipes take for granted: a trainer that has made a step, and a worker."""

    def __init__(self, publisher: Any, subscriber: Any, tmp_path: Path) -> None:
        self.publisher, self.subscriber = publisher, subscriber
        self.names: dict[str, Any] = {
            "refit": refit,
            "torch": torch,
            "partial": partial,
            "publisher": publisher,
            "subscriber": subscriber,
            "path": tmp_path / "checkpoint.pt",
        }

    def train(self, model: Any) -> Any:
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.1)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        self.names.update(model=model, optimizer=optimizer)
        return model

    def control(self) -> None:
        self.names["controller"] = refit.Controller(self.names["optimizer"], self.names["model"])

    def run(self, block: str) -> None:
        exec(block, self.names)

    def meanwhile(self, block: str) -> threading.Thread:
        thread = threading.Thread(target=self.run, args=(block,))
        thread.start()
        return thread

    def send(self, weights: Any) -> threading.Thread:
        thread = threading.Thread(target=self.publisher.publish, args=(weights,))
        thread.start()
        return thread

    def received(self, block: str) -> dict[str, Any]:
        """What the worker has once the block has run at the trainer."""
        trainer = self.meanwhile(block)
        with self.subscriber.next(TIMEOUT) as update:
            found = dict(update.tensors(copy=True))
        trainer.join()
        return found


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with both() as (publisher, subscriber):
        made = Scene(publisher, subscriber, tmp_path)
        yield made
        controller = made.names.get("controller")
        if controller is not None:
            controller.close()


@pytest.fixture
def recipe(root: Path) -> Any:
    """The blocks under a heading."""
    text = (root / "docs" / "recipes.md").read_text()
    sections = re.split(r"^## (.*)\n", text, flags=re.M)[1:]
    found = {
        title: re.findall(r"^```python\n(.*?)^```", body, re.M | re.S)
        for title, body in zip(sections[::2], sections[1::2], strict=True)
    }
    assert all(found.values())
    assert found.keys() == TESTED
    return found


TESTED = {
    "LoRA: merged weights",
    "LoRA: the adapters alone",
    "TRL with PEFT",
    "bf16 workers of an fp32 trainer",
    "Renamed and fused weights",
    "Engines with a loader of their own",
    "A checkpoint while states are away",
    "States that never fit",
    "Schedule-free optimizers",
    "Gradients that exist at a refit",
    "All options",
}


def adapted(peft: Any) -> Any:
    torch.manual_seed(1)
    model = peft.get_peft_model(Attention(), peft.LoraConfig(r=2, target_modules=["q", "o"]))
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_B" in name:
                one.normal_()
    return model


def test_merged_weights(scene: Scene, recipe: Any) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model = scene.train(adapted(peft))
    scene.control()
    (block,) = recipe["LoRA: merged weights"]
    plain = Attention()
    plain.load_state_dict(scene.received(block))
    torch.testing.assert_close(plain(torch.ones(2, 8)), model(torch.ones(2, 8)))


def test_the_adapters_alone(scene: Scene, recipe: Any) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model, engine = scene.train(adapted(peft)), adapted(peft)
    scene.control()
    sends, takes = recipe["LoRA: the adapters alone"]
    scene.names.update(peft=peft, engine=engine)
    trainer = scene.meanwhile(sends)
    scene.run(takes)
    trainer.join()
    assert torch.equal(engine(torch.ones(2, 8)), model(torch.ones(2, 8)))


@pytest.mark.slow
def test_trl_with_peft(scene: Scene, recipe: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    pytest.importorskip("trl")
    import test_trl
    from refit.integrations.trl import RefitCallback

    like = test_trl.a_trainer(tmp_path, [], max_steps=1)
    scene.names.update(
        GRPOTrainer=test_trl.GRPOTrainer,
        LoraConfig=peft.LoraConfig,
        RefitCallback=RefitCallback,
        model=test_trl.a_model(),
        reward=test_trl.count_w3,
        args=like.args,
        dataset=like.train_dataset,
        tokenizer=test_trl.a_tokenizer(),
    )
    trains, alone = recipe["TRL with PEFT"]
    found = scene.received(trains)
    assert found.keys() == test_trl.a_model().state_dict().keys()
    with both() as (publisher, subscriber):
        other = Scene(publisher, subscriber, tmp_path)
        other.names.update(RefitCallback=RefitCallback)
        other.run(alone)
        adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        callbacks = [other.names["callback"]]
        other.names["trainer"] = test_trl.a_trainer(
            tmp_path, callbacks, adapters=adapters, max_steps=1
        )
        names = list(other.received("trainer.train()"))
    assert all("lora_" in name for name in names)
    assert len(names) == 8


def test_schedule_free(scene: Scene, recipe: Any) -> None:
    schedulefree = pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    torch.manual_seed(2)
    model = Attention()
    same = copy.deepcopy(model)
    both_ways = [schedulefree.AdamWScheduleFree(one.parameters(), lr=0.1) for one in (model, same)]
    optimizer, twin = both_ways
    scene.names.update(model=model, optimizer=optimizer, roll_out=lambda: None)
    scene.control()
    (block,) = recipe["Schedule-free optimizers"]
    for _ in range(3):
        for one, its_model in ((optimizer, model), (twin, same)):
            one.train()
            its_model(torch.ones(2, 8)).sum().backward()
            one.step()
            one.zero_grad()
        found = scene.received(block)
        twin.eval()
        assert all(torch.equal(one, found[name]) for name, one in same.state_dict().items())
        twin.train()
        assert all(
            torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True)
        )
    assert scene.names["controller"].stats()["refit/early_returns"] == 0


def test_bf16_workers(scene: Scene, recipe: Any) -> None:
    model = scene.train(Attention())
    scene.control()
    sends, loads, binds = recipe["bf16 workers of an fp32 trainer"]
    expected = {name: one.bfloat16() for name, one in model.state_dict().items()}
    found = scene.received(sends)
    assert all(torch.equal(one, expected[name]) for name, one in found.items())
    for block in (loads, binds):
        engine = scene.names["engine"] = Attention().bfloat16()
        trainer = scene.send(model.state_dict())
        scene.run(block)
        trainer.join()
        assert all(torch.equal(one, expected[name]) for name, one in engine.state_dict().items())


def test_renamed_and_fused_weights(scene: Scene, recipe: Any) -> None:
    model = Attention()
    model.value_head = nn.Linear(8, 1)
    scene.train(model)
    scene.control()
    sends, places = recipe["Renamed and fused weights"]
    found = scene.received(sends)
    assert found.keys() == {f"policy.attn.{name}.weight" for name in "qkvo"}
    engine = scene.names["engine"] = Engine()
    weights = {f"attn.{name}.weight": model.attn[name].weight.detach() for name in "qkvo"}
    for step in range(2):
        now = {name: one + step for name, one in weights.items()}
        trainer = scene.send(now)
        if step == 0:
            scene.run(places)
        else:
            with scene.subscriber.next(TIMEOUT) as update:
                update.apply()
        trainer.join()
        fused = torch.cat([now[f"attn.{name}.weight"] for name in "qkv"]).bfloat16()
        assert torch.equal(engine.qkv.weight, fused)
        assert torch.equal(engine.out.weight, now["attn.o.weight"].bfloat16())


class Loading(Engine):
    def load_weights(self, weights: Any) -> None:
        begins = {"q": 0, "k": 8, "v": 12}
        for name, weight in weights:
            kind = name.split(".")[1]
            place = self.out.weight if kind == "o" else self.qkv.weight[begins[kind] :]
            place.data[: len(weight)].copy_(weight)


def test_engines_with_a_loader_of_their_own(scene: Scene, recipe: Any) -> None:
    (block,) = recipe["Engines with a loader of their own"]
    engine, expected = Loading(), Loading()
    scene.names["engine"] = engine
    for step, part in enumerate(block.split("\n\n")):
        now = {name: one.detach() + step for name, one in Attention().named_parameters()}
        trainer = scene.send(now)
        scene.run(part)
        trainer.join()
        expected.load_weights(now.items())
        for one, other in zip(engine.parameters(), expected.parameters(), strict=True):
            assert torch.equal(one, other)


def test_a_checkpoint_while_states_are_away(scene: Scene, recipe: Any) -> None:
    scene.train(Attention())
    expected = scene.names["optimizer"].state_dict()
    expected = {i: state["exp_avg"].clone() for i, state in expected["state"].items()}
    scene.control()
    (block,) = recipe["A checkpoint while states are away"]
    scene.run(block)
    saved = torch.load(scene.names["path"])["optimizer"]["state"]
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[i]["exp_avg"], one) for i, one in expected.items())


def test_states_that_never_fit(scene: Scene, recipe: Any) -> None:
    model = torch.nn.Linear(64, 64)
    scene.names.update(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        rollouts=torch.ones(2, 64),
        policy_loss=lambda model, rollouts: model(rollouts).sum(),
    )
    (block,) = recipe["States that never fit"]
    scene.run(block)
    assert scene.names["controller"].stats()["refit/step_out_bytes"] == 2 * 4 * 64 * 64
    saved = torch.load(scene.names["path"])["optimizer"]["state"]
    shown = scene.names["optimizer"].state_dict()["state"]
    assert torch.equal(saved[0]["exp_avg"], shown[0]["exp_avg"])
    assert bool(saved[0]["exp_avg"].any())


def test_gradients_that_exist_at_a_refit(scene: Scene, recipe: Any) -> None:
    model = scene.train(Attention())
    model(torch.ones(2, 8)).sum().backward()
    scene.names["optimizer"].step()
    (block,) = recipe["Gradients that exist at a refit"]
    scene.run(block)
    controller = scene.names["controller"]
    model(torch.zeros(2, 8)).sum().backward()
    scene.names["optimizer"].step()
    controller.offload()
    controller.restore()
    assert all(one.grad is None for one in model.parameters())


def test_all_options(scene: Scene, recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = recipe["All options"]
    scene.run(block)
    assert "offload.slab_bytes" in capsys.readouterr().out
