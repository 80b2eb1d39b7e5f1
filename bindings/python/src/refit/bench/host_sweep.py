"""Training steps of which the CPU makes a share: how long they take, and what the device holds.

A small transformer is trained, on the GPU if there is one, with each share of its states on the
host: by refit, with copies during the backward pass and without, and by Megatron-Core's form. In a
round every case is made anew from the same weights, one after the other, and let go of, so that the
peak of the device's memory is its own. Its first step is cold; whole steps follow, one after the
other, and at the end one whose phases are timed apart.

On a CPU "device" is main memory, and the same cores do everything: then the device's bytes are
those of the states that are not on the host.
"""

import gc
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

from refit.bench.host_ways import OPTIONS, Hybrid
from refit.bench.machine import NotInstalled
from refit.bench.memory import MemoryNeed
from refit.bench.series import Series, ratio
from refit.bench.steps import MOMENTS
from refit.controller import Controller
from refit.observe import memory_now
from refit.step.schedule import CpuStep

PARAMETERS = 25e6
FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
MOST_ROUNDS = 5  # each makes every case anew
STEPS = 2
UNTIMED = 2  # after the first one: from the third step on, gradients leave during the backward pass
BATCH, LENGTH = 2, 128
WIDTH, SMALL_WIDTH, HEADS = 512, 64, 8
VOCABULARY = 8  # times the width
NEED = MemoryNeed("host_sweep", 44, 2 << 30)
"""Weights, gradients, states, their copies on the host, and the weights that must come out."""


class Transformer(nn.Module):
    """A decoder of about so many parameters, at least one layer's."""

    def __init__(self, parameters: float) -> None:
        super().__init__()
        layer = 12 * WIDTH**2
        width = WIDTH if parameters >= layer + 2 * VOCABULARY * WIDTH**2 else SMALL_WIDTH
        layers = max(1, round(parameters / width**2 / 12 - 2 * VOCABULARY / 12))
        self.vocabulary = VOCABULARY * width
        self.embedding = nn.Embedding(self.vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, HEADS, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, self.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token from those before it."""
        hidden = self.embedding(tokens[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1], device=hidden.device)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Stepper(Protocol):
    """What makes the step of a case: its states are made by its first one."""

    def step(self) -> None:
        """As ``optimizer.step()``."""

    def zero_grad(self) -> None:
        """Drops the gradients."""

    @property
    def host_bytes(self) -> int:
        """Of the states that live on the host."""

    def close(self) -> None:
        """Gives back what it took."""


class Plain:
    """``torch.optim.AdamW``, without any host memory."""

    def __init__(self, model: nn.Module) -> None:
        options = device_options(model)
        self._optimizer = torch.optim.AdamW(model.parameters(), **options, **OPTIONS)

    def step(self) -> None:
        self._optimizer.step()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    @property
    def host_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self._optimizer.state.clear()


class Refit(Plain):
    """refit's controller, with as many threads as PyTorch."""

    def __init__(self, model: nn.Module, fraction: float, overlap: bool = True) -> None:
        super().__init__(model)
        self._model = model
        self._controller = Controller(
            self._optimizer,
            model,
            offload_host_step_threads=torch.get_num_threads(),
            schedule=CpuStep(fraction=fraction, overlap=overlap),
        )

    @property
    def host_bytes(self) -> int:
        on_host = {name for name, why in self._controller.resident if "the CPU steps it" in why}
        of_model = self._model.named_parameters()
        return sum(len(MOMENTS) * it.nbytes for name, it in of_model if name in on_host)

    def close(self) -> None:
        self._controller.close()
        super().close()


def refit_alone(model: nn.Module, fraction: float) -> Stepper:
    """``Refit`` without copies during the backward pass."""
    return Refit(model, fraction, overlap=False)


class Megatrons:
    """Megatron-Core's form, see ``Hybrid``."""

    def __init__(self, model: nn.Module, fraction: float) -> None:
        self._hybrid = Hybrid(list(model.parameters()), fraction, **device_options(model))

    def step(self) -> None:
        self._hybrid.step()

    def zero_grad(self) -> None:
        self._hybrid.zero_grad()

    @property
    def host_bytes(self) -> int:
        return self._hybrid.host_elements * len(MOMENTS) * 4

    def close(self) -> None:
        self._hybrid.close()


class Torchaos(Plain):
    """torchao's ``CPUOffloadOptimizer``: all states on the host, whose gradients leave during the
    backward pass, and an optimizer of its own for each parameter."""

    def __init__(self, model: nn.Module, fraction: float) -> None:
        from torchao.optim import CPUOffloadOptimizer

        made: Any = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, **OPTIONS)
        self._optimizer = made
        self._host_bytes = sum(
            len(MOMENTS) * it.nbytes for it in model.parameters() if it.numel() >= made.minimal_size
        )

    @property
    def host_bytes(self) -> int:
        return self._host_bytes

    def close(self) -> None:
        del self._optimizer


