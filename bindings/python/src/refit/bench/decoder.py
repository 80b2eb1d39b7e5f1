"""The model of the bench of activations: a decoder in plain PyTorch, and batches of tokens."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

HEAD_WIDTH = 64


@dataclass(frozen=True)
class Sizes:
    """Of a decoder."""

    width: int = 256
    layers: int = 6
    vocabulary: int = 1024


class Layer(nn.Module):
    """Attention to what came before, then a gated feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        parts = self.qkv(self.attention_norm(hidden)).view(batch, length, 3, -1, HEAD_WIDTH)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.mlp_norm(hidden)
        gated: torch.Tensor = self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return hidden + gated


class Decoder(nn.Module):
    """The loss of predicting each token from those before it. With ``checkpointed`` each layer
    keeps its input only, and is computed again in the backward pass."""

    def __init__(self, sizes: Sizes, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes.width) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            if self.checkpointed:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def tokens_of(batch: int, length: int, vocabulary: int) -> torch.Tensor:
    """The same each time."""
    made = torch.Generator().manual_seed(11)
    return torch.randint(vocabulary, (batch, length + 1), generator=made)
