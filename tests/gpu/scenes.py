"""What activations.py, lending.py and host_steps.py share: scenes with the real PyTorch.

A scene returns, or raises what it has seen. Without PyTorch a program that imports this ends with
77, which says that there is nothing to run on here.
"""

import argparse
import sys
import time
import traceback

try:
    import torch
except ImportError:
    sys.exit(77)

MIB = 1 << 20


def on_gpu(device):
    return torch.device(device).type == "cuda"


def assert_same(pairs):
    """Each pair of names and tensors has the same name and the same bits."""
    for (name, mine), (other, theirs) in pairs:
        assert name == other, f"{name} stands where {other} does"
        assert torch.equal(mine.cpu(), theirs.cpu()), f"{name} has other bits"


def parser():
    made = argparse.ArgumentParser()
    made.add_argument("--device", default="cuda:0")
    return made


def play(scenes, device):
    """Plays them all by their names; 1 if one has failed, 77 where PyTorch sees no GPU."""
    if on_gpu(device) and not torch.cuda.is_available():
        return 77
    failed = 0
    for name, scene in scenes.items():
        start = time.perf_counter()
        try:
            scene(device)
            word = "passed"
        except Exception:
            traceback.print_exc(file=sys.stdout)
            failed, word = 1, "FAILED"
        print(f"{name}: {word}, {time.perf_counter() - start:.1f} s", flush=True)
    return failed
