"""Where optimizer states live and what steps their parameters: the schedules that a controller is
given.

    refit.Cycle()          states live on the device, and leave between a step and the next rollout
    refit.HostStates(...)  states live on the host, and visit the device in windows during a step
    refit.CpuStep(...)     a share of the parameters is stepped on the CPU, where their states live

The cycle is there in every schedule, for the states that live on the device. ``HostStates`` and
``CpuStep`` combine: ``schedule=[refit.HostStates(), refit.CpuStep(fraction=0.3)]``. A configuration
file names them as a mapping: ``schedule: {host_states: {window_bytes: 256MiB}, cpu_step: {fraction:
0.3}}``, or as a word: ``schedule: host_states``.

Independent of how a schedule is carried out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeAlias

from refit._c.config import bytes_of
from refit.errors import InvalidError

# ---- A division of whole parameters, by the bytes of their states ------------------------------

STAYS = 0
"""On the device, and takes part in the cycle."""
WINDOWS = 1
"""On the host; the states visit the device."""
CPU = 2
"""On the host, where the CPU steps the parameter."""

AUTO = "auto"
"""Instead of a number of bytes that stay: as many as there is memory for."""

Params: TypeAlias = Literal["last", "largest"] | Sequence[str]


class Division:
    """Divides parameters.

    ``resident_bytes`` of the first stay, or all but ``host_fraction``. ``stepped_fraction``: the
    share of all states that the CPU steps. ``params``: which these are: "last": the last parameters
    of the model, whose gradients are final first; "largest"; or names, with ``*`` and ``?`` as in a
    shell. ``windows``: the others visit the device; without, they stay.
    """

    def __init__(
        self,
        resident_bytes: int | None = None,
        host_fraction: float | None = None,
        stepped_fraction: float = 0.0,
        params: Params = "last",
        *,
        windows: bool = True,
    ) -> None:
        self._resident_bytes = resident_bytes
        self._host_fraction = host_fraction
        self._stepped_fraction = stepped_fraction
        self._params = params
        self._windows = windows
        self._total = self._on_cpu = 0
        self._unmatched = set() if isinstance(params, str) else set(params)

    @property
    def why_it_stays(self) -> str:
        """What is told of a parameter whose states stay on the device."""
        options = "HostStates(resident_bytes, fraction)" if self._windows else "CpuStep(fraction)"
        return f"its states stay on the device, by {options}"

    def divide(self, names: Sequence[str], order: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Where each parameter belongs, by its name, its place in the order of the forward pass,
        and the bytes of its states. Of parameters that come later as much goes to the CPU as is its
        share of all, and none stays that could be in windows. InvalidError for a name to pick that
        no parameter has; one that only parameters without states have is accepted."""
        places = [WINDOWS if self._windows else STAYS] * len(sizes)
        for number in range(self._first(sizes)):
            places[number] = STAYS
        self._total += sum(sizes)
        budget = math.floor(self._total * self._stepped_fraction)
        for number in self._picked(names, order, sizes):
            free = self._windows and places[number] == STAYS
            if not free and self._on_cpu + sizes[number] <= budget:
                places[number] = CPU
                self._on_cpu += sizes[number]
        return places

    def _first(self, sizes: Sequence[int]) -> int:
        """How many of the first parameters keep their states on the device. Once: those that are
        planned later have no share."""
        budget = self._resident_bytes or 0
        if self._host_fraction is not None:
            budget = math.floor(sum(sizes) * (1 - self._host_fraction))
        self._resident_bytes, self._host_fraction = 0, None
        for number, nbytes in enumerate(sizes):
            budget -= nbytes
            if budget < 0:
                return number
        return len(sizes)

    def _picked(
        self, names: Sequence[str], order: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Those that the CPU may step, first those that it is to step first."""
        found = [at for at, nbytes in enumerate(sizes) if nbytes]
        if self._params == "largest":
            return sorted(found, key=lambda at: (-sizes[at], -order[at]))
        if self._params == "last":
            found.sort(key=lambda at: -order[at])
            is_all = self._stepped_fraction >= 1 or len(found) < 2
            return found if is_all else found[:-1]  # not the gradient that is final last
        matched = {one: [at for at in found if fnmatchcase(names[at], one)] for one in self._params}
        # A rank may have no element of a parameter that it names as the others do.
        self._unmatched -= {
            one for one in self._unmatched if any(fnmatchcase(name, one) for name in names)
        }
        if self._unmatched:
            raise InvalidError(
                f"CpuStep: params names {sorted(self._unmatched)[0]!r}, and no parameter that is "
                "trained has that name: say names as model.named_parameters() gives them, with * "
                "and ? if need be"
            )
        return list(dict.fromkeys(at for numbers in matched.values() for at in numbers))


@dataclass(frozen=True)
class Cycle:
    """States live on the device; they leave at ``offload`` and return after ``restore``. This is
    what a controller does without a schedule."""


@dataclass(frozen=True, kw_only=True)
class HostStates:
    """States live on the host, and visit the device in windows while ``optimizer.step()`` runs.

    ``window_bytes`` and ``windows`` (1 to 4): the device memory that they take, also in the first
    step; None: as configured (``offload.window_bytes``, ``offload.windows``). A parameter whose
    states are larger than a window is stepped part by part where PyTorch's arithmetic is element by
    element; else the window grows. ``prefetch``: the first windows come in during the backward
    pass, if there is memory. ``resident_bytes`` (a number, or "2GiB"), or all but
    ``fraction`` (0 to 1): the states of the first parameters live on the device, and take part in
    the cycle. ``resident_bytes="auto"``: on a GPU as many bytes as the iterations leave free, which
    is decided anew after each. ``allow_unverified``, ``verify_steps``: see ``CpuStep``; what one of
    two combined schedules says of them holds for both.
    """

    window_bytes: int | str | None = None
    windows: int | None = None
    prefetch: bool = True
    resident_bytes: int | str | None = None
    fraction: float | None = None
    allow_unverified: bool = False
    verify_steps: int = 0

    def __post_init__(self) -> None:
        _check_share("HostStates", self.fraction)
        if self.resident_bytes is not None and self.fraction is not None:
            raise InvalidError(
                "HostStates: resident_bytes and fraction say the same: give one of them"
            )
        if self.resident_bytes is not None and self.resident_bytes != AUTO:
            try:
                bytes_of("resident_bytes", self.resident_bytes)
            except InvalidError as why:
                raise InvalidError(f'{why.text}; or "auto"') from why


@dataclass(frozen=True, kw_only=True)
class CpuStep:
    """Parameters with so large a share of all states' bytes as ``fraction`` (0 to 1) are stepped on
    the CPU, where their states live.

    ``params``: which these are: "last": the last ones of the model, whose gradients are final
    first; "largest"; or a list of names, with ``*`` and ``?`` as in a shell. ``overlap``: their
    gradients leave during the backward pass, from the second step on, in a process that trains
    alone; otherwise at ``step()``. ``backend``: "auto": kernels of the C library step Adam, AdamW,
    Adagrad and SGD of ``torch.optim`` on fp32 parameters, with ``offload.host_step_threads``
    threads and the bits of PyTorch's for-loop on the CPU, and PyTorch's own code steps all others,
    and on a CPU those with ``fused=True``; "torch": PyTorch's code steps all.

    ``allow_unverified``: an optimizer is tried on two tiny parameters, and refused if its update of
    one reads the other; True takes it all the same, and each window is then a step of its own.
    ``verify_steps``: so many first steps are also made on copies, of all parameters at once, and
    UnsupportedError names what has other bits. It is for an optimizer that nobody has tried, once;
    it takes the device memory of parameters, gradients and states again.
    """

    fraction: float = 1.0
    params: Literal["last", "largest"] | Sequence[str] = "last"
    overlap: bool = True
    backend: Literal["auto", "torch"] = "auto"
    allow_unverified: bool = False
    verify_steps: int = 0

    def __post_init__(self) -> None:
        _check_share("CpuStep", self.fraction)
        if self.backend not in ("auto", "torch"):
            raise InvalidError(f"CpuStep: backend={self.backend!r}: say auto or torch")
        if isinstance(self.params, str):
            if self.params not in ("last", "largest"):
                raise InvalidError(
                    f"CpuStep: params={self.params!r}: say last, largest, or a list of names of "
                    "parameters"
                )
        elif not all(isinstance(one, str) for one in self.params):
            raise InvalidError(f"CpuStep: params={self.params!r}: a list has names, as text")


Schedule: TypeAlias = Cycle | HostStates | CpuStep
ScheduleLike: TypeAlias = Schedule | Sequence[Schedule] | Mapping[str, Any] | str | None

_KINDS: dict[str, type[Schedule]] = {"cycle": Cycle, "host_states": HostStates, "cpu_step": CpuStep}


class Chosen(NamedTuple):
    """What a schedule has besides the cycle."""

    host: HostStates | None = None
    cpu: CpuStep | None = None

    @property
    def lives_on_host(self) -> bool:
        """Whether some states do not live on the device; the controller is needed from the first
        step on."""
        return self.host is not None or self._stepped is not None

    @property
    def sizes(self) -> dict[str, Any]:
        """Options that override the configuration."""
        if self.host is None:
            return {}
        sizes = {"window_bytes": self.host.window_bytes, "windows": self.host.windows}
        return {f"offload_{key}": value for key, value in sizes.items() if value is not None}

    @property
    def is_auto(self) -> bool:
        """Whether free memory decides how many states stay on the device."""
        return self.host is not None and self.host.resident_bytes == AUTO

    @property
    def allow_unverified(self) -> bool:
        return any(one.allow_unverified for one in self if one is not None)

    @property
    def verify_steps(self) -> int:
        return max((one.verify_steps for one in self if one is not None), default=0)

    @property
    def _stepped(self) -> CpuStep | None:
        return self.cpu if self.cpu is not None and self.cpu.fraction > 0 else None

    def division(self) -> Division | None:
        """Where the states of each parameter live; None: all take part in the cycle."""
        cpu = self._stepped
        if self.host is None and cpu is None:
            return None
        stays = None if self.host is None or self.is_auto else self.host.resident_bytes
        return Division(
            None if stays is None else bytes_of("resident_bytes", stays),
            None if self.host is None else self.host.fraction,
            0.0 if cpu is None else cpu.fraction,
            "last" if cpu is None else cpu.params,
            windows=self.host is not None,
        )


def chosen(given: ScheduleLike) -> Chosen:
    """The parts of what a controller, or a configuration, was given.

    InvalidError: values that cannot be, or not together. TypeError: something else than a schedule,
    or a keyword that none of it has.
    """
    parts = _parts(given)
    hosts = [one for one in parts if isinstance(one, HostStates)]
    cpus = [one for one in parts if isinstance(one, CpuStep)]
    if len(parts) > 1 and (len(hosts) > 1 or len(cpus) > 1 or len(hosts) + len(cpus) < len(parts)):
        names = " and ".join(type(one).__name__ for one in parts)
        raise InvalidError(
            f"schedule: {names} do not combine: give one HostStates, one CpuStep, or both; the "
            "cycle is there in any case"
        )
    found = Chosen(hosts[0] if hosts else None, cpus[0] if cpus else None)
    stepped = 0.0 if found.cpu is None else found.cpu.fraction
    on_host = None if found.host is None else found.host.fraction
    if on_host is not None and stepped > on_host:
        raise InvalidError(
            f"CpuStep(fraction={stepped}) is more than HostStates(fraction={on_host}): both are "
            "shares of all states, and the CPU steps parameters whose states live on the host"
        )
    return found


def named(given: ScheduleLike) -> dict[str, dict[str, Any]]:
    """The mapping that a configuration file has for it: the share, and what is not the default."""
    words = {kind: word for word, kind in _KINDS.items()}
    found: dict[str, dict[str, Any]] = {}
    for one in _parts(given):
        keywords = {its.name: (getattr(one, its.name), its.default) for its in fields(one)}
        found[words[type(one)]] = {
            name: value
            for name, (value, default) in keywords.items()
            if value != default or (name == "fraction" and value is not None)
        }
    return found


def _parts(given: Any) -> list[Schedule]:
    if given is None:
        return []
    if isinstance(given, Schedule):
        return [given]
    if isinstance(given, str):
        given = {given: None}
    if isinstance(given, Mapping):
        return [_made(word, keywords) for word, keywords in given.items()]
    if isinstance(given, type) or not isinstance(given, Sequence):
        raise TypeError(
            f"schedule={given!r}: give refit.Cycle(), refit.HostStates(...), refit.CpuStep(...), "
            "or a list of them"
        )
    return [part for one in given for part in _parts(one)]


def _made(word: str, keywords: Any) -> Schedule:
    kind = _KINDS.get(word)
    if kind is None:
        raise InvalidError(f"schedule: {word!r} is none: say {', '.join(_KINDS)}")
    if keywords is not None and not isinstance(keywords, Mapping):
        raise InvalidError(f"schedule: {word} has keywords, and {keywords!r} is not a mapping")
    known = [its.name for its in fields(kind)]
    for key in keywords or {}:
        if key not in known:
            raise InvalidError(
                f"schedule: {word} has no {key!r}; it has {', '.join(known) or 'no keywords'}"
            )
    return kind(**(keywords or {}))


def _check_share(kind: str, share: Any) -> None:
    if share is not None and not (isinstance(share, int | float) and 0 <= share <= 1):
        raise InvalidError(f"{kind}: fraction={share!r}: say a share from 0 to 1")


_MOVED = {
    "states": '"host" is schedule=refit.HostStates(), "cycle" is the default',
    "window_bytes": "schedule=refit.HostStates(window_bytes=...)",
    "windows": "schedule=refit.HostStates(windows=...)",
    "prefetch": "schedule=refit.HostStates(prefetch=...)",
    "resident_bytes": "schedule=refit.HostStates(resident_bytes=...)",
    "host_fraction": "schedule=refit.CpuStep(fraction=...), and with states on the host "
    "refit.HostStates(fraction=...)",
    "cpu_fraction": "schedule=[refit.HostStates(), refit.CpuStep(fraction=...)]",
    "fraction": "refit.CpuStep(fraction=...) or refit.HostStates(fraction=...)",
    "params": "schedule=refit.CpuStep(params=...)",
    "host_pick": 'schedule=refit.CpuStep(params=...), where "late" is "last"',
    "overlap": "schedule=refit.CpuStep(overlap=...)",
    "backend": "schedule=refit.CpuStep(backend=...)",
    "host_step": "schedule=refit.CpuStep(backend=...)",
    "any_optimizer": "the schedule's allow_unverified=...",
    "allow_unverified": "schedule=refit.HostStates(allow_unverified=...), or CpuStep's",
    "verify_steps": "schedule=refit.HostStates(verify_steps=...), or CpuStep's",
}


def refuse_keywords(given: Mapping[str, Any]) -> None:
    """TypeError for a keyword that belongs to a schedule."""
    for key in given:
        if key in _MOVED:
            raise TypeError(f"{key}= is not a keyword of Controller: say {_MOVED[key]}")
