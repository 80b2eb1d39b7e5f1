"""refit in verl by a module that verl imports in each of its processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SEES = """
import verl
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from refit.integrations.verl import RefitCheckpointEngine
print(transformer_impl.offload_fsdp_optimizer.__module__)
assert CheckpointEngineRegistry.get("refit") is RefitCheckpointEngine
"""


@pytest.mark.parametrize(
    ("module", "where"),
    [
        ("installs", "refit.integrations.verl"),
        ("refit.integrations.verl", "verl.utils.fsdp_utils"),
    ],
)
def test_a_module_that_verl_imports_first_installs_and_registers(
    module: str, where: str, tmp_path: Path
) -> None:
    (tmp_path / "installs.py").write_text(
        'from refit.integrations import verl\nverl.install({"schedule": "host_states"})\n'
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "VERL_USE_EXTERNAL_MODULES": module, "PYTHONPATH": path}
    del environment["VERL_PLATFORM"]  # the platform of these tests, which that process has not
    done = subprocess.run(
        [sys.executable, "-c", SEES],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.split()[-1] == where
