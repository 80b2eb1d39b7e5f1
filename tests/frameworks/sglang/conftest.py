"""What SGLang's processes get: the stubs on their path, one thread, no network."""

import os
import sys
from pathlib import Path

STUBS = str(Path(__file__).with_name("stubs"))
sys.path.insert(0, STUBS)  # of processes that are spawned
HERE = str(Path(__file__).parent)  # for recording_loader.py
os.environ["PYTHONPATH"] = os.pathsep.join([STUBS, HERE, os.environ.get("PYTHONPATH", "")])
os.environ.update(
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    SGLANG_CPU_OMP_THREADS_BIND="0|1",  # of two tensor-parallel ranks
    SGLANG_NCCL_SO_PATH="/none",  # PyTorch's package brings NCCL, with which SGLang looks for GPUs
)
