"""``refit.integrations.state_offload`` reads and changes what DeepSpeed itself has parsed."""

from typing import Any

import pytest
import refit
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from refit.errors import UnsupportedError
from refit.integrations.state_offload import keywords, take


def parsed(**offload: Any) -> DeepSpeedZeroConfig:
    return DeepSpeedZeroConfig(stage=3, offload_optimizer={"device": "cpu", **offload})


@pytest.mark.parametrize(
    ("offload", "expected"),
    [
        ({}, {"schedule": refit.CpuStep(fraction=1.0)}),
        ({"ratio": 0.3}, {"schedule": refit.CpuStep(fraction=0.3)}),
        ({"pin_memory": False}, {"offload_pin": "off", "schedule": refit.CpuStep(fraction=1.0)}),
        ({"device": "none"}, {}),
    ],
)
def test_what_deepspeed_has_parsed_is_taken_and_off_there(
    offload: dict[str, Any], expected: dict[str, Any]
) -> None:
    zero = parsed(**offload)
    assert keywords(zero) == expected
    assert take(zero) == expected
    assert zero.offload_optimizer.device == OffloadDeviceEnum.none
    assert keywords(zero) == {}
    assert keywords(DeepSpeedZeroConfig(stage=3)) == {}


def test_a_disk_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="on no disk"):
        take(parsed(device="nvme", nvme_path="/disk"))
