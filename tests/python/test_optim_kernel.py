"""A step of ``kernels/optim.h`` gives the bits of ``torch.optim``'s single-tensor path on the CPU.

The kernel is internal; ``tests/kernels/optim_library.c`` shows it to this test. Each level of the
CPU's vectors is tried. What 16-bit gradients and parameters become with fp32 masters is written
out here with PyTorch's own ops.
"""

import ctypes
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"adam": 0, "adagrad": 1, "sgd": 2, "lion": 3}
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ALONE, MASTER, REMAINDER = 0, 1, 2
BASE, AVX2, AVX512 = 0, 1, 2


class Options(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int),
        *((name, ctypes.c_double) for name in ("lr", "weight_decay", "beta1", "beta2", "eps")),
        *((name, ctypes.c_double) for name in ("lr_decay", "momentum", "dampening")),
        *((name, ctypes.c_bool) for name in ("decoupled", "amsgrad", "nesterov", "maximize")),
        ("lr_is_tensor", ctypes.c_bool),
        ("root", ctypes.c_void_p),
        ("root_threads", ctypes.c_void_p),
    ]


class Span(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_size_t),
        *((name, ctypes.c_void_p) for name in ("gradient", "weights", "beside")),
        ("states", ctypes.c_void_p * 3),
        *((name, ctypes.c_int) for name in ("gradient_type", "weights_type", "master_form")),
    ]


def _built() -> Path:
    """That of the library under test, or in the default build."""
    ours = os.environ.get("REFIT_LIBRARY")
    build = Path(ours).resolve().parents[1] if ours else ROOT / "build"
    return build / "tests" / "kernels" / "liboptim_library.so"


@pytest.fixture(scope="module")
def library() -> Iterator[ctypes.CDLL]:
    path = _built()
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("PyTorch's kernels have no FMA here, and round each product")
    if not path.parent.is_dir():
        pytest.skip(f"the tests of C are not built in {path.parents[2]}")
    found = ctypes.CDLL(str(path))
    found.optim_step.argtypes = [
        ctypes.POINTER(Options),
        ctypes.c_double,
        ctypes.c_float,
        ctypes.c_float,
        ctypes.POINTER(Span),
    ]
    found.optim_split.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t]
    found.optim_join.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t]
    yield found
    found.optim_limit(AVX512)


def _roots() -> dict[str, int | None]:
    """What ``sqrt`` of a tensor calls: MKL's ``vmsSqrt``, which rounds otherwise on some CPUs.

    Empty where PyTorch has no MKL; then roots are rounded to nearest.
    """
    if not torch.backends.mkl.is_available():
        return {}
    folder = Path(torch.__file__).parent / "lib"
    mkl = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
    functions = {"root": mkl.vmsSqrt, "root_threads": mkl.MKL_Set_Num_Threads_Local}
    return {name: ctypes.cast(one, ctypes.c_void_p).value for name, one in functions.items()}


def _same(one: Any, other: Any) -> bool:
    """The same bits; NaNs are the same."""
    bits = torch.int32 if one.dtype == torch.float32 else torch.int16
    return bool(((one.view(bits) == other.view(bits)) | (one.isnan() & other.isnan())).all())


class Lion(torch.optim.Optimizer):
    """The published form (google/automl, lion/lion_pytorch.py), with ``maximize``."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                grad = -p.grad if group["maximize"] else p.grad
                p.mul_(1 - group["lr"] * group["weight_decay"])
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                exp_avg = self.state[p]["exp_avg"]
                update = exp_avg * beta1 + grad * (1 - beta1)
                p.add_(update.sign_(), alpha=-group["lr"])
                exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)


@dataclass
class Case:
    """An optimizer of PyTorch and its options."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)

    def optimizer(self, parameter: Any, **path: bool) -> Any:
        if self.kind == "lion":
            return Lion([parameter], **self.options)
        kinds = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}
        return kinds[self.kind]([parameter], **{"foreach": False, **path}, **self.options)

    def kernel_options(self, roots: dict[str, int | None]) -> Options:
        ours = dict(self.options)
        ours["beta1"], ours["beta2"] = ours.pop("betas", (0.0, 0.0))
        ours["decoupled"] = ours.pop("decoupled_weight_decay", False)
        ours["lr_is_tensor"] = isinstance(ours["lr"], torch.Tensor)
        ours["lr"] = float(ours["lr"])
        return Options(kind=KINDS[self.kind], **roots, **ours)

    def names(self) -> list[str]:
        adam = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
        return {
            "adam": adam if self.options.get("amsgrad") else adam[:2],
            "adagrad": ["sum"],
            "sgd": ["momentum_buffer"] if self.options.get("momentum") else [],
            "lion": ["exp_avg"],
        }[self.kind]


