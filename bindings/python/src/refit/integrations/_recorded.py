"""A model whose loader is recorded after the first version that it has loaded: later ones are then
written part by part, without it. Where it cannot be recorded it loads every version, as it did the
first. It knows no engine.

It is recorded when the version was accepted: the trainer does not wait for that.
"""

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from refit.errors import InvalidError, StateError, UnsupportedError

if TYPE_CHECKING:
    from refit.weights.parts import Parts
    from refit.weights.update import Update

_log = logging.getLogger("refit")


class RecordedLoader:
    """`load`: the engine's loader of `model`, which takes names and tensors."""

    def __init__(self, model: Any, load: Callable[[Iterable[tuple[str, Any]]], None]) -> None:
        self._model = model
        self._load = load
        self._refused = False
        self._names: dict[str, Any] = {}
        """The views of the version that the loader has loaded last: what they are, not what they
        hold."""
        self.parts: Parts | None = None

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
        self._load(update.tensors())
        self._names = {view.name: view for view in update.views()}

    def learn(self) -> None:
        """Records the loader, if it has loaded a version since it was recorded. The model has that
        version then as before. Takes as long as two loads; raises nothing."""
        names, self._names = self._names, {}
        if not names or self._refused:
            return
        from refit.weights.load import listed
        from refit.weights.record import record

        try:
            parts = record(self._load, names, self._model)
            if parts.unused:  # it may have made something of them that was not seen
                raise UnsupportedError(f"it takes nothing of {listed(list(parts.unused))}")
        except Exception as why:
            self._refused = True
            _log.info("each version is loaded by the engine's own loader: %s", why)
        else:
            self.parts = parts
            _log.info("versions are loaded without the engine's own loader: %r", parts)
