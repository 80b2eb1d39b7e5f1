"""The hooks by which an optimizer's ``step()``, and what is loaded into it, come to its states.

``StepHooks`` registers them, ``_Calls`` is what they do for one optimizer, and ``Prefetch`` is the
hook of the backward pass before. ``step()`` is not replaced: a pre-step hook that runs after all
others makes the step, and gives PyTorch's code a stand-in without parameters to step.
Independent of how a step is made.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from refit.states.hooks import on_accumulation
from refit.step.param_state import parameters_of
from refit.step.stand_in import Stepping

if TYPE_CHECKING:
    from refit.step.host_states import HostStateManager

Optimizer = torch.optim.Optimizer


class StepHooks:
    """The hooks by which a step, and what is loaded, come here. ``remove`` takes them away."""

    def __init__(self, states: "HostStateManager", optimizers: Sequence[Optimizer]) -> None:
        self._handles: list[Any] = []
        disable = cast(Any, torch.compiler).disable
        reference = weakref.ref(states)
        for optimizer in optimizers:
            call = _Calls(reference, optimizer)
            post = optimizer.register_step_post_hook(disable(call.after_step))
            cast(Any, optimizer._optimizer_step_post_hooks).move_to_end(post.id, last=False)
            self._handles += [
                optimizer.register_step_pre_hook(
                    LastHook("_optimizer_step_pre_hooks", disable(call.before_step))
                ),
                post,
                optimizer.register_load_state_dict_pre_hook(
                    LastHook("_optimizer_load_state_dict_pre_hooks", call.before_load)
                ),
                optimizer.register_load_state_dict_post_hook(call.after_load, prepend=True),
            ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Calls:
    """What the hooks of one optimizer do while its states live on the host."""

    def __init__(self, states: "weakref.ref[HostStateManager]", optimizer: Optimizer) -> None:
        self._states = states
        self._optimizer = weakref.ref(optimizer)
        self._stand_in: tuple[Optimizer, Stepping] | None = None
        self._steps = 0
        self._check: Callable[[], None] | None = None

    def _states_of(self, optimizer: Optimizer) -> "HostStateManager | None":
        """The owner of the states; None for a copy of the optimizer that took the hooks along."""
        return self._states() if self._optimizer() is optimizer else None

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Makes the step, and returns a stand-in without parameters, which PyTorch's own code steps
        then."""
        states = self._states_of(optimizer)
        if states is None:
            return None
        states.refuse_closure(optimizer, *args[1:], **kwargs)
        more, kwargs = _with_loss(args[1:], kwargs)
        self._steps += 1
        self._check = states.rehearse(optimizer, self._steps, more, kwargs)
        stepping = states.step(optimizer, more, kwargs)
        made = stepping.empty()
        self._stand_in = made, stepping
        return (made, *more), kwargs

    def after_step(self, _optimizer: Optimizer, args: Any, _kwargs: Any) -> None:
        """Gives the optimizer what the step has made of its groups. Those of which no parameter was
        stepped have counted it on the stand-in."""
        found, self._stand_in = self._stand_in, None
        if found is not None and args[0] is found[0]:
            made, stepping = found
            stepping.take(made)
            stepping.finish()
            check, self._check = self._check, None
            if check is not None:
                check()

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> Any:
        states = self._states_of(optimizer)
        return None if states is None else states.before_load(optimizer, state_dict)

    def after_load(self, optimizer: Optimizer) -> None:
        states = self._states_of(optimizer)
        if states is not None:
            states.after_load(optimizer)


def _with_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Evaluates the closure, once, and puts one in its place that returns what it returned."""
    closure = args[0] if args else kwargs.get("closure")
    if not callable(closure):
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    again: Callable[[], Any] = lambda: loss  # noqa: E731
    return ((again, *args[1:]), kwargs) if args else (args, {**kwargs, "closure": again})


class LastHook:
    """Calls ``action`` after all other hooks of the same dictionary, also those that are registered
    later.

    PyTorch calls the hooks of a dictionary in their order, and does not allow that the order
    changes meanwhile; a value may. So a hook that is called while others are after it puts itself
    into the place of the last one, for this once, together with it. ``hooks`` is the name of the
    dictionary that it is registered in. Hooks return None or what replaces their arguments after
    the first, a tuple or a single one.
    """

    def __init__(self, hooks: str, action: Callable[..., Any]) -> None:
        self._hooks = hooks
        self._action = action

    def __call__(self, optimizer: Any, *arguments: Any) -> Any:
        hooks = getattr(optimizer, self._hooks)
        key = next(reversed(hooks))
        last = hooks[key]
        if last is self:
            return self._action(optimizer, *arguments)
        if not (isinstance(last, _LastThen) and last.action is self._action):
            hooks[key] = _LastThen(hooks, key, last, self._action)
        return None


class _LastThen:
    """The last hook, and then ``action``; once."""

    def __init__(self, hooks: Any, key: Any, last: Any, action: Callable[..., Any]) -> None:
        self._hooks, self._key, self._last = hooks, key, last
        self.action = action

    def __call__(self, optimizer: Any, *arguments: Any) -> Any:
        self._hooks[self._key] = self._last
        changed = self._last(optimizer, *arguments)
        if changed is not None:
            arguments = changed if isinstance(changed, tuple) else (changed,)
        found = self.action(optimizer, *arguments)
        return changed if found is None else found


class Prefetch:
    """Lets the first windows come in during the backward pass: a hook on the parameter whose
    gradient is there first, the last one that was stepped. FSDP2 calls it when it has reduced the
    gradients of a group; where nothing calls it, the step itself begins the copies."""

    def __init__(self, states: "HostStateManager") -> None:
        self._states = weakref.ref(states)
        self._handles: dict[int, tuple[Any, Any]] = {}
        self._called: set[int] = set()
        """The optimizers whose hook was called since they were watched."""

    def watch(self, optimizer: Optimizer) -> None:
        stepped = [p for _, p in parameters_of(optimizer) if p.grad is not None]
        accumulate = [p for p in stepped if p.is_leaf and p.requires_grad]
        last = accumulate[-1] if accumulate else None
        before, handle = self._handles.get(id(optimizer), (None, None))
        was_called = id(optimizer) in self._called
        self._called.discard(id(optimizer))
        if last is None or (before is last and was_called):
            return  # a hook that was not called may have been lost
        if handle is not None:
            handle.remove()
        reference, whose, called = self._states, weakref.ref(optimizer), self._called

        def begin(_parameter: torch.Tensor) -> None:
            states, optimizer = reference(), whose()
            if states is not None and optimizer is not None:
                called.add(id(optimizer))
                states.prefetch(optimizer)

        eager = cast(Any, torch.compiler).disable(begin)  # it is not part of a graph
        self._handles[id(optimizer)] = last, on_accumulation(last, eager)

    def remove(self) -> None:
        for _, handle in self._handles.values():
            handle.remove()
        self._handles.clear()