class Stepped:
    """Arrays that the kernel steps, as the parameter that PyTorch does."""

    def __init__(
        self, library: Any, case: Case, weights: Any, beside: int, roots: dict[str, int | None]
    ) -> None:
        self._library, self._case = library, case
        self._options = case.kernel_options(roots)
        self.masters = weights.float()
        self.weights, self.beside, self._is = weights.clone(), None, beside
        if beside == MASTER:
            self.beside = self.masters.clone()
        if beside == REMAINDER:
            self.beside = torch.zeros(weights.shape, dtype=torch.int16)
        self.states = [torch.zeros_like(self.masters) for _ in case.names()]
        for one in self.states if case.kind == "adagrad" else []:
            one.fill_(case.options.get("initial_accumulator_value", 0.0))

    def step(self, step: int, gradient: Any, unscale: float = 1.0, clip: float = 1.0) -> None:
        states = [one.data_ptr() for one in self.states]
        span = Span(
            count=gradient.numel(),
            gradient=gradient.data_ptr(),
            weights=self.weights.data_ptr(),
            beside=None if self.beside is None else self.beside.data_ptr(),
            states=(ctypes.c_void_p * 3)(*states, *[None] * (3 - len(states))),
            gradient_type=TYPES[gradient.dtype],
            weights_type=TYPES[self.weights.dtype],
            master_form=self._is,
        )
        self._library.optim_step(self._options, step, unscale, clip, span)

    def parameter(self) -> Any:
        """As fp32."""
        if self._is == MASTER:
            return self.beside
        if self._is == ALONE:
            return self.weights.float()
        whole = torch.empty(self.weights.shape)
        self._library.optim_join(
            whole.data_ptr(), self.weights.data_ptr(), self.beside.data_ptr(), whole.numel()
        )
        return whole


def _numbers(count: int, seed: int, wild: bool) -> Any:
    """Ordinary ones; if wild, of every exponent, with infinities, NaNs and zeros of both signs."""
    torch.manual_seed(seed)
    numbers = torch.randn(count) * 10.0 ** torch.randint(-6, 3, (count,)).float()
    if wild:
        bits = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64).to(torch.int32)
        special = torch.tensor(
            [0.0, -0.0, 1e-45, -1e-40, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan]
        )
        chosen = torch.randint(0, 4, (count,))
        numbers = torch.where(chosen == 0, bits.view(torch.float32), numbers)
        some = special[torch.randint(0, len(special), (count,))]
        numbers = torch.where(chosen == 1, some, numbers)
    return numbers