def refuse_torchao(device: torch.device) -> None:
    """NotInstalled if ``Torchaos`` cannot be made."""
    if device.type != "cuda":
        raise NotInstalled("it needs a GPU")
    if importlib.util.find_spec("torchao") is None:
        raise NotInstalled("pip install torchao")


def device_options(model: nn.Module) -> dict[str, Any]:
    """Of the optimizer that steps on the device: what is fastest there, and the loop on a CPU."""
    return {"fused": True} if next(model.parameters()).is_cuda else {"foreach": False}


@dataclass(frozen=True)
class Kind:
    """A line of the picture."""

    name: str
    make: Callable[[nn.Module, float], Stepper]
    refuse: Callable[[torch.device], None] = lambda _: None
    """NotInstalled if it is not on this machine."""
    only_all: bool = False
    """It takes all states to the host, no share of them."""


PLAIN = "torch.optim.AdamW"
OVERLAPPED, ALONE = "refit", "refit, overlap=False"
KINDS: tuple[Kind, ...] = (
    Kind(OVERLAPPED, Refit),
    Kind(ALONE, refit_alone),
    Kind("HybridDeviceOptimizer", Megatrons),
    Kind("torchao, CPUOffloadOptimizer", Torchaos, refuse_torchao, only_all=True),
)


@dataclass
class Case:
    """One kind with one share, and its figures."""

    name: str
    fraction: float
    make: Callable[[nn.Module, float], Stepper]
    step: Series = field(default_factory=Series)
    phases: dict[str, Series] = field(default_factory=dict)
    host_bytes: int = 0
    state_bytes: int = 0
    peak_device_bytes: int = 0
    is_equal: bool = True

    def take(self, seconds: Sequence[float], phases: dict[str, float], cold: float) -> None:
        """The figures of one round."""
        self.step.cold = self.step.cold or cold
        self.step.seconds += seconds
        for name, value in phases.items():
            self.phases.setdefault(name, Series()).seconds.append(value)


def measure(
    parameters: float, rounds: int, fractions: Sequence[float] = FRACTIONS
) -> dict[str, Any]:
    """Every case. HostMemoryError if even a small model does not fit."""
    fits = NEED.fitting(parameters, memory_now.available_bytes())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(7)
    begin = {name: it.clone() for name, it in Transformer(fits).state_dict().items()}
    kinds, left_out = _installed(device)
    cases = list(_cases(kinds, fractions))
    rounds = min(rounds, MOST_ROUNDS)
    _round([_plain()], begin, fits, device)  # takes what PyTorch takes once
    for _ in range(rounds):
        _round(cases, begin, fits, device)
    return {
        "bench": "host_sweep",
        "device": _name_of(device),
        "parameters": sum(it.numel() for it in begin.values()),
        "parameters_wanted": int(parameters),
        "shortened": fits < parameters,
        "tokens": BATCH * LENGTH,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "left_out": left_out,
        "ways": [_row(it, cases) for it in cases],
    }


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _installed(device: torch.device) -> tuple[list[Kind], dict[str, str]]:
    """The kinds that are on this machine, and why others are left out."""
    kinds: list[Kind] = []
    left_out: dict[str, str] = {}
    for kind in KINDS:
        try:
            kind.refuse(device)
            kinds.append(kind)
        except NotInstalled as why:
            left_out[kind.name] = str(why)
    return kinds, left_out


def _cases(kinds: Sequence[Kind], fractions: Sequence[float]) -> Iterator[Case]:
    yield _plain()
    for kind in kinds:
        for share in [1.0] if kind.only_all else fractions:
            yield Case(kind.name, share, kind.make)


def _plain() -> Case:
    return Case(PLAIN, 0.0, lambda model, _: Plain(model))


