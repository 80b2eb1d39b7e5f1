"""Refuses models of vLLM and SGLang whose layers hold quantized weights.

Both engines give a layer a ``quant_method``. The classes of those that keep weights as a checkpoint
has them are called Unquantized..., or inherit from one that is. Every other one packs or scales
weights for its kernels, and published ones do not fit into these. A layer also has the
``quant_config`` that it was made with, under which it may be left as it is. It knows nothing else
of the two.

Drawn after {vllm,sglang}/**/layers/linear.py, vocab_parallel_embedding.py and fused_moe.
"""

from typing import Any

from refit.errors import UnsupportedError


def refuse_quantized(model: Any) -> None:
    """UnsupportedError with the name and the method of the first layer that is quantized, or that
    was made with a configuration of quantization."""
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        config = getattr(layer, "quant_config", None)
        if method is not None and not _keeps_weights(method):
            found = type(method).__name__
        elif config is not None:
            found = config.get_name() if hasattr(config, "get_name") else type(config).__name__
        else:
            continue
        raise UnsupportedError(
            f'"{name}" is quantized ({found}), and refit brings weights as the trainer has them: '
            "start the engine without quantization. Nothing was loaded"
        )


def _keeps_weights(method: Any) -> bool:
    return any("Unquantized" in one.__name__ for one in type(method).__mro__)
