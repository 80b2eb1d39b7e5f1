"""The exceptions of refit: one family, made from the C library's list of statuses.

Every exception carries the C sentence, ``status`` (the number) and ``subsystem`` (the code below
it: an errno, a CUresult; 0 for none). Those with a counterpart among Python's own are that, too, so
that ``except TimeoutError`` and ``except MemoryError`` mean what they say.
"""

from typing import Any, ClassVar

from refit._c import abi


class RefitError(Exception):
    """Something that refit could not do, and why."""

    default_status: ClassVar[int] = abi.REFIT_ERR_INVALID

    def __init__(self, text: str, status: int | None = None, subsystem: int = 0) -> None:
        super().__init__(text)
        self.text = text
        self.status = self.default_status if status is None else status
        self.subsystem = subsystem
        self.workers: tuple[Any, ...] = ()
        """Where a publish failed: the ``refit.Worker``s that did, each with its reason."""
        me: BaseException = self
        if isinstance(me, OSError) and subsystem != 0:
            me.errno = subsystem

    def __reduce__(self) -> tuple[type["RefitError"], tuple[str, int, int], dict[str, object]]:
        return type(self), (self.text, self.status, self.subsystem), self.__dict__


class InvalidError(RefitError, ValueError):
    """An argument is not valid."""

    default_status = abi.REFIT_ERR_INVALID


class StateError(RefitError, RuntimeError):
    """The object is in the wrong state for this call; the sentence says which call fits."""

    default_status = abi.REFIT_ERR_STATE


class HostMemoryError(RefitError, MemoryError):
    """No host memory."""

    default_status = abi.REFIT_ERR_HOST_MEMORY


class DeviceMemoryError(RefitError, MemoryError):
    """No device memory."""

    default_status = abi.REFIT_ERR_DEVICE_MEMORY


class BudgetError(RefitError, MemoryError):
    """The host memory budget does not allow it."""

    default_status = abi.REFIT_ERR_BUDGET


class PinError(RefitError, MemoryError):
    """Host memory could not be page-locked."""

    default_status = abi.REFIT_ERR_PIN


class DeadlineError(RefitError, TimeoutError):
    """The deadline passed."""

    default_status = abi.REFIT_ERR_TIMEOUT


class CancelledError(RefitError):
    """The operation was cancelled."""

    default_status = abi.REFIT_ERR_CANCELLED


class CopyError(RefitError, RuntimeError):
    """A copy could not be started."""

    default_status = abi.REFIT_ERR_COPY


class DeviceError(RefitError, RuntimeError):
    """The device or its driver failed; also of a device that is lost, for good."""

    default_status = abi.REFIT_ERR_DEVICE


class UnsupportedError(RefitError, RuntimeError):
    """Not supported by this build, device or file."""

    default_status = abi.REFIT_ERR_UNSUPPORTED


class NotFoundError(RefitError, LookupError):
    """No such thing."""

    default_status = abi.REFIT_ERR_NOT_FOUND


class ExistsError(RefitError, ValueError):
    """It exists already."""

    default_status = abi.REFIT_ERR_EXISTS


class BusyError(RefitError, RuntimeError):
    """In use by another object, process or user."""

    default_status = abi.REFIT_ERR_BUSY


class InputOutputError(RefitError, OSError):
    """Reading or writing failed."""

    default_status = abi.REFIT_ERR_IO


class ConfigError(RefitError, ValueError):
    """The configuration is not valid."""

    default_status = abi.REFIT_ERR_CONFIG


class ProtocolError(RefitError):
    """A message broke the protocol."""

    default_status = abi.REFIT_ERR_PROTOCOL


class LimitError(RefitError):
    """A configured limit was reached."""

    default_status = abi.REFIT_ERR_LIMIT


class CorruptError(RefitError):
    """The bytes do not match their digest."""

    default_status = abi.REFIT_ERR_CORRUPT


class StaleError(RefitError):
    """It belongs to an older version or epoch."""

    default_status = abi.REFIT_ERR_STALE


class PeerError(RefitError):
    """A worker failed or was lost."""

    default_status = abi.REFIT_ERR_PEER


class ClosedError(RefitError):
    """The other side has closed."""

    default_status = abi.REFIT_ERR_CLOSED


class CallbackError(RefitError):
    """A callback of the caller failed."""

    default_status = abi.REFIT_ERR_CALLBACK


class SystemCallError(RefitError, OSError):
    """The operating system refused."""

    default_status = abi.REFIT_ERR_SYSTEM


class SecurityError(RefitError):
    """Refused for safety."""

    default_status = abi.REFIT_ERR_SECURITY


_BY_STATUS: dict[int, type[RefitError]] = {
    kind.default_status: kind for kind in RefitError.__subclasses__()
}


def error_of(status: int, text: str, subsystem: int = 0) -> RefitError:
    """The exception for a status of the C library; ``RefitError`` itself for one not known here."""
    return _BY_STATUS.get(status, RefitError)(text, status, subsystem)
