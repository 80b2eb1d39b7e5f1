"""The other end of grpo_trl.py: a process that holds the published weights and samples from them.

It waits for two things at once, a new version of the weights and prompts to complete. A version is
loaded inside ``with update:``, which accepts it; the trainer goes on once all workers have.
"""

import hashlib
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

WORDS = ["<pad>", "<eos>", *"0123456789"]


def tiny_model(seed: int = 0) -> "LlamaForCausalLM":
    """A Llama of 130,000 parameters: made here, nothing is downloaded."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
            attn_implementation="sdpa",
        )
    )


def digest(tensors: Iterable[tuple[str, Any]]) -> str:
    """A digest of names and bytes: equal digests mean equal weights."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        total.update(name.encode())
        total.update(tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()[:12]


def sample(model: "LlamaForCausalLM", prompts: list[list[int]], length: int) -> list[list[int]]:
    """One completion of ``length`` tokens for each prompt."""
    import torch

    tokens = torch.tensor(prompts)
    with torch.no_grad():
        for _ in range(length):
            chances = model(input_ids=tokens).logits[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
    return [row[len(prompts[0]) :] for row in tokens.tolist()]


def run_worker(name: str, endpoint: str, trainer: Connection, seed: int) -> None:
    """Answers prompts with the newest version, until the trainer closes its end."""
    import refit
    import torch

    torch.set_num_threads(1)
    model = tiny_model().eval()
    torch.manual_seed(seed)
    version, held = 0, ""
    with refit.Subscriber(endpoint, worker=name) as subscriber:
        while True:
            ready = wait([trainer, subscriber.fileno()])
            if subscriber.fileno() in ready:
                update = subscriber.next(0.0)
                with update:
                    update.load_into(model)
                version, held = update.version, digest(model.named_parameters())
            if trainer in ready:
                try:
                    prompts = trainer.recv()
                except EOFError:
                    return
                trainer.send((version, held, sample(model, prompts, 1)))