def _stepped_alike(
    library: Any,
    case: Case,
    *,
    count: int,
    gradient_type: Any = torch.float32,
    weights_type: Any = torch.float32,
    beside: int = ALONE,
    wild: bool = False,
    scales: tuple[float, float] = (1.0, 1.0),
    level: int = AVX512,
    steps: int = 5,
    root: bool = True,
    path: dict[str, bool] | None = None,
) -> None:
    library.optim_limit(level)
    weights = _numbers(count, 1, wild).to(weights_type)
    mine = Stepped(library, case, weights, beside, _roots() if root else {})
    parameter = torch.nn.Parameter(weights.float())
    optimizer = case.optimizer(parameter, **(path or {}))
    for step in range(1, steps + 1):
        gradient = _numbers(count, 10 + step, wild).to(gradient_type)
        parameter.grad = gradient.float().clone().mul_(scales[0]).mul_(scales[1])
        optimizer.step()
        mine.step(step, gradient, *(float(torch.tensor(one)) for one in scales))
        if beside == ALONE:  # without a master, what is rounded is what the next step has
            parameter.data.copy_(parameter.data.to(weights_type))
        assert _same(mine.parameter(), parameter.data), f"the parameter after step {step}"
        for name, state in zip(case.names(), mine.states, strict=True):
            theirs = optimizer.state[parameter][name]
            assert _same(state, theirs), f"{name} after step {step}"
        if beside == MASTER:
            assert _same(mine.weights, parameter.data.to(weights_type)), f"weights, step {step}"


ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
ADAMW = {**ADAM, "decoupled_weight_decay": True}
CASES = {
    "adamw": Case("adam", ADAMW),
    "adamw-amsgrad": Case("adam", {**ADAMW, "amsgrad": True}),
    "adamw-maximize": Case("adam", {**ADAMW, "maximize": True}),
    "adam": Case("adam", ADAM),
    "adam-amsgrad-maximize": Case("adam", {**ADAM, "amsgrad": True, "maximize": True}),
    "adam-no-decay": Case("adam", {**ADAM, "weight_decay": 0.0}),
    "adam-far-lerp": Case("adam", {**ADAM, "betas": (0.3, 0.5)}),
    "adam-middle-lerp": Case("adam", {**ADAM, "betas": (0.5, 0.95)}),
    "adamw-lr-tensor": Case("adam", {**ADAMW, "lr": torch.tensor(3e-4)}),
    "adagrad": Case("adagrad", {"lr": 0.01, "weight_decay": 0.0, "eps": 1e-10}),
    "adagrad-decay": Case(
        "adagrad", {"lr": 0.01, "lr_decay": 0.1, "weight_decay": 0.02, "eps": 1e-6}
    ),
    "adagrad-maximize": Case("adagrad", {"lr": 0.01, "eps": 1e-10, "maximize": True}),
    "sgd": Case("sgd", {"lr": 0.1}),
    "sgd-decay": Case("sgd", {"lr": 0.1, "weight_decay": 0.01}),
    "sgd-momentum": Case("sgd", {"lr": 0.1, "momentum": 0.9}),
    "sgd-dampening": Case(
        "sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}
    ),
    "sgd-nesterov": Case("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "sgd-lr-tensor": Case("sgd", {"lr": torch.tensor(0.1), "momentum": 0.9}),
    "lion": Case(
        "lion", {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1, "maximize": False}
    ),
    "lion-maximize": Case(
        "lion", {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": True}
    ),
}


@pytest.mark.parametrize("level", [BASE, AVX2, AVX512])
@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_bits_of_pytorch(library: Any, name: str, level: int) -> None:
    _stepped_alike(library, CASES[name], count=10_007, level=level)


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_every_exponent_have_the_bits_of_pytorch(library: Any, name: str) -> None:
    _stepped_alike(library, CASES[name], count=50_021, wild=True)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd-nesterov", "lion"])
def test_each_length_has_the_bits_of_pytorch(library: Any, name: str) -> None:
    """PyTorch's own kernels take the last elements with another text than the others."""
    for count in range(1, 80):
        _stepped_alike(library, CASES[name], count=count, steps=2)


def test_without_a_first_moment_it_has_the_bits_of_pytorch(library: Any) -> None:
    _stepped_alike(library, Case("adam", {**ADAMW, "betas": (0.0, 0.99)}), count=10_007)


def test_pytorch_in_threads_has_the_same_bits(library: Any) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        _stepped_alike(library, CASES["adamw"], count=300_007, steps=2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["adamw", "adam-amsgrad-maximize", "adagrad-decay"])
@pytest.mark.parametrize("level", [BASE, AVX2, AVX512])
def test_without_a_root_it_is_rounded_to_nearest(
    library: Any, monkeypatch: pytest.MonkeyPatch, name: str, level: int
) -> None:
    """The root of a double, rounded to fp32, is the nearest."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "sqrt", lambda one: one.double().pow(0.5).float())
        _stepped_alike(library, CASES[name], count=20_011, level=level, root=False)


PATHS = [name for name, case in CASES.items() if case.kind != "lion" and "tensor" not in name]


@pytest.mark.parametrize("name", PATHS)
def test_foreach_has_the_same_bits_on_the_cpu(library: Any, name: str) -> None:
    _stepped_alike(library, CASES[name], count=10_007, path={"foreach": True})


@pytest.mark.parametrize("name", PATHS)
def test_fused_has_the_bits_of_roots_to_nearest(library: Any, name: str) -> None:
    """In whole vectors; its last elements are rounded otherwise."""
    path = {"foreach": False, "fused": True}
    _stepped_alike(library, CASES[name], count=8192, root=False, path=path)


@pytest.mark.parametrize("name", ["adamw", "adam", "adagrad-decay", "sgd-dampening", "lion"])
@pytest.mark.parametrize("gradient", TYPES)
@pytest.mark.parametrize(
    ("weights", "beside"),
    [
        (torch.float32, ALONE),
        (torch.bfloat16, ALONE),
        (torch.float16, ALONE),
        (torch.bfloat16, MASTER),
        (torch.float16, MASTER),
        (torch.bfloat16, REMAINDER),
    ],
)
def test_each_type_has_the_bits_of_pytorch_on_fp32(
    library: Any, name: str, gradient: Any, weights: Any, beside: int
) -> None:
    types = {"gradient_type": gradient, "weights_type": weights, "beside": beside}
    for wild in (False, True):
        _stepped_alike(library, CASES[name], count=5_003, wild=wild, steps=3, **types)


def test_split_weights_differ_from_pytorch_rounding_in_ties_only(library: Any) -> None:
    masters = torch.arange(0x3F80_0000, 0x3F90_0000, dtype=torch.int32).view(torch.float32)
    weights = torch.empty(masters.shape, dtype=torch.bfloat16)
    remainders = torch.empty(masters.shape, dtype=torch.int16)
    library.optim_split(
        weights.data_ptr(), remainders.data_ptr(), masters.data_ptr(), masters.numel()
    )
    bits = masters.view(torch.int32)
    to_even = (bits & 0x1FFFF) == 0x08000  # the middle above an even one: PyTorch goes down
    mine, theirs = weights.view(torch.int16), masters.to(torch.bfloat16).view(torch.int16)
    assert torch.equal(mine - theirs, to_even.to(torch.int16))
    assert to_even.sum() == masters.numel() // 2**17


def test_scales_are_products_of_their_own(library: Any) -> None:
    for scales in ((1 / 3, 1.0), (1.0, 0.7), (1 / 65536, 0.123), (1e-3, 1e-3)):
        for gradient in TYPES:
            _stepped_alike(
                library, CASES["adamw"], count=5_003, gradient_type=gradient, scales=scales
            )


BETAS = st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999])
# With 0, PyTorch gives a gradient of -0 another sign in the last elements than in the others.
FIRST_BETAS = st.sampled_from([0.1, 0.3, 0.5, 0.9, 0.95])
RATES = st.floats(1e-7, 0.5)
FLAGS = st.booleans()
DECAYS = st.sampled_from([0.0, 1e-4, 0.01, 0.3])


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(list(KINDS)))
    options: dict[str, Any] = {"lr": draw(RATES), "weight_decay": draw(DECAYS)}
    options["maximize"] = draw(FLAGS)
    if kind in ("adam", "lion"):
        options["betas"] = (draw(FIRST_BETAS if kind == "adam" else BETAS), draw(BETAS))
    if kind in ("adam", "adagrad"):
        options["eps"] = draw(st.sampled_from([0.0, 1e-15, 1e-8, 1e-3]))
    if kind == "adam":
        options["amsgrad"], options["decoupled_weight_decay"] = draw(FLAGS), draw(FLAGS)
    if kind == "adagrad":
        options["lr_decay"] = draw(st.sampled_from([0.0, 0.01, 1.0]))
    if kind == "sgd":
        options["momentum"] = draw(st.sampled_from([0.0, 0.5, 0.9]))
        options["nesterov"] = options["momentum"] != 0 and draw(FLAGS)
        options["dampening"] = 0.0 if options["nesterov"] else draw(st.sampled_from([0.0, 0.3]))
    if kind != "lion" and draw(FLAGS):
        options["lr"] = torch.tensor(options["lr"])
    return Case(kind, options)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    case=_cases(),
    count=st.integers(1, 6000),
    gradient=st.sampled_from(list(TYPES)),
    weights=st.sampled_from(
        [(torch.float32, ALONE)]
        + [(kind, beside) for kind in (torch.bfloat16, torch.float16) for beside in (0, 1)]
        + [(torch.bfloat16, REMAINDER)]
    ),
    wild=FLAGS,
    scales=st.tuples(st.sampled_from([1.0, 1 / 1024, 1 / 3]), st.sampled_from([1.0, 0.7])),
    level=st.sampled_from([BASE, AVX2, AVX512]),
)
@example(
    case=CASES["adamw"],
    count=4097,
    gradient=torch.bfloat16,
    weights=(torch.bfloat16, REMAINDER),
    wild=True,
    scales=(1 / 1024, 0.7),
    level=AVX512,
)
def test_any_options_have_the_bits_of_pytorch(
    library: Any,
    case: Case,
    count: int,
    gradient: Any,
    weights: tuple[Any, int],
    wild: bool,
    scales: tuple[float, float],
    level: int,
) -> None:
    _stepped_alike(
        library,
        case,
        count=count,
        gradient_type=gradient,
        weights_type=weights[0],
        beside=weights[1],
        wild=wild,
        scales=scales,
        level=level,
        steps=3,
    )
