"""The one name of vLLM's kernels that SGLang 0.5.23 imports on a machine without a GPU.

SGLang's RotaryEmbedding imports it when a model is made, for devices it has no kernel for, and
calls it in ``forward_cuda`` alone; on a CPU ``forward_native`` runs. So no number that the tests
compare comes from here, and a call would fail them.
"""

from typing import Any


def rotary_embedding(*_: Any) -> None:
    raise AssertionError("SGLang called a kernel of vLLM, which is not installed")
