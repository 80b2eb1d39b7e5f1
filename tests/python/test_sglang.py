"""What tests/frameworks/sglang cannot have with the real SGLang on a CPU: an older one, quantized
layers, ranks that differ, and servers that answer otherwise."""

import http.server
import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from stand_ins import sglang as fake

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from refit.errors import (  # noqa: E402
    DeadlineError,
    InvalidError,
    PeerError,
    StateError,
    UnsupportedError,
)
from refit.integrations import sglang  # noqa: E402
from refit.integrations._receiver import subscribe  # noqa: E402
from refit.weights.subscriber import Subscriber  # noqa: E402
from stand_ins.trainer import WAIT_S, Trainer, trainer  # noqa: E402


def _weights(value: float) -> list[tuple[str, Any]]:
    return [("layer.weight", torch.full((3, 4), value)), ("layer.bias", torch.full((3,), value))]


@pytest.fixture
def publishing() -> Iterator[Trainer]:
    with trainer() as one:
        yield one


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> fake.Engine:
    module = ModuleType(fake.MODULE)
    kind = fake.model_runner_class()
    module.ModelRunner = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fake.MODULE, module)
    return fake.Engine(kind(), sglang.LOADERS)


def _holds(engine: fake.Engine, value: float) -> bool:
    return all(bool((one == value).all()) for one in engine.runner.model.parameters())


@pytest.mark.parametrize(
    ("says", "loads"), [("nothing", 1), ("before", 2), ("now", 2), ("unreadable", 2)]
)
def test_an_engine_without_sessions_takes_each_version(
    publishing: Trainer,
    engine: fake.Engine,
    monkeypatch: pytest.MonkeyPatch,
    says: str,
    loads: int,
) -> None:
    """The loader loads the first and is recorded, which is not counted; it loads all of them where
    SGLang says that its experts move, as it says now or as it said before, and where it does not
    say."""
    moves = SimpleNamespace(enable_eplb=True)
    modules = {
        "before": ("server_args", SimpleNamespace(get_global_server_args=lambda: moves)),
        "now": ("runtime_context", SimpleNamespace(get_exec=lambda: SimpleNamespace(moe=moves))),
        "unreadable": ("runtime_context", SimpleNamespace()),
    }
    if says in modules:
        name, module = modules[says]
        monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", module)
    for version in (1, 2):
        done = publishing.publish(_weights(version))
        assert sglang.refit_update(engine, publishing.endpoint, version, WAIT_S) == version
        assert done.result() == version
        assert _holds(engine, version)
    assert engine.flushes == 2
    assert engine.runner.model.loads == loads


def test_version_is_loaded_again_after_direct_load(
    publishing: Trainer, engine: fake.Engine
) -> None:
    done = publishing.publish(_weights(1))
    assert sglang.refit_update(engine, publishing.endpoint, 1, WAIT_S) == done.result() == 1
    sglang.refit_load(engine, _weights(5))
    assert sglang.refit_update(engine, publishing.endpoint, 1, WAIT_S) == 1
    assert _holds(engine, 1)


def test_a_trainer_that_is_started_again_counts_from_one(engine: fake.Engine) -> None:
    endpoint = f"user://again-{os.getpid()}"
    for value in (3, 4):
        with trainer(endpoint) as one:
            done = one.publish(_weights(value))
            assert sglang.refit_update(engine, endpoint, 1, WAIT_S) == done.result() == 1
        assert _holds(engine, value)


@pytest.mark.slow  # the deadline leaves time for version 2 to arrive
def test_unwanted_version_is_named_and_comes_when_requested(
    publishing: Trainer, engine: fake.Engine
) -> None:
    done = publishing.publish(_weights(1))
    assert sglang.refit_update(engine, publishing.endpoint, 1, WAIT_S) == done.result() == 1
    done = publishing.publish(_weights(2))
    with pytest.raises(DeadlineError, match=r"version 9 is waited for, and 2 was refused"):
        sglang.refit_update(engine, publishing.endpoint, 9, 20.0)
    with pytest.raises(PeerError, match="version 9 is waited for"):
        done.result()
    assert sglang.refit_update(engine, publishing.endpoint, 2, WAIT_S) == 2
    assert _holds(engine, 2)


