"""What fresh engines answer, one after another in this process: fresh_engines.py OPTIONS FOLDER...

OPTIONS are JSON. Prints one line of JSON with the answers of all. An engine in its own process
takes a second to start, and one with a process for its core 20 s.
"""

import gc
import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from extension_engines import OPTIONS, greedy


def main(options: dict[str, Any], folders: list[str]) -> None:
    from vllm import LLM

    answers = []
    for folder in folders:
        llm = LLM(folder, **{**OPTIONS, **options})
        answers.append(greedy(llm))
        del llm
        gc.collect()
    print(json.dumps(answers))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
