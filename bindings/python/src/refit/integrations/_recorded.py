"""A model whose loader is recorded after the first version that it has loaded: later ones are then
written part by part, without it. Where it cannot be recorded it loads every version, as it did the
first. It knows no engine.

It is recorded when the version was accepted: the trainer does not wait for that. All of an engine's
processes record at the same time, each with a copy of its model in host memory; a process for which
all these copies do not fit records nothing.
"""

import logging
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from refit.errors import InvalidError, RefitError, StateError, UnsupportedError
from refit.observe.memory_now import available_bytes

if TYPE_CHECKING:
    from refit.integrations._receiver import Receiver
    from refit.weights.parts import Parts
    from refit.weights.update import Update

_log = logging.getLogger("refit")


class RecordedLoader:
    """`load`: the engine's loader of `model`, which takes names and tensors. `moves`: why the
    loader is not recorded, if it writes other places from version to version."""

    def __init__(
        self,
        model: Any,
        load: Callable[[Iterable[tuple[str, Any]]], None],
        moves: str | None = None,
    ) -> None:
        self._model = model
        self._load = load
        self._moves = moves
        self._refused = False
        self._names: dict[str, Any] = {}
        """The views of the version that the loader has loaded last: what they are, not what they
        hold."""
        self.parts: Parts | None = None

    def prepare(self, receiver: "Receiver") -> None:
        """Before a version is taken: all of it, unless it will be written without the loader."""
        if self.parts is not None:
            try:
                self.parts.check_model()
            except StateError as why:
                _log.info("the recording of the engine's loader is made anew: %s", why)
                self.parts = None
        self._ask(receiver)

    def load(self, update: "Update") -> None:
        """Loads a version; what the loader raises, and ``update.load_into``."""
        if self.parts is not None:
            try:
                update.load_into(self.parts)
            except (InvalidError, StateError) as why:  # before anything was written
                _log.info("the recording of the engine's loader is made anew: %s", why)
                self.parts = None
            else:
                return
        update.check_whole()
        self._load(update.tensors())
        self._names = {view.name: view for view in update.views()}

    def learn(self, receiver: "Receiver") -> None:
        """Records the loader, if it has loaded a version since it was recorded, and has what it
        reads sent alone from now on. The model has that version then as before, which must have
        been let go. Takes as long as two loads; raises nothing."""
        self._learn()
        self._ask(receiver)

    def _ask(self, receiver: "Receiver") -> None:
        try:
            receiver.need(self.parts)
        except RefitError as why:
            _log.warning("each version is taken whole: %s", why)

    def _learn(self) -> None:
        names, self._names = self._names, {}
        if not names or self._refused:
            return
        from refit.weights.load import listed
        from refit.weights.record import record

        try:
            if self._moves is not None:
                raise UnsupportedError(self._moves)
            _refuse_too_large(self._model)
            parts = record(self._load, names, self._model)
            unused = {one: names[one].alias_of or one for one in parts.unused}
            used = {names[one].alias_of or one for one in names.keys() - unused.keys()}
            if left := [one for one, bytes_of in unused.items() if bytes_of not in used]:
                # it may have made something of them that was not seen
                raise UnsupportedError(f"it takes nothing of {listed(left)}")
        except Exception as why:
            self._refused = True
            _log.info("each version is loaded by the engine's own loader: %s", why)
        else:
            self.parts = parts
            _log.info("versions are loaded without the engine's own loader: %r", parts)


def _refuse_too_large(model: Any) -> None:
    """UnsupportedError, unless each process of the engine can copy its model to this host."""
    from refit.weights.parts import tensors_of

    sizes = {}
    for one in tensors_of(model).values():
        if not one.is_meta:
            sizes[one.untyped_storage()._cdata] = one.untyped_storage().nbytes()
    taken = (sum(sizes.values()) + 2 * max(sizes.values(), default=0)) * _processes()
    available = available_bytes()
    if taken > available:
        raise UnsupportedError(
            f"recording takes {taken / 1e9:.1f} GB of host memory, and {available / 1e9:.1f} GB "
            "are available"
        )


def _processes() -> int:
    """The engine's processes: those that may record on this host at the same time."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return int(distributed.get_world_size())
