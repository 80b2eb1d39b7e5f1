"""States that live on the host and visit the device while their optimizer steps.

``Optimizer.step`` is not replaced. A hook makes the step before PyTorch's own code runs, and
gives that code an empty stand-in of the optimizer to step instead. So hooks, closures, schedulers
and a ``GradScaler`` see one step. The calls of a step, in order:

    before_step         ``step_hooks``: the pre-step hook that runs after all others
    step                here: states get their places (``placement``), and the step its entries
    WindowedStep.run    ``windowed_step``: window by window the states come (``host_buffer``),
                        PyTorch's code steps stand-ins (``stand_in``), and the states leave
    next_count          ``auto_resident``: how many states stay on the device until the next step
    after_step          ``step_hooks``: the optimizer gets what the step has made of its groups

While a step runs, the optimizer's own groups and states are not changed; each window's results
become the optimizer's when they are complete. The copies out of the last windows go on after it:
``wait`` waits for them.

Between steps ``optimizer.state[p][name]`` is a tensor of the host over the image, with the type,
the shape and the strides of the state; a DTensor stays one. It may be read and written: what uses
it waits for the copies out of the last step (see ``states.offloaded_tensor``).
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from refit._c.call_lock import WaitingCallLock
from refit._c.config import Config
from refit._c.handle import refuse_fork
from refit.errors import CorruptError, DeviceMemoryError, RefitError, StateError, UnsupportedError
from refit.observe.observers import Observers
from refit.states.offloaded_tensor import OffloadedTensors
from refit.states.optimizers import OptimizerAdapters
from refit.states.torch_memory import Devices, lacks_memory, refuse_capture
from refit.step.auto_resident import AutoResident
from refit.step.host_buffer import HostBuffer
from refit.step.host_masters import HostMasters, advise
from refit.step.param_state import ParamState, parameters_of
from refit.step.placement import Placement
from refit.step.schedule import Division
from refit.step.stand_in import Stepping
from refit.step.step_hooks import Prefetch, StepHooks
from refit.step.verified_step import WholeStep
from refit.step.windowed_step import Entry, WindowedStep, entries_of

Optimizer = torch.optim.Optimizer

_STATES = 0
_NONE = -1
"""Groups of an ``OffloadedTensors``: all states are one, and none of them can be zeroed while
away."""


class HostStateManager:
    """The states of some optimizers, on the host. Used by one thread at a time.

    ``names``: of all parameters, by their identity; ``adapters`` knows the masters of frameworks;
    ``may_step`` raises while no step is allowed. UnsupportedError for an optimizer that cannot be
    stepped for some parameters at a time.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        names: Callable[[], Mapping[int, str]],
        config: Config,
        devices: Devices,
        division: Division,
        adapters: OptimizerAdapters,
        *,
        prefetch: bool,
        overlap: bool,
        kernels: bool,
        allow_unverified: bool,
        verify_steps: int,
        is_auto: bool,
        may_step: Callable[[], None],
        observers: Observers,
    ) -> None:
        self._names = names
        self._may_step = may_step
        self._observers = observers
        self._allow_unverified = allow_unverified
        self._verify_steps = verify_steps
        self._process = os.getpid()
        self._broken: WindowedStep | None = None
        """A step that was broken off, and is to be finished."""
        self._loading: dict[int, dict[Any, dict[Any, Any]]] = {}
        """Of an optimizer that is being loaded the states, by parameter; None for those that
        PyTorch loads itself."""
        self._last: dict[int, list[Entry]] = {}
        """Of each optimizer the entries of its last step."""
        self._lock = WaitingCallLock("controller")
        wait = cast(Any, torch.compiler).disable(self.wait)
        self._offloaded = OffloadedTensors(wait, self._lock, zeroable=_NONE, at_hand=self._wait)
        self._is_away = False
        """Whether copies out may be under way: what uses a state waits for them."""
        can_code = config.get("offload.masters") == "auto"
        self._masters = HostMasters(adapters, can_code, self._lock, self._wait)
        self.placement = Placement(
            optimizers,
            names,
            config,
            devices,
            division,
            self._masters,
            self._lock,
            self._wait,
            observers,
            overlap=overlap,
            kernels=kernels,
            allow_unverified=allow_unverified,
        )
        self._hooks = StepHooks(self, optimizers)
        self._prefetch = Prefetch(self) if prefetch else None
        self._auto = AutoResident(optimizers) if is_auto else None

    # ---- places ---------------------------------------------------------------------------------

    def place_states(self) -> None:
        """Every state that there is, or that is foreseen, gets its place on the host; those that
        there are move there. Blocks for the page-lock and for copies. BudgetError and others: what
        has moved stays moved, nothing is lost, call again."""
        with self._lock:
            self._place_states()

    def _place_states(self) -> None:
        self.placement.place()
        self._leave_masters()

    def _leave_masters(self) -> None:
        masters = [one for one in self.placement.param_states.values() if one.has_master_here]
        if not self._masters.have_left(masters):
            self._wait()
            self._masters.leave(masters)

    # ---- a step ---------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any) -> Stepping:
        """Steps all parameters that have gradients, window by window."""
        self._refuse()
        with self._observers.phase("step"), self._lock:
            if self._broken is not None:
                raise StateError(
                    "a step was broken off: controller.resume_step() steps the parameters that it "
                    "did not reach; load_state_dict() drops it"
                )
            stepping = Stepping(optimizer)
            if _found_inf(optimizer):
                return stepping
            self._loading.clear()  # of a load that failed
            while True:
                step = self._prepared(optimizer, stepping, args, kwargs)
                try:
                    self._run(step)
                    break
                except DeviceMemoryError:
                    if self._broken is not None or not self._dismiss_all():
                        raise
            self._divide_anew(optimizer)
        return stepping

    def _prepared(
        self, optimizer: Optimizer, stepping: Stepping, args: tuple[Any, ...], kwargs: Any
    ) -> WindowedStep:
        mine = [one for one in self.placement.of(optimizer) if one.has_master_here]
        self._masters.round_written(mine)
        self._place_states()
        for share in self.placement.shares:
            if share.optimizer is not optimizer:
                share.lend_none_of(optimizer)
        entries = list(entries_of(optimizer, self.placement.param_states))
        self._masters.invalidate()
        self._masters.bind_weights(
            one.param_state for one in entries if one.param_state is not None
        )
        weight_of = self._masters.weight_of
        return WindowedStep(optimizer, stepping, entries, self._names, weight_of, args, kwargs)

    def refuse_closure(
        self, optimizer: Optimizer, closure: Any = None, *_: object, **_more: object
    ) -> None:
        """UnsupportedError for a closure that can only be evaluated in the midst of a step."""
        if closure is None or self._allow_unverified:
            return
        if not self.placement.evaluates_closure_first(optimizer):
            raise UnsupportedError(
                f"a {type(optimizer).__name__} evaluates its closure more than once, or after it "
                "has changed parameters, while refit evaluates it before the step: call backward() "
                "before step() without a closure, or keep the states with refit.Cycle()"
            )

    def rehearse(
        self, optimizer: Optimizer, number: int, args: tuple[Any, ...], kwargs: Any
    ) -> Callable[[], None] | None:
        """Makes step ``number`` on copies, if it is one of the first that are verified. What it
        gives compares: UnsupportedError."""
        if number > self._verify_steps or self._broken is not None or _found_inf(optimizer):
            return None
        mine = list(self.placement.of(optimizer))
        if any(one.master is not None for one in mine):
            raise UnsupportedError("verify_steps cannot copy masters that live on the host")
        on_cpu = {id(one.parameter) for one in mine if one.share is not None}
        owns = self.placement.owns
        whole = WholeStep(optimizer, lambda one: id(one) in on_cpu, owns, args, kwargs)
        return lambda: whole.check(number, self._names())

    def resume(self) -> None:
        """Steps what a step that was broken off has not. Does nothing if none was."""
        self._refuse()
        with self._observers.phase("step"), self._lock:
            if self._broken is not None:
                self._leave_masters()  # those that were used meanwhile
                self._masters.invalidate()
                left = [one.param_state for one in self._broken.entries if not one.done]
                self._masters.bind_weights(one for one in left if one is not None)
                step = self._broken
                self._run(step)
                self._masters.round_others()
                self._divide_anew(step.optimizer)

    def _refuse(self) -> None:
        """StateError and others where no step is allowed."""
        self._may_step()
        for buffer in self.placement.buffers:
            refuse_capture(buffer.device)

    def _run(self, step: WindowedStep) -> None:
        self._mark_offloaded()
        try:
            self._broken = step
            step.run(self._observers)
            if step.has_made_states:
                self.placement.place()  # what no plan foresaw
            self._leave_masters()
            self._broken = None
        except BaseException as why:
            if not step.unwind():
                self._broken = None
            if isinstance(why, CorruptError):
                advise(why)
            step.explain(why, self._broken is not None)
            raise
        self._last[id(step.optimizer)] = step.entries
        if self._prefetch is not None:
            self._prefetch.watch(step.optimizer)

    def _mark_offloaded(self) -> None:
        """From now on what uses a state waits for the copies."""
        if not self._is_away:
            self._is_away = True
            tensors: list[Any] = []
            visiting = [one for one in self.placement.param_states.values() if one.share is None]
            for param_state in visiting:
                for one in param_state.states.values():
                    tensors += [*one.wrappers, *(slot.view for slot in one.slots)]
            self._offloaded.mark(_STATES, tensors)

    def prefetch(self, optimizer: Optimizer) -> None:
        """Lets the first windows of the next step come in, if the device has memory for them.

        In the middle of another call it does nothing, and waits for none: a backward pass calls it,
        which a GPU runs on a thread of PyTorch's, while that call may be what waits for the pass.
        """
        if self._lock.is_mine:
            return
        try:
            with self._lock.at_once:
                self._bring_first_windows(optimizer)
        except RefitError:
            return  # the step begins by itself, and says what it meets

    def _bring_first_windows(self, optimizer: Optimizer) -> None:
        entries = self._last.get(id(optimizer))
        if (
            not entries
            or self._broken is not None
            or any(one.begun for one in self.placement.buffers)
        ):
            return
        if any(one.param_state is not None and one.param_state.is_coded for one in entries):
            return  # whether the weights have moved, and copies to wait for, the step finds out
        self._refuse()
        weight_of = self._masters.weight_of
        again = [one.again(optimizer) for one in entries]
        step = WindowedStep(optimizer, Stepping(optimizer), again, self._names, weight_of)
        self._mark_offloaded()
        step.prefetch()

    # ---- states that stay while there is memory -------------------------------------------------

    def _divide_anew(self, optimizer: Optimizer) -> None:
        """After its step: if an iteration is over, and free memory decides which states stay, they
        do from now on. What fails stays as it was: the step was made, and the next one says what it
        meets."""
        if self._auto is None or not self._auto.is_over(optimizer):
            return
        try:
            for device, units in self.placement.units().items():
                sizes = [one.nbytes for _, one in units]
                before = sum(one.is_resident for _, one in units)
                window_bytes = cast(HostBuffer, units[0][1].buffer).window_bytes
                count = self._auto.next_count(device, sizes, before, window_bytes)
                if count != before:
                    self._wait()
                    self._last.clear()  # entries that may visit no more
                if count > before:
                    self.placement.keep(units[before:count])
                elif count < before:
                    self._dismiss([one for _, one in units[count:before]])
                self._auto.begin(device)
        except (RefitError, RuntimeError, MemoryError) as why:
            if not isinstance(why, RefitError) and not lacks_memory(why):
                raise

    def _dismiss(self, found: Sequence[ParamState]) -> None:
        """After a step, from whose masters the framework has not rounded the weights yet."""
        self._masters.invalidate()
        self._masters.round(one for one in found if one.master is not None)
        self.placement.dismiss(found)
        self._place_states()

    def _dismiss_all(self) -> bool:
        """Sends all states that "auto" keeps back to the windows. False: it keeps none."""
        found = [one for one in self.placement.param_states.values() if one.is_resident]
        if found:
            self._last.clear()
            self.placement.dismiss(found)
            self._place_states()
        return bool(found)

    def give_way(self) -> bool:
        """The host lacks memory for the states that "auto" keeps to leave to: they visit the device
        again, for good. False: there are none. What ``place_states`` raises."""
        with self._lock:
            found = self._dismiss_all()
            if found:
                self._auto = None
            return found

    # ---- in between -----------------------------------------------------------------------------

    def wait(self) -> None:
        """Waits until the image has every byte; the windows' memory goes back to PyTorch.

        Any thread. CopyError and DeadlineError: nothing is lost, call again.
        """
        refuse_fork(self._process, "Controller")
        with self._lock:
            self._wait()

    def _wait(self) -> None:
        if self._broken is not None:
            self._broken.finish_window()
        for share in self.placement.shares:
            share.wait()
        for buffer in self.placement.buffers:
            buffer.wait()
        self._masters.release()
        if self._is_away:
            self._offloaded.unmark(_STATES)
            self._is_away = False

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Takes the states that live on the host out of what is to be loaded: PyTorch would make a
        copy of each on the device."""
        if not isinstance(state_dict["state"], Mapping):
            return state_dict  # PyTorch refuses it
        saved = [one for group in state_dict["param_groups"] for one in group["params"]]
        mine = [parameter for _, parameter in parameters_of(optimizer)]
        loading: dict[Any, dict[Any, Any]] = {}
        rest = dict(state_dict["state"])
        for number, parameter in zip(saved, mine, strict=False):
            state = rest.get(number)
            if not isinstance(state, Mapping) or self.placement.stays(optimizer, parameter):
                continue
            loaded = {key: _as_loaded(parameter, key, value) for key, value in state.items()}
            loading[parameter] = {
                key: value if self.placement.moves(optimizer, key, value) else None
                for key, value in loaded.items()
            }
            rest[number] = {k: v for k, v in state.items() if loading[parameter][k] is None}
        self._loading[id(optimizer)] = loading
        return {**state_dict, "state": rest}

    def after_load(self, optimizer: Optimizer) -> None:
        """Writes them into the image."""
        with self._lock:
            loading = self._loading.pop(id(optimizer), {})
            for parameter, values in loading.items():
                state = optimizer.state[parameter]
                optimizer.state[parameter] = {
                    key: state.get(key) if value is None else value for key, value in values.items()
                }
            self._broken = None
            self._last.pop(id(optimizer), None)
            self._place_states()

    # ---- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Takes the states to the device, where PyTorch's own step finds them, and the hooks away.

        DeviceMemoryError: the device has no memory for them; nothing is lost, and it stays open.
        """
        with self._lock:
            self._wait()
            self._masters.bring_back()
            self.placement.move_out()
            self._end()

    def abandon(self) -> None:
        """No call follows. States for which the device has no memory stay tensors of the host, and
        masters whose weights have changed or are away stay there until they are used; a warning
        says what to do."""
        said: list[str] = []
        with self._lock:
            try:
                self._wait()
                try:
                    self._masters.bring_back()
                except (CorruptError, StateError) as why:
                    said.append(f"masters, which stay on the host until they are used. {why}")
                self.placement.move_out()
            except DeviceMemoryError as why:
                said.append(
                    "the states that live on the host, while the device had no memory for them. "
                    "Those that found none are tensors of the CPU, with which PyTorch cannot step "
                    "parameters of a GPU: free some memory, then call "
                    f"optimizer.load_state_dict(optimizer.state_dict()) before the next step. {why}"
                )
            finally:
                self._end()
        for one in said:
            warnings.warn(
                "a Controller was let go of, for which close() would have raised an error, with "
                + one,
                RuntimeWarning,
                stacklevel=2,
            )

    def _end(self) -> None:
        self._hooks.remove()
        self._masters.close()
        if self._prefetch is not None:
            self._prefetch.remove()
        self.placement.close()


def _found_inf(optimizer: Optimizer) -> bool:
    """Whether a GradScaler has told a fused optimizer to skip this step. Waits for the device."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and bool(found.any())


def _as_loaded(parameter: torch.Tensor, key: Any, value: Any) -> Any:
    """A state as PyTorch would load it, but on the CPU."""
    if not isinstance(value, torch.Tensor):
        return value
    like = torch.empty(0, dtype=parameter.dtype, device="cpu")
    return Optimizer._process_value_according_to_param_policy(like, value, 0, [], key)
