"""Objects that are closed once: by ``close``, or at the end of a ``with`` block."""

from types import TracebackType
from typing import Self


class Closing:
    """A context manager of what has a ``close``."""

    def close(self) -> None:
        """Ends it; a second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
