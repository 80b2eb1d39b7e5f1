"""verl on a CPU, in the processes of the tests and in those that they start."""

import os
import sys
from pathlib import Path

os.environ["VERL_PLATFORM"] = "cpu"
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "shared")]