def test_address_without_scheme_and_negative_version_are_refused(
    engine: fake.Engine,
) -> None:
    with pytest.raises(InvalidError, match="begins with http://"):
        sglang.Server("127.0.0.1:30000")
    with pytest.raises(InvalidError, match="version is -1"):
        sglang.refit_update(engine, "user://absent", -1)


def test_a_failure_is_a_value_though_no_plugin_was_loaded(
    publishing: Trainer, engine: fake.Engine
) -> None:
    with pytest.raises(DeadlineError):
        sglang.refit_update(engine, publishing.endpoint, timeout=0.1)
    assert engine.runner.model.loads == 0
    with pytest.raises(InvalidError, match=r'"layer.bias" came twice'):
        sglang.refit_load(engine, [*_weights(3), *_weights(4)[1:]])
    done = publishing.publish([("layer.none", torch.ones(3))])
    named = 'at weight "layer.none": KeyError'
    with pytest.raises(PeerError, match=named):
        sglang.refit_update(engine, publishing.endpoint, timeout=WAIT_S)
    with pytest.raises(PeerError, match=named):
        done.result()
    with pytest.raises(PeerError, match=named):
        sglang.refit_load(engine, {"layer.none": torch.ones(3)})
    with pytest.raises(InvalidError, match="no weights to load"):
        sglang.refit_load(engine, {})
    sglang.refit_load(engine, _weights(5))
    assert _holds(engine, 5)


@pytest.mark.parametrize("text", ["", "[]", '{"endpoint": "tcp://127.0.0.1:1"}', "\xff"])
def test_an_order_that_cannot_be_read_is_an_answer(engine: fake.Engine, text: str) -> None:
    sglang.refit_load(engine, _weights(1))
    broken = [(sglang.ORDER, torch.tensor(list(text.encode("latin1")), dtype=torch.uint8))]
    done, why = engine.update_weights_from_tensor(broken, load_format=sglang.PULL)
    assert (done, why.startswith("refit InvalidError: pull cannot read")) == (False, True)
    assert _holds(engine, 1)


def test_other_callers_of_sglang_meet_its_own_method(engine: fake.Engine) -> None:
    sglang.refit_load(engine, _weights(1))
    with pytest.raises(KeyError):
        engine.update_weights_from_tensor([("layer.none", torch.ones(3))])


def test_the_method_is_wrapped_once(engine: fake.Engine) -> None:
    for _ in range(3):
        sglang.refit_load(engine, _weights(1))
    assert not hasattr(type(engine.runner).update_weights_from_tensor.__wrapped__, "__wrapped__")


def test_an_engine_without_these_loaders_is_not_called(engine: fake.Engine) -> None:
    engine.server_args.custom_weight_loader = [sglang.LOAD]
    with pytest.raises(StateError, match=r"started without refit\.integrations\.sglang\.pull"):
        sglang.refit_update(engine, "tcp://127.0.0.1:1")
    assert engine.flushes == 0


def test_a_quantized_layer_is_refused_before_anything_is_fetched(
    publishing: Trainer, engine: fake.Engine
) -> None:
    class Fp8LinearMethod:
        pass

    engine.runner.model.layer.quant_method = Fp8LinearMethod()
    before = [one.clone() for one in engine.runner.model.parameters()]
    with pytest.raises(UnsupportedError, match=r'"layer" is quantized \(Fp8LinearMethod\)'):
        sglang.refit_update(engine, publishing.endpoint, timeout=WAIT_S)
    with pytest.raises(UnsupportedError, match="Nothing was loaded"):
        sglang.refit_load(engine, _weights(1))
    assert all(map(torch.equal, before, engine.runner.model.parameters()))


