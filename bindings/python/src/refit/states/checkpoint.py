"""A state_dict that can be read now, wherever the states are, and that nothing tears meanwhile.

While states are on the device it is the optimizer's own, and no offload is allowed until the block
ends. While they are away its tensors lie over the bytes in the host image, held by a read lock:
they are CPU tensors with the dtypes, shapes and strides of the states, read-only by agreement, and
empty once the block ends; what stayed on the device is copied, so that all is of one moment. What
cannot be shown like that (a DTensor, a segment of a pool, an optimizer that makes its state_dict by
its own ways) is brought back first.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from refit.states.cycle import CLEARED, Cycle
from refit.states.image import Image, Unshowable


@contextmanager
def reading(cycle: Cycle) -> Iterator[list[dict[str, Any]]]:
    """One state_dict for each optimizer, valid until the block ends."""
    reader = object()
    try:  # from here on, for Ctrl-C may come right after the call
        cycle.begin_reading(reader)  # an offload that ended by its deadline may still be copying
        with ExitStack() as stack:
            yield _state_dicts(cycle, stack)
    finally:
        cycle.readers.discard(reader)
        if cycle.abandoned and not cycle.readers:
            cycle.close()


def _state_dicts(cycle: Cycle, stack: ExitStack) -> list[dict[str, Any]]:
    pieces = any(regions.has_pieces for regions in cycle.per_device)
    shows = cycle.shows_image and all(map(_is_plain, cycle.optimizers))
    if cycle.phase == CLEARED and not pieces and shows:
        image = Image(cycle.per_device)
        try:
            shown = [_shown(image, _references(one)) for one in cycle.optimizers]
        except (Unshowable, LookupError):
            image.close()
        except BaseException:
            image.close()
            raise
        else:
            stack.callback(image.close)
            return shown
    return [one.state_dict() for one in cycle.optimizers]


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state_dict is torch's own, which reads no bytes."""
    return (
        type(optimizer).state_dict is torch.optim.Optimizer.state_dict
        and not optimizer._optimizer_state_dict_post_hooks
        and len(optimizer._optimizer_state_dict_pre_hooks) <= 1  # ours
    )


def _references(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state_dict as it is, references to empty storages, without the hook that fills them."""
    hooks = dict(optimizer._optimizer_state_dict_pre_hooks)
    optimizer._optimizer_state_dict_pre_hooks.clear()
    try:
        return optimizer.state_dict()
    finally:
        optimizer._optimizer_state_dict_pre_hooks.update(hooks)


def _shown(image: Image, value: Any) -> Any:
    """``value`` again, with a view for each tensor whose bytes are away."""
    if isinstance(value, torch.Tensor):
        view = image.view(value)
        # A tensor in place is copied: a step counter may go on within the block.
        return value.detach().clone() if view is None else view
    if isinstance(value, dict):
        return {key: _shown(image, one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_shown(image, one) for one in value)
    return value
