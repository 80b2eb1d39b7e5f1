"""Small language models and a tokenizer, made on the spot, for engines to load from a folder."""

from pathlib import Path
from typing import Any

import torch

WORDS = 256
"""Words of the vocabulary; the tokenizer calls them w0, w1, ..."""

_SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,  # of 32 elements: the smallest head of vLLM's and SGLang's kernels
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "tied_llama": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "tie_word_embeddings": False,
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
    ),
}


def make(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """A model of transformers; the same weights for the same seed."""
    import transformers

    family, differs = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **differs, **sizes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
    with torch.no_grad():  # large enough for greedy tokens to depend on each weight
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    return model


def make_tokenizer() -> Any:
    """One word, one token."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3}
    words.update({f"w{index}": index for index in range(len(words), WORDS)})
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


def save(model: Any, folder: Path | str) -> str:
    """Writes the model and the tokenizer as an engine loads them; returns the folder."""
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def change(model: Any, seed: int) -> None:
    """Changes each parameter in place, as an optimizer's step does; the same for the same seed."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=source, dtype=torch.float32)
            weight.add_(noise.to(weight.dtype) * 0.02)
