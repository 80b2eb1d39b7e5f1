"""The tensors that are moved: those that a real AdamW makes for a decoder of a wanted size.

Shapes are those of Qwen3-0.6B (28 layers, 620 states); a smaller size has fewer layers and rows of
the embedding. The weights are let go once the optimizer has stepped, so that memory goes to states.
"""

from collections.abc import Iterator
from math import prod

import torch

from refit.bench.memory import MemoryNeed

LAYERS = 28
WIDTH, SMALL_WIDTH = 1024, 64
HEAD = 128
STATES_PER_PARAMETER = 2
BYTES_PER_STATE = 4
IN_LAYERS = 0.74  # the part of the parameters that is not the embedding
COPIES = 5  # the states, a copy of them for each of three ways, and one more while they are made
NEED = MemoryNeed("offload", STATES_PER_PARAMETER * BYTES_PER_STATE * COPIES, 1 << 30)


def shapes(parameters: float) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a decoder that has about so many parameters, at least one layer's.

    Below a layer of the model's own width it is a narrow one.
    """
    width = WIDTH
    if parameters * IN_LAYERS < sum(prod(shape) for _, shape in _layer(WIDTH)):
        width = SMALL_WIDTH
    layer = sum(prod(shape) for _, shape in _layer(width))
    layers = max(1, min(LAYERS, int(parameters * IN_LAYERS / layer)))
    rows = max(1, round((parameters - layers * layer) / width))
    yield "model.embed_tokens.weight", (rows, width)
    for number in range(layers):
        for name, shape in _layer(width):
            yield f"model.layers.{number}.{name}", shape
    yield "model.norm.weight", (width,)


def _layer(width: int) -> list[tuple[str, tuple[int, ...]]]:
    return [
        ("input_layernorm.weight", (width,)),
        ("self_attn.q_proj.weight", (2 * width, width)),
        ("self_attn.k_proj.weight", (width, width)),
        ("self_attn.v_proj.weight", (width, width)),
        ("self_attn.o_proj.weight", (width, 2 * width)),
        ("self_attn.q_norm.weight", (HEAD,)),
        ("self_attn.k_norm.weight", (HEAD,)),
        ("post_attention_layernorm.weight", (width,)),
        ("mlp.gate_proj.weight", (3 * width, width)),
        ("mlp.up_proj.weight", (3 * width, width)),
        ("mlp.down_proj.weight", (width, 3 * width)),
    ]


def adamw_states(parameters: float) -> list[torch.Tensor]:
    """``exp_avg`` and ``exp_avg_sq`` of every parameter, filled so that each byte counts."""
    weights = [torch.nn.Parameter(torch.zeros(shape)) for _, shape in shapes(parameters)]
    for weight in weights:
        weight.grad = torch.ones(1).expand(weight.shape)
    optimizer = torch.optim.AdamW(weights, foreach=False)
    optimizer.step()
    moments = [it[name] for it in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    for moment in moments:
        moment.view(torch.int32).random_()
    return moments


def checksum(tensors: list[torch.Tensor]) -> list[int]:
    """A number for each tensor that a changed byte changes."""
    return [int(it.view(torch.int32).sum(dtype=torch.int64)) for it in tensors]
