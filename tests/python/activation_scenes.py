"""Small models whose saved tensors leave, and training steps of them that are the same to the bit
every time: what test_activations*.py play with and without refit.ActivationOffload."""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import refit
import torch
import torch.nn.functional as F
import training
from hooked import calls_refit
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

WIDTH = 24
ROWS = 6

Block = Callable[[], Any]
"""Makes what is entered around a forward pass."""

# ---- Layers. Each takes and gives a (ROWS, WIDTH) tensor, and saves tensors of some odd kind.


class Relu(nn.Module):
    """What ReLU gives is saved twice: by ReLU, and by the Linear that takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))


class InPlace(nn.Module):
    """Changes in place what is not saved yet."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.norm(x))
        F.relu_(y)
        return y.mul(0.5).add_(x)


class Attention(nn.Module):
    """Queries, keys and values are slices of one tensor; attention by SDPA."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            one.view(ROWS, 4, WIDTH // 4).transpose(0, 1) for one in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
        return x + self.out(y[0].transpose(0, 1).reshape(ROWS, WIDTH))


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.inner(F.dropout(x, 0.2)).tanh(), 0.4)


class Complex(nn.Module):
    """Complex tensors, some of them conjugated or negated by a bit alone."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
        self.mix = nn.Parameter(torch.randn(ROWS, ROWS, dtype=torch.complex64) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x) * self.filter
        mixed = torch.mm(self.mix, spectrum).conj()
        mixed = mixed * spectrum.conj()
        bent = mixed.imag * mixed.conj().imag  # of which the second is negated by a bit
        return x + torch.fft.irfft(mixed, WIDTH) * 0.1 + F.pad(bent, (0, WIDTH - bent.shape[1]))


class Views(nn.Module):
    """Saves views with offsets, gaps, no order, and of more elements than there is memory for."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        odd, even = y[:, 1::2], y[:, ::2]
        z = torch.cat([odd * even, even.exp() * odd], dim=1)
        z = z.t().contiguous().t()
        z = z * z[1:2].expand(ROWS, WIDTH) + z[:, 3:4] * z.as_strided((ROWS, WIDTH), (1, ROWS), 0)
        return x + z.flip(0).sin() * 0.1


class ReadsTwice(torch.autograd.Function):
    """Which non-reentrant checkpointing refuses."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y, x, None)
        ctx.x = x  # no hook sees this one
        return x * y * y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, y, again, nothing = ctx.saved_tensors
        first, second, third, _ = ctx.saved_tensors
        assert nothing is None
        assert same_bits(x, first)
        assert same_bits(y, second)
        assert same_bits(again, third)
        assert same_bits(x, ctx.x)
        return gradient * second * y, gradient * (x + again) * second


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = ReadsTwice.apply(x, self.inner(x).sigmoid())
        return result


class Smallest(nn.Module):
    """Empty tensors and scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nothing = x[:, :0] * x[:, :0].exp()
        whole = torch.cat([x, nothing * nothing], dim=1)
        return whole * (whole.mean() * self.gain).exp() + x[:0].sum() * x.square().sum().sqrt()


class Chosen(nn.Module):
    """Saves masks, numbers of rows, and a buffer."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.rand(ROWS, WIDTH) > 0.3)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.where(self.mask, self.inner(x), x * 0.5)
        best, order = y.topk(WIDTH // 2)
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0))
        return y.scatter_add(1, order, best.square()) + x.masked_fill(y > 0.5, 0.25)


class Sparse(nn.Module):
    """Saves tensors that have no storage."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(ROWS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ROWS, device=x.device)
        some = torch.sparse_coo_tensor(
            torch.stack([places, places.flip(0)]), self.values * 0.5, (ROWS, ROWS)
        )
        return x + torch.sparse.mm(some, x.tanh())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.inner(x[:, None])
        result: torch.Tensor = x + y[:, 0]
        return result


class Conv(nn.Module):
    """Changes its buffers in place, and its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.reshape(2, 4, 3, ROWS)
        y = F.relu(self.norm(self.inner(y)), inplace=True)
        return x + F.max_pool2d(y, 3, 1, 1).reshape(ROWS, WIDTH)


class Parametrized(nn.Module):
    """Weights that are computed from parameters, and are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with nn.utils.parametrize.cached():
            return x + self.inner(self.inner(x).tanh()) * 0.3


PARTS = [1, 3, ROWS - 4]
"""Rows of which a batch of sequences of different lengths is made."""


class Jagged(nn.Module):
    """Its ragged size is known by the identity of its offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts: Any = torch.nested.as_nested_tensor(list(x.split(PARTS)), layout=torch.jagged)
        y = F.gelu(self.inner(self.norm(parts))) * parts
        return x + y.values().sin() * 0.3