def test_a_version_comes_again_though_the_answer_to_it_is_on_its_way(
    publishing: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = Subscriber.describe
    states = ["applying"]

    def at_first(subscriber: Subscriber) -> Any:
        found = describe(subscriber)
        return replace(found, state=states.pop() if states else found.state)

    receiver = subscribe(publishing.endpoint, "w")
    done = publishing.publish(_weights(1))
    with receiver.loading(receiver.take(1, WAIT_S)):
        pass
    done.result()
    monkeypatch.setattr(Subscriber, "describe", at_first)
    with receiver.loading(receiver.take(1, WAIT_S)) as update:
        assert update.version == 1
    assert states == []
    receiver.close()


@pytest.fixture
def other_rank(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the second of two tensor-parallel ranks found: a failure and a version; None: the same
    as the first."""
    said: dict[str, Any] = {"found": None}
    group = SimpleNamespace(world_size=2, cpu_group="the CPU's")

    def gather(found: list[Any], mine: tuple[str, int], group: Any) -> None:
        found[:] = [mine, said["found"] or mine]

    parallel = SimpleNamespace(get_tp_group=lambda: group)
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed.parallel_state", parallel)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    return said


@pytest.mark.parametrize(
    ("found", "kind", "sentence"),
    [
        (("DeadlineError: late", 1), DeadlineError, r"^late \(tensor-parallel rank 1 of 2\)"),
        (("", 0), PeerError, "the ranks have loaded different versions, 1, 0"),
        (("DeadlineError: late", 0), PeerError, r"versions, 1, 0\. DeadlineError: late \(tensor"),
    ],
)
def test_ranks_that_failed_or_differ_are_one_sentence(
    publishing: Trainer,
    engine: fake.Engine,
    other_rank: dict[str, Any],
    found: tuple[str, int],
    kind: type[Exception],
    sentence: str,
) -> None:
    other_rank["found"] = found
    done = publishing.publish(_weights(1))
    with pytest.raises(kind, match=sentence):
        sglang.refit_update(engine, publishing.endpoint, 1, WAIT_S)
    done.result()
    other_rank["found"] = None
    with torch.no_grad():
        for one in engine.runner.model.parameters():
            one.zero_()
    assert sglang.refit_update(engine, publishing.endpoint, 1, WAIT_S) == 1
    assert _holds(engine, 1)  # ranks that differ all fetch the next order


def test_the_plugin_does_nothing_where_there_is_no_scheduler(engine: fake.Engine) -> None:
    sglang.plugin()
    assert not hasattr(type(engine.runner).update_weights_from_tensor, "__wrapped__")


class _Answers(http.server.BaseHTTPRequestHandler):
    """A server from before 0.5.21: no sessions, the old name of server_info, other words."""

    def do_GET(self) -> None:
        found = {"tp_size": 2, "custom_weight_loader": sglang.LOADERS}
        self._answer(200 if self.path == "/get_server_info" else 404, json.dumps(found))

    def do_POST(self) -> None:
        said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/update_weights_from_tensor":
            assert len(said["serialized_named_tensors"]) == 2
            self._answer(*self.server.says)  # type: ignore[attr-defined]
        else:
            self._answer(404, "{}")

    def _answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def old_server() -> Iterator[Any]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as one:
        thread = threading.Thread(target=one.serve_forever)
        thread.start()
        yield SimpleNamespace(of=one, url=f"http://127.0.0.1:{one.server_address[1]}")
        one.shutdown()
        thread.join()


def test_a_server_without_sessions_is_called_for_each_rank(old_server: Any) -> None:
    old_server.of.says = (200, json.dumps({"success": True, "message": "refit version 7"}))
    assert sglang.refit_update(sglang.Server(old_server.url), "tcp://127.0.0.1:1", 7) == 7


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (400, {"success": False, "message": "refit DeadlineError: late"}, DeadlineError),
        (400, {"success": False, "message": "refit NoSuchError: odd"}, PeerError),
        (400, {"success": False, "message": "no room"}, PeerError),
        (500, "a page", PeerError),
        (404, "{}", PeerError),
    ],
)
def test_what_a_server_says_is_raised(old_server: Any, code: int, text: Any, kind: Any) -> None:
    old_server.of.says = (code, text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(kind):
        sglang.refit_update(sglang.Server(old_server.url), "tcp://127.0.0.1:1")