def _round(
    cases: list[Case], begin: dict[str, torch.Tensor], parameters: float, device: torch.device
) -> None:
    """Each case from the same weights, with the same tokens; all must end as the first one."""
    expected: list[torch.Tensor] = []
    for case in cases:
        model = Transformer(parameters)
        model.load_state_dict(begin)
        model.to(device)
        made = torch.Generator().manual_seed(11)
        tokens = torch.randint(model.vocabulary, (BATCH, LENGTH + 1), generator=made).to(device)
        _train(case, model, tokens)
        ended = [it.detach().to("cpu", copy=True) for it in model.parameters()]
        expected = expected or ended
        pairs = zip(expected, ended, strict=True)
        case.is_equal = case.is_equal and all(torch.equal(one, two) for one, two in pairs)
        case.state_bytes = sum(len(MOMENTS) * it.nbytes for it in ended)
        del model
        gc.collect()


def _train(case: Case, model: Transformer, tokens: torch.Tensor) -> None:
    stepper = case.make(model, case.fraction)
    try:
        done = _begin_peak(tokens.device)
        (cold,) = _steps(stepper, model, tokens, 1, done)
        _steps(stepper, model, tokens, UNTIMED, done)
        warm = _steps(stepper, model, tokens, STEPS, done)
        case.take(warm, _phases(stepper, model, tokens, done), cold)
        case.host_bytes = stepper.host_bytes
        case.peak_device_bytes = max(case.peak_device_bytes, _peak(tokens.device))
    finally:
        stepper.close()


def _begin_peak(device: torch.device) -> Callable[[], None]:
    """The peak of the device's memory counts from here. Gives what waits for the device."""
    if device.type != "cuda":
        return lambda: None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return lambda: torch.cuda.synchronize(device)


def _peak(device: torch.device) -> int:
    """0 on a CPU, where the memory of a device cannot be told from the host's."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _steps(
    stepper: Stepper, model: nn.Module, tokens: torch.Tensor, count: int, done: Callable[[], None]
) -> list[float]:
    """The mean of so many whole steps, which nothing stops between them."""
    start = time.perf_counter()
    for _ in range(count):
        model(tokens).backward()
        stepper.step()
        stepper.zero_grad()
    done()
    return [(time.perf_counter() - start) / count]


def _phases(
    stepper: Stepper, model: nn.Module, tokens: torch.Tensor, done: Callable[[], None]
) -> dict[str, float]:
    """One step, with a wait for the device after each phase."""
    times = [time.perf_counter()]

    def over() -> None:
        done()
        times.append(time.perf_counter())

    loss = model(tokens)
    over()
    loss.backward()
    over()
    stepper.step()
    over()
    stepper.zero_grad()
    forward, backward, step = (after - before for before, after in pairwise(times))
    return {"forward_s": forward, "backward_s": backward, "optimizer_s": step}


def _over_longer(case: Case, cases: list[Case]) -> float:
    """Backward pass and step together, over the longer of the two alone: the backward pass of the
    optimizer without host memory, and the step that finds all gradients still on the device.
    """
    alone = case
    for it in cases:
        if (case.name, it.name, it.fraction) == (OVERLAPPED, ALONE, case.fraction):
            alone = it
    backward, step = cases[0].phases["backward_s"].seconds, alone.phases["optimizer_s"].seconds
    longer = Series(0.0, [max(both) for both in zip(backward, step, strict=True)])
    mine = [case.phases[name].seconds for name in ("backward_s", "optimizer_s")]
    return ratio(Series(0.0, [sum(both) for both in zip(*mine, strict=True)]), longer)


def _row(case: Case, cases: list[Case]) -> dict[str, Any]:
    on_device = case.state_bytes - case.host_bytes
    plain = cases[0]
    return {
        "way": case.name,
        "step_s_median": case.step.median,
        "step_s_p95": case.step.p95,
        "cold_step_s": case.step.cold,
        **{f"{name}_median": it.median for name, it in case.phases.items()},
        "over_plain": ratio(case.step, plain.step),
        "over_longer": _over_longer(case, cases),
        "host_state_bytes": case.host_bytes,
        "peak_device_bytes": case.peak_device_bytes or on_device,
        "bit_equal": case.is_equal,
        "host_fraction": case.fraction,
    }
