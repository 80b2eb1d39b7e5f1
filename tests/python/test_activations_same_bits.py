"""Training whose saved tensors leave has the bits of training without refit: models, ways of
checkpointing, accumulation, orders of backward passes, and every option of ActivationOffload."""

from typing import Any

import pytest
from activation_scenes import (
    KINDS,
    MODELS,
    RARELY,
    SCENES,
    STACKS,
    Run,
    assert_same,
    compare,
    offloaded,
    quiet,
    stack,
    ways_of,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("default_device")

ORDERS = ("each", "all", "reversed", "sum", "inside")
WITHOUT_CHANCE = settings(
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("entry", ["with", "attach"])
@pytest.mark.parametrize("scene", list(SCENES))
def test_gradients_losses_and_random_numbers_have_same_bits(scene: str, entry: str) -> None:
    found = compare(scene, entry=entry)
    assert found["activation_left_bytes_last"] > 0


@pytest.mark.parametrize("scene", list(RARELY))
def test_tensors_without_single_storage_have_same_bits(scene: str) -> None:
    found = compare(scene)
    assert found["activation_left_bytes_last"] > 0


@pytest.mark.parametrize(
    ("scene", "way"), [(scene, way) for scene in SCENES for way in ways_of(scene)[1:]]
)
def test_what_checkpoints_its_layers_has_the_same_bits(scene: str, way: str) -> None:
    left = compare(scene, way)["activation_left_bytes_last"]
    assert left > 0 or scene in STACKS


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", ["none", "reentrant", "non-reentrant", "wrapper"])
@pytest.mark.parametrize("scene", ["drops", "llama"])
def test_any_order_of_backward_passes_has_the_same_bits(scene: str, way: str, order: str) -> None:
    compare(scene, way, accumulation=3, order=order)


@st.composite
def drawn_options(draw: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "min_bytes": draw(st.sampled_from([1, 600, 3000, "64KiB"])),
        "in_flight": draw(st.sampled_from([1, 2, 16])),
        "prefetch": draw(st.sampled_from([0, 1, 3, 16])),
        "keep_last": draw(st.sampled_from([0, 1, 2, 5])),
        "aim": draw(st.sampled_from(["memory", "memory", "overlap"])),
        "host_bytes": draw(st.sampled_from(["4KiB", "20KiB", "200KiB", "16MiB"])),
    }
    dropped = draw(st.sets(st.sampled_from(["in_flight", "prefetch", "keep_last"])))
    return {name: one for name, one in given.items() if name not in dropped}


@pytest.mark.parametrize(
    "scene", [*STACKS, *(pytest.param(one, marks=pytest.mark.slow) for one in MODELS)]
)
@settings(WITHOUT_CHANCE, max_examples=8)
@given(data=st.data())
def test_any_options_have_the_same_bits(scene: str, data: Any) -> None:
    options = data.draw(drawn_options())
    if scene not in ("gpt2", "vit") and data.draw(st.booleans()):
        options["layers"] = None
    compare(
        scene,
        data.draw(st.sampled_from(["none", "none", *ways_of(scene)])),
        data.draw(st.sampled_from([1, 1, 2, 3])),
        data.draw(st.sampled_from(ORDERS)),
        data.draw(st.sampled_from([2, 4])),
        data.draw(st.sampled_from(["with", "attach"])),
        **options,
    )


@settings(WITHOUT_CHANCE, max_examples=20)
@given(data=st.data())
def test_any_stack_has_the_same_bits(data: Any) -> None:
    kinds = data.draw(st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=7))
    scene = stack(*kinds)
    ways = ways_of("odd" if "Custom" in kinds else "conv")
    way = data.draw(st.sampled_from(["none", "none", *ways]))
    accumulation = data.draw(st.sampled_from([1, 2]))
    order = data.draw(st.sampled_from(ORDERS))
    options = data.draw(drawn_options())
    runs = [Run(scene, way, accumulation, order) for _ in range(2)]
    with quiet():
        for _ in range(3):
            runs[0].step()
        with offloaded(runs[1], **options) as (_, block):
            for _ in range(3):
                runs[1].step(block)
    assert_same(*runs)


def test_every_stack_is_drawn_from_layers_that_train() -> None:
    for kind in KINDS:
        run = Run(stack(kind))
        run.step()
        trained = [name for name in run.seen[0] if name.startswith("gradient layers.0")]
        assert trained, kind
