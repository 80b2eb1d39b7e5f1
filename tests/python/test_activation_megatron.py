"""Activations of Megatron-Core's own GPT model leave, with the keywords that its own configuration
becomes.

Two things of Megatron need a GPU that this model does not: the device that is current, and random
states of dropout, which it does not have. They are replaced, in a process of their own.
"""

import dataclasses
import os
import socket
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")

PROGRAM = """
import dataclasses, torch
torch.distributed.init_process_group("gloo", rank=0, world_size=1)
torch.cuda.current_device = lambda: "cpu"
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
import refit
from refit.integrations.activations import keywords, take

parallel_state.initialize_model_parallel()
initialize_rng_tracker(inference_rng_tracker=True)
shape = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 2}
config = TransformerConfig(
    **shape, use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0
)
asks = dataclasses.replace(
    config, cpu_offloading=True, cpu_offloading_num_layers=3, cpu_offloading_double_buffering=True
)
assert keywords(config) is None
chosen = take(asks)
assert chosen == {"keep_last": 1, "prefetch": 1}, chosen
assert (asks.cpu_offloading, asks.cpu_offloading_num_layers) == (False, 0)
torch.manual_seed(3)
model = GPTModel(asks, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=32)
ids = torch.randint(0, 32, (2, 16))
places = torch.arange(16).expand(2, -1)
mask = torch.triu(torch.ones(2, 1, 16, 16, dtype=torch.bool), 1)

def loss():
    model.zero_grad()
    return model(ids, places, mask, labels=ids).mean()

def gradients():
    return [one.grad.clone() for one in model.parameters()]

loss().backward()
plain = gradients()
left = []
for keep_last in (4, 2, chosen["keep_last"]):
    chosen["keep_last"] = keep_last
    offload = refit.ActivationOffload(
        model, host_bytes="8MiB", min_bytes=1024, aim="memory", **chosen
    )
    for _ in range(2):
        with offload:
            found = loss()
        found.backward()
        assert all(map(torch.equal, plain, gradients()))
    left.append(offload.stats()["refit/activation_left_bytes_last"])
    offload.close()
assert left[0] == 0 < left[1] < left[2], left
print("the same to the bit")
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_model_of_megatron_has_the_same_gradients() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "the same to the bit" in done.stdout


def test_megatrons_configuration_has_the_options() -> None:
    """But those that came after 0.16, which are read from the sources."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    from refit.integrations import activations as ours

    names = {one.name for one in dataclasses.fields(TransformerConfig)}
    assert names >= {
        *(ours.LAYERS, ours.LAYER_COUNT, ours.LAYER_ACTIVATIONS, ours.LAYER_WEIGHTS),
        *(ours.DOUBLE_BUFFERING, ours.MODULES, ours.MODULE_NAMES, ours.SMALLEST),
        *(*ours.GRAPHS, ours.GRAPH_KIND, *ours.HALF, "params_dtype", "num_layers"),
        "pipeline_model_parallel_size",
    }
