"""fp32 masters that live on the host: parameters that an inner optimizer steps for a framework, and
from which the framework rounds the weights of its model.

Between steps the memory of a master is given back, and its bytes are in the host image, beside the
states of its optimizer. In a window the optimizer steps a parameter over the window's memory, and
the weights are rounded from it before it leaves (see ``windowed_step``); so the framework's own
rounding behind the step leaves these masters out. What uses a master in between, such as a
checkpoint of the framework, brings all of them to the device (see ``away``); the next step takes
them to the host again.

Which masters there are is known to the framework's adapter. When they move is unknown here.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch

from refit._waiting import interrupts_held
from refit.away import Absence, kind_of
from refit.errors import DeviceMemoryError
from refit.state_slots import Kept, extent
from refit.twin import is_dense

_NONE = -1
_MASTERS = 0
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Framework(Protocol):
    """What knows the masters of frameworks; see ``inventory.Holdings``."""

    def stepped_masters(self) -> Mapping[int, torch.Tensor]:
        """By the identity of a master the weights that are rounded from it."""
        ...

    def leave_out(self, is_rounded: Callable[[torch.Tensor], bool]) -> list[Callable[[], None]]:
        """From now on frameworks do not round weights from masters of which this is True. What it
        gives undoes that."""
        ...

    def round_others(self) -> None:
        """Rounds weights from all other masters, as frameworks do behind a step."""
        ...


class _NoFramework:
    def stepped_masters(self) -> Mapping[int, torch.Tensor]:
        return {}

    def leave_out(self, is_rounded: Callable[[torch.Tensor], bool]) -> list[Callable[[], None]]:
        return []

    def round_others(self) -> None:
        pass


NO_FRAMEWORK = _NoFramework()
"""Of optimizers without masters."""


class HostMasters:
    """The masters of some optimizers. ``lock`` is held by all calls; ``settle`` waits for the
    copies of the last step. Used by one thread at a time."""

    def __init__(
        self,
        framework: Framework,
        lock: AbstractContextManager[Any],
        settle: Callable[[], None],
    ) -> None:
        self._framework = framework
        self._lock = lock
        self._settle = settle
        self._away: dict[int, Kept] = {}
        self._weights: Mapping[int, torch.Tensor] = framework.stepped_masters()
        bring_back = cast(Any, torch.compiler).disable(self._bring_back)
        self._absence = Absence(bring_back, lock, zeroable=_NONE)
        self._undo = framework.leave_out(self.is_away) if self._weights else []

    def look_again(self) -> None:
        """Asks the framework where the weights are now."""
        if self._weights:
            self._weights = self._framework.stepped_masters()

    def knows(self, parameter: Any) -> bool:
        """Whether it is a master."""
        return id(parameter) in self._weights

    def can_live(self, parameter: Any) -> bool:
        """Whether a parameter is a master whose memory is its own, and can be given back."""
        weight = self._weights.get(id(parameter))
        if weight is None or kind_of(parameter) not in _PLAIN or type(weight) not in _PLAIN:
            return False
        storage = parameter.untyped_storage()
        own = parameter.storage_offset() == 0 and storage.nbytes() == extent(parameter)
        alike = parameter.is_contiguous() and weight.is_contiguous() and is_dense(parameter)
        return bool(
            own
            and alike
            and storage.resizable()
            and parameter.numel() == weight.numel() > 0
            and parameter.device == weight.device
        )

    def weight_of(self, kept: Kept) -> torch.Tensor:
        """The weights that are rounded from a master, as a plain view in one dimension."""
        return self._weights[id(kept.parameter)].detach().view(-1)

    def is_away(self, parameter: Any) -> bool:
        """Whether the bytes of a master are on the host."""
        return id(parameter) in self._away

    def leave(self, found: Iterable[Kept]) -> None:
        """Copies masters to the image and gives their memory back. Not while copies are under
        way; blocks for the copies."""
        leaving = [one for one in found if one.master is not None]
        leaving = [one for one in leaving if not self.is_away(one.parameter)]
        if not leaving:
            return
        with torch.no_grad():
            for one in leaving:
                _view_of(one).copy_(one.parameter.detach())
        with interrupts_held():
            self._away.update((id(one.parameter), one) for one in leaving)
            self._absence.put(_MASTERS, [one.parameter for one in self._away.values()])
            for one in leaving:
                one.parameter.untyped_storage().resize_(0)

    def _bring_back(self) -> None:
        """As ``bring_back``, for a master that is used, in any thread."""
        with self._lock:
            self.bring_back()

    def bring_back(self) -> None:
        """Takes all masters to the device. DeviceMemoryError: none has moved."""
        if not self._away:
            return
        self._settle()
        taken: list[Any] = []
        try:
            with interrupts_held():
                for one in self._away.values():
                    storage = one.parameter.untyped_storage()
                    taken.append(storage)
                    storage.resize_(_view_of(one).nbytes)
                for one in self._away.values():
                    _over(one.parameter).copy_(_view_of(one))
                self._absence.lift(_MASTERS)
                self._away.clear()
        except (RuntimeError, MemoryError) as why:
            for storage in taken:
                storage.resize_(0)
            raise DeviceMemoryError(
                f"no memory on the device for {len(self._away)} masters, which live on the "
                f"host; nothing is lost. Free some memory, and use them again: {why}"
            ) from why

    def round_others(self) -> None:
        """Behind a step that was resumed, which the framework has not seen: it rounds weights from
        the masters that do not live here."""
        if self._weights:
            self._framework.round_others()

    def close(self) -> None:
        """The framework rounds all weights by itself again. Bring the masters back before."""
        for undo in self._undo:
            undo()
        self._undo = []


def _view_of(kept: Kept) -> torch.Tensor:
    assert kept.master is not None
    view: torch.Tensor = kept.master.slots[0].view
    return view


def _over(parameter: Any) -> torch.Tensor:
    """A tensor of the plain class over the memory of one whose class may be another now."""
    made = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    storage, shape = parameter.untyped_storage(), parameter.shape
    return made.set_(storage, parameter.storage_offset(), shape, parameter.stride())
