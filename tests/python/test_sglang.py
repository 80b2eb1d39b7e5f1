"""SGLang's workers load what they are handed, or fetch it. SGLang is a stand-in, refit is real."""

from collections.abc import Iterator
from typing import Any

import pytest
from stand_ins import sglang as fake

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from refit.errors import InvalidError, PeerError  # noqa: E402
from refit.integrations import sglang  # noqa: E402
from stand_ins.trainer import WAIT_S, Trainer, trainer  # noqa: E402

LOAD = "refit.integrations.sglang.load"
PULL = "refit.integrations.sglang.pull"
RECEIVER = "refit.integrations.sglang.receiver"


def _weights(value: float) -> list[tuple[str, Any]]:
    return [
        ("layer.weight", torch.full((3, 4), value)),
        ("layer.bias", torch.full((3,), value)),
    ]


@pytest.fixture
def publishing() -> Iterator[Trainer]:
    with trainer() as one:
        yield one


@pytest.fixture
def runner() -> Iterator[fake.ModelRunner]:
    made = fake.ModelRunner([LOAD, PULL])
    yield made
    sglang.close(made.model)


def _holds(model: Any, value: float) -> bool:
    return all(bool((one == value).all()) for one in model.parameters())


def test_tensors_that_are_handed_over_are_loaded(runner: fake.ModelRunner) -> None:
    assert runner.update_weights_from_tensor(_weights(3), LOAD) == (True, "Success")
    assert _holds(runner.model, 3)


def test_a_name_that_comes_twice_is_refused_before_anything_is_loaded(
    runner: fake.ModelRunner,
) -> None:  # trap 33
    with pytest.raises(InvalidError, match=r'"layer.bias" came twice'):
        runner.update_weights_from_tensor([*_weights(3), *_weights(4)[1:]], LOAD)
    assert runner.model.loads == 0


def test_an_order_makes_the_worker_fetch_each_version(
    publishing: Trainer, runner: fake.ModelRunner
) -> None:
    for version in (1, 2):
        done = publishing.publish(_weights(version))
        order = sglang.order(publishing.endpoint, version)
        assert runner.update_weights_from_tensor(order, PULL) == (True, "Success")
        assert done.result() == version
        assert _holds(runner.model, version)


def test_a_version_that_is_loaded_is_not_fetched_again(
    publishing: Trainer, runner: fake.ModelRunner
) -> None:  # trap 35
    done = publishing.publish(_weights(1))
    order = sglang.order(publishing.endpoint, 1)
    runner.update_weights_from_tensor(order, PULL)
    done.result()
    runner.update_weights_from_tensor(order, PULL)
    assert runner.model.loads == 1


def test_a_failed_load_is_refused_and_raised(
    publishing: Trainer, runner: fake.ModelRunner
) -> None:  # trap 12
    runner.model.fails_at = "layer.bias"
    done = publishing.publish(_weights(1))
    with pytest.raises(RuntimeError, match="no room"):
        runner.update_weights_from_tensor(sglang.order(publishing.endpoint), PULL)
    with pytest.raises(PeerError):
        done.result()


def test_weights_themselves_are_no_order(runner: fake.ModelRunner) -> None:
    with pytest.raises(InvalidError, match=r"integrations\.sglang\.order makes"):
        runner.update_weights_from_tensor(_weights(1), PULL)


def test_another_endpoint_moves_the_worker_there(
    publishing: Trainer, runner: fake.ModelRunner
) -> None:
    with trainer() as other:
        for one in (publishing, other):
            done = one.publish(_weights(1))
            runner.update_weights_from_tensor(sglang.order(one.endpoint), PULL)
            done.result()
        with pytest.raises(TimeoutError):
            publishing.publisher.wait_workers(1, 0)


def test_the_receiver_of_newer_servers_fetches_and_leaves(publishing: Trainer) -> None:
    context = fake.WeightUpdateReceiverContext(
        model=fake.Model(),
        device="cpu",
        tp_rank=1,
        tp_size=2,
        init_payload={"endpoint": publishing.endpoint},
    )
    receiver = fake.dynamic_import(RECEIVER)(context)
    done = publishing.publish(_weights(1))

    receiver.receive({"version": 1, "timeout_s": WAIT_S})

    assert (done.result(), receiver.version) == (1, 1)
    assert _holds(context.model, 1)
    assert publishing.publisher.workers()[0].name.endswith("-tp1")
    receiver.destroy()
    receiver.destroy()


def test_a_receiver_without_an_endpoint_is_refused() -> None:
    context = fake.WeightUpdateReceiverContext(
        model=fake.Model(), device="cpu", tp_rank=0, tp_size=1
    )
    with pytest.raises(InvalidError, match="names no trainer"):
        sglang.receiver(context)
