"""SkyRL on a CPU, in the process of the tests and in those that it starts."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]
