"""Hooks on the torch optimizers that step: what uses states brings them back first.

``step()`` waits for the states; ``state_dict()``, ``load_state_dict()``, ``copy.deepcopy`` and
``pickle`` too. The hooks hold no controller alive; once it is gone or closed they do nothing.
Independent of what the controller then does.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch

from refit.errors import BusyError

BeforeUses = Callable[[Callable[[], None], Callable[[], None]], list[Callable[[], None]]]


class HookOwner(Protocol):
    """Calls that a controller gets when an optimizer is used."""

    def _before_step(self) -> None:
        """States are about to be stepped."""

    def _before_use(self) -> None:
        """States are about to be read, other than by a step."""

    def _after_step(self) -> None:
        """A step has used the gradients."""

    def _before_load(self) -> None:
        """States are about to be replaced by others."""


class _WeakHook:
    """A hook: calls one method of the controller, while there is one.

    In a step that ``torch.compile`` compiles it is called as it is, every time: it asks which
    process this is, and moves memory, which is not part of a graph.
    """

    def __init__(self, owner: HookOwner, method: str) -> None:
        self.owner = weakref.ref(owner)
        self._pass_on = cast(Any, torch.compiler).disable(_pass_on)
        self._method = method

    def __call__(self, *_arguments: Any) -> None:
        self._pass_on(self.owner, self._method)


def _pass_on(reference: "weakref.ref[HookOwner]", method: str) -> None:
    owner = reference()
    if owner is not None:
        getattr(owner, method)()


class _CopyHook:
    """An optimizer's ``__getstate__``, what ``copy`` and ``pickle`` ask: states come back first."""

    def __init__(self, owner: HookOwner, optimizer: torch.optim.Optimizer) -> None:
        self._before = _WeakHook(owner, "_before_use")
        self._optimizer = weakref.ref(optimizer)

    def __call__(self) -> Any:
        self._before()
        optimizer = cast(torch.optim.Optimizer, self._optimizer())
        state = type(optimizer).__getstate__(optimizer)
        if isinstance(state, dict):  # one that copies its whole __dict__ has this hook in it
            state = {key: value for key, value in state.items() if value is not self}
        return state

    def remove(self) -> None:
        """Takes it away, and no other one."""
        optimizer = self._optimizer()
        if optimizer is not None and vars(optimizer).get("__getstate__") is self:
            del vars(optimizer)["__getstate__"]


def refuse_second(optimizer: torch.optim.Optimizer) -> None:
    """BusyError if a live controller has its hooks on the optimizer."""
    for hook in optimizer._optimizer_step_pre_hooks.values():
        if isinstance(hook, _WeakHook) and hook.owner() is not None:
            raise BusyError(
                f"this {type(optimizer).__name__} has a controller already: close that one first"
            )


class Hooks:
    """The hooks of one controller. ``remove`` takes them away; a second call does nothing."""

    def __init__(
        self,
        owner: HookOwner,
        optimizers: Sequence[torch.optim.Optimizer],
        before_uses: BeforeUses = lambda step, use: [],
    ) -> None:
        """``before_uses`` puts two calls before what the frameworks around the optimizers do with
        the states, a step and other uses, and gives what undoes that."""
        for optimizer in optimizers:
            refuse_second(optimizer)
        self._handles: list[Any] = []
        for optimizer in optimizers:
            self._put(owner, optimizer)
        self._undo = before_uses(_WeakHook(owner, "_before_step"), _WeakHook(owner, "_before_load"))

    def _put(self, owner: HookOwner, optimizer: torch.optim.Optimizer) -> None:
        use = _WeakHook(owner, "_before_use")
        load = _WeakHook(owner, "_before_load")
        step = optimizer.register_step_pre_hook(_WeakHook(owner, "_before_step"))
        # Before the hooks of others: they may read the state.
        cast(OrderedDict[int, Any], optimizer._optimizer_step_pre_hooks).move_to_end(
            step.id, last=False
        )
        self._handles += [
            step,
            optimizer.register_state_dict_pre_hook(use, prepend=True),
            optimizer.register_load_state_dict_pre_hook(load, prepend=True),
            optimizer.register_step_post_hook(_WeakHook(owner, "_after_step")),
        ]
        copied = _CopyHook(owner, optimizer)
        vars(optimizer)["__getstate__"] = copied
        self._handles.append(copied)

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for undo in self._undo:
            undo()
        self._undo = []


def on_accumulation(parameter: torch.Tensor, hook: Any) -> Any:
    """Registers a hook that runs when a gradient was added to; gives its handle.

    ``swap_tensors`` leaves the dictionary of such hooks with one tensor and its registration with
    the other, so what is registered later is never called. A dictionary that is empty is made anew;
    where others have hooks in it, these stay as they are.
    """
    registered = cast(Any, parameter)
    if not registered._post_accumulate_grad_hooks:
        registered._post_accumulate_grad_hooks = None
    return registered.register_post_accumulate_grad_hook(hook)


def in_backward() -> bool:
    """Whether a hook of a backward pass has come here: others may be called after it, in an order
    that must not change meanwhile."""
    return bool(torch._C._current_graph_task_id() != -1)