class Nested(nn.Module):
    """The older layout, whose tensors have no sizes and strides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts: Any = torch.nested.as_nested_tensor(list(x.split(PARTS)), layout=torch.strided)
        y = F.gelu(self.inner(parts))
        return x + torch.cat([one.sin() for one in y.unbind()]) * 0.3


class SavesUnusual(torch.autograd.Function):
    """Saves a quantized tensor, and zeros that have no memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        coarse = torch.quantize_per_tensor(x.detach().cpu(), 0.01, 128, torch.quint8)
        ctx.save_for_backward(coarse, torch._efficientzerotensor(x.shape, device=x.device))
        return x * coarse.dequantize().to(x.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        coarse, zeros = ctx.saved_tensors
        return gradient * coarse.dequantize().to(gradient.device) + zeros


class Unusual(nn.Module):
    """Besides, tensors that ``torch.func`` wraps are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = SavesUnusual.apply(self.inner(x))
        _, slope = torch.func.jvp(lambda one: one.sin() * one, (y,), (torch.ones_like(y),))
        return x + slope * 0.1 + torch.vmap(lambda one: one.tanh() * one)(y)


RARE: dict[str, type[nn.Module]] = {one.__name__: one for one in (Jagged, Nested, Unusual)}
"""Layers that not every way of checkpointing takes."""

KINDS: dict[str, type[nn.Module]] = {
    one.__name__: one
    for one in (
        *(Relu, InPlace, Attention, Dropout, Complex, Views, Custom),
        *(Smallest, Chosen, Sparse, Recurrent, Conv, Parametrized),
    )
}


class Stack(nn.Module):
    """An embedding, layers, and a head that shares the embedding's table."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDTH)
        self.layers = nn.ModuleList({**KINDS, **RARE}[kind]() for kind in kinds)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.table.weight
        self.around: Callable[..., torch.Tensor] | None = None
        """Calls a layer, in place of a plain call."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x) if self.around is None else self.around(layer, x)
            x = F.layer_norm(x, (WIDTH,))
        result: torch.Tensor = self.head(self.norm(x))
        return result


class Net(nn.Module):
    """Layers one after the other; smooth, so that second derivatives are not zero."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.SiLU())
            for _ in range(layers)
        )
        self.seen = as_given
        """Sees what each layer gives, and says what the next one takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = self.seen(number, layer(x))
        return x


def as_given(_: int, x: torch.Tensor) -> torch.Tensor:
    return x


def net(layers: int = 5) -> Net:
    torch.manual_seed(5)
    return Net(layers).to(training.DEVICE)


def batch(number: int = 0) -> torch.Tensor:
    return training.drawn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, block: Block = nullcontext, number: int = 0) -> torch.Tensor:
    """Of a forward pass in a block."""
    with block():
        loss: torch.Tensor = model(batch(number)).pow(2).sum()
    return loss


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Copies of them; the model has none any more."""
    found = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    return found


def stepped(model: nn.Module, block: Block = nullcontext) -> list[torch.Tensor]:
    """The gradients of a forward pass in a block."""
    loss_of(model, block).backward()
    return gradients(model)


def is_hooked(model: nn.Module) -> bool:
    """Whether a forward pass of the model calls code of refit."""
    return bool(calls_refit(lambda: model(batch())))


# ---- Scenes.


@dataclass
class Scene:
    """A model, its batches and its loss."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], dict[str, torch.Tensor]]
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]
    layers: Callable[[Any], Any]

    def model(self, seed: int = 3) -> nn.Module:
        torch.manual_seed(seed)
        return self.make().to(training.DEVICE).train()

    def drawn(self, number: int) -> dict[str, torch.Tensor]:
        made = self.batch(torch.Generator().manual_seed(number))
        return {name: one.to(training.DEVICE) for name, one in made.items()}


def stack(*kinds: str) -> Scene:
    def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["tokens"]), batch["labels"])

    def batch(source: torch.Generator) -> dict[str, torch.Tensor]:
        return {
            "tokens": torch.randint(0, 40, (ROWS,), generator=source),
            "labels": torch.randint(0, 40, (ROWS,), generator=source),
        }

    return Scene(lambda: Stack(list(kinds)), batch, loss, lambda model: model.layers)


def _transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


TOKENS = 20
SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "attention_dropout": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _language(config: str, model: str, layers: Callable[[Any], Any], **options: Any) -> Scene:
    def make() -> nn.Module:
        library = _transformers()
        made: nn.Module = getattr(library, model)(getattr(library, config)(**options))
        return made

    def batch(source: torch.Generator) -> dict[str, torch.Tensor]:
        tokens = torch.randint(3, 96, (2, TOKENS), generator=source)
        return {"input_ids": tokens, "labels": tokens, "attention_mask": _mask(source)}

    return Scene(make, batch, lambda model, batch: model(**batch).loss, layers)


def _mask(source: torch.Generator) -> torch.Tensor:
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, TOKENS - int(torch.randint(1, 5, (), generator=source)) :] = 0
    return mask


def _vision() -> Scene:
    def make() -> nn.Module:
        library = _transformers()
        config = library.ViTConfig(
            hidden_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=80,
            image_size=16,
            patch_size=4,
            num_labels=5,
            hidden_dropout_prob=0.1,
        )
        made: nn.Module = library.ViTForImageClassification(config)
        return made

    def batch(source: torch.Generator) -> dict[str, torch.Tensor]:
        pixels = torch.randn(2, 3, 16, 16, generator=source)
        return {"pixel_values": pixels, "labels": torch.randint(0, 5, (2,), generator=source)}

    return Scene(
        make, batch, lambda model, batch: model(**batch).loss, lambda model: model.vit.layers
    )


def _inner(model: Any) -> Any:
    return model.model.layers


MODELS: dict[str, Scene] = {
    "llama": _language("LlamaConfig", "LlamaForCausalLM", _inner, **SMALL),
    "qwen2": _language(
        "Qwen2Config", "Qwen2ForCausalLM", _inner, tie_word_embeddings=True, **SMALL
    ),
    "gpt2": _language(
        "GPT2Config",
        "GPT2LMHeadModel",
        lambda model: model.transformer.h,
        vocab_size=96,
        n_embd=48,
        n_layer=4,
        n_head=4,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "mixtral": _language(
        "MixtralConfig",
        "MixtralForCausalLM",
        _inner,
        num_local_experts=4,
        num_experts_per_tok=2,
        **SMALL,
    ),
    "vit": _vision(),
}

STACKS: dict[str, Scene] = {
    "mlp": stack(*["Relu"] * 4),
    "attention": stack(*["Attention"] * 4),
    "conv": stack("Conv", "InPlace", "Conv", "Recurrent"),
    "odd": stack("Complex", "Views", "Smallest", "Chosen", "Custom", "Sparse"),
    "drops": stack("Dropout", "Attention", "Dropout", "Parametrized", "Dropout"),
}

RARELY = {kind: stack(kind, "Relu", kind) for kind in RARE}

SCENES = {**STACKS, **MODELS}

# ---- Checkpointing.

_SAVED = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def _policy(_ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


_SELECTIVE = functools.partial(create_selective_checkpoint_contexts, _policy)


def checkpointed(scene: Scene, model: Any, way: str) -> None:
    """Lets a model checkpoint its layers in this way."""
    layers = list(scene.layers(model))
    if way == "none":
        return
    if way.startswith("wrapper"):
        if not isinstance(model, Stack):
            model.config.use_cache = False  # recomputed layers would write to it again
        _wrap(model, layers, way)
    elif isinstance(model, Stack):
        model.around = _AROUND[way]
    else:
        given = {"use_reentrant": way == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=given)


def _wrap(model: nn.Module, layers: list[nn.Module], way: str) -> None:
    kind = CheckpointImpl.REENTRANT if "reentrant" in way else CheckpointImpl.NO_REENTRANT
    options = {"context_fn": _SELECTIVE} if "selective" in way else {}
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(
            checkpoint_wrapper, checkpoint_impl=kind, **options
        ),
        check_fn=lambda one: any(one is layer for layer in layers),
    )


def _by_keyword(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = checkpoint(lambda *, x: layer(x), x=x, use_reentrant=False)
    return result


def _nested(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> Any:
        return checkpoint(layer, y, use_reentrant=False)

    result: torch.Tensor = checkpoint(inner, x, use_reentrant=False)
    return result


_AROUND: dict[str, Callable[..., torch.Tensor]] = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "non-reentrant": functools.partial(checkpoint, use_reentrant=False),
    "selective": functools.partial(checkpoint, use_reentrant=False, context_fn=_SELECTIVE),
    "keyword": _by_keyword,
    "nested": _nested,
}

BOTH_WAYS = ("none", "reentrant", "non-reentrant", "wrapper", "wrapper reentrant")
"""Ways of checkpointing that every scene has."""
STACK_WAYS = (*BOTH_WAYS, "wrapper selective", "selective", "keyword", "nested")


def ways_of(scene: str) -> tuple[str, ...]:
    """The ways of checkpointing that a scene has without refit."""
    if scene == "odd":  # its custom function reads what it saved twice
        return "none", "reentrant"
    if scene == "conv":  # it changes in place what selective policies save
        return tuple(one for one in STACK_WAYS if "selective" not in one)
    return BOTH_WAYS if scene in MODELS else STACK_WAYS


# ---- Runs.


@dataclass
class Run:
    """Training steps that depend on nothing but their number, and what they left."""

    scene: Scene
    checkpointing: str = "none"
    accumulation: int = 1
    order: str = "each"
    """"each": forward, backward; "all": all forwards of a step first; "reversed": so, with the
    backwards in reverse; "sum": one backward for all; "inside": backward in the block."""
    seen: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.scene.model()
        checkpointed(self.scene, self.model, self.checkpointing)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.steps = 0

    @property
    def layers(self) -> Any:
        return self.scene.layers(self.model)

    def step(self, block: Block = nullcontext) -> None:
        torch.manual_seed(100 + self.steps)
        losses: list[torch.Tensor] = []
        waiting: list[torch.Tensor] = []
        for micro in range(self.accumulation):
            batch = self.scene.drawn(10 * self.steps + micro)
            with block():
                loss = self.scene.loss(self.model, batch) / self.accumulation
                if self.order == "inside":
                    loss.backward()
            losses.append(loss.detach())
            if self.order == "each":
                loss.backward()
            elif self.order != "inside":
                waiting.append(loss)
            del loss
        if self.order == "sum":
            torch.stack(waiting).sum().backward()
        while self.order in ("all", "reversed") and waiting:
            waiting.pop(0 if self.order == "all" else -1).backward()
        waiting.clear()
        self.seen.append(self.picture(losses))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def picture(self, losses: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """All that training has made."""
        made = {f"loss {number}": one for number, one in enumerate(losses)}
        for name, one in self.model.named_parameters():
            made[f"parameter {name}"] = one
            if one.grad is not None:
                made[f"gradient {name}"] = one.grad
        made |= {f"buffer {name}": one for name, one in self.model.named_buffers()}
        made["random numbers"] = torch.get_rng_state()
        if training.DEVICE != "cpu":
            made["random numbers there"] = torch.cuda.get_rng_state()
        return {name: one.detach().cpu().clone() for name, one in made.items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.equal(bits(one), bits(other))


def assert_same(alone: Run, moved: Run) -> None:
    """What both runs have seen is equal to the bit."""
    assert len(alone.seen) == len(moved.seen)
    for number, (mine, theirs) in enumerate(zip(alone.seen, moved.seen, strict=True)):
        assert list(mine) == list(theirs), f"step {number}"
        for name, one in mine.items():
            assert same_bits(one, theirs[name]), f"{name}, step {number}"


@functools.cache
def _plain(scene: str, checkpointing: str, accumulation: int, order: str, steps: int) -> Run:
    run = Run({**SCENES, **RARELY}[scene], checkpointing, accumulation, order)
    for _ in range(steps):
        run.step()
    run.model = nn.Module()
    del run.optimizer
    return run


def plain(
    scene: str,
    checkpointing: str = "none",
    accumulation: int = 1,
    order: str = "each",
    steps: int = 3,
) -> Run:
    """A run without refit; each is made once."""
    with quiet():
        return _plain(scene, checkpointing, accumulation, order, steps)


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings of libraries about their own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


OPTIONS: dict[str, Any] = {"host_bytes": "16MiB", "min_bytes": 1, "aim": "memory"}
"""All that may leave does."""


@contextmanager
def offloaded(of: Any, entry: str = "with", **options: Any) -> Iterator[tuple[Any, Block]]:
    """ActivationOffload of a Run's model, or of a model that has layers; and each pass's block."""
    given = {**OPTIONS, **options}
    if "layers" not in given:
        given["layers"] = of.layers
    with ExitStack() as stack:
        activations = refit.ActivationOffload(of.model if isinstance(of, Run) else of, **given)
        stack.callback(activations.close)
        if entry == "attach":
            activations.attach()
        yield activations, (nullcontext if entry == "attach" else lambda: activations)


def left_bytes(activations: Any) -> float:
    """That left in the last whole forward pass."""
    return figures(activations)["activation_left_bytes_last"]


def used_bytes(activations: Any) -> float:
    """Of the arena."""
    return figures(activations)["activation_used_bytes"]


def figures(activations: Any) -> dict[str, float]:
    """Its statistics without the prefix."""
    return {name.removeprefix("refit/"): one for name, one in activations.stats().items()}


def compare(
    scene: str,
    checkpointing: str = "none",
    accumulation: int = 1,
    order: str = "each",
    steps: int = 3,
    entry: str = "with",
    **options: Any,
) -> dict[str, float]:
    """Trains with and without; all bits are equal. Gives the statistics."""
    alone = plain(scene, checkpointing, accumulation, order, steps)
    with quiet():
        moved = Run({**SCENES, **RARELY}[scene], checkpointing, accumulation, order)
        with offloaded(moved, entry, **options) as (activations, block):
            for _ in range(steps):
                moved.step(block)
            found = figures(activations)
    assert_same(alone, moved)
    return found
