"""One version of the weights, from the first tensor sent until every worker has switched to it.

    with Transaction(publisher) as tx:      # controller.refit() gives one
        tx.send(refit.named_weights(model))

The block's clean end commits; an exception aborts, and the workers keep the version before. A block
that sends nothing is refused, unless it has no publisher, or has called ``abort``. On ranks of a
sharded model all transactions end alike: where one rank fails, all raise. If each of them has a
publisher, each publishes what it has of the weights (division.py says how they agree on that).

It decides when a version is declared, begun, committed and aborted. How bytes travel is the
publisher's business, and what became of the optimizer's states the controller's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from refit.errors import InvalidError, RefitError, StaleError, StateError
from refit.weights.manifest import (
    Tensors,
    TensorSpec,
    collect,
    is_settled,
    lasting,
    pairs_of,
    planned,
)
from refit.weights.writer import settled

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from refit.weights.division import Division
    from refit.weights.publisher import Publisher, Wait

Phases = Callable[[str], AbstractContextManager[Any]]


def _unobserved(name: str) -> AbstractContextManager[Any]:
    return nullcontext(name)


class Transaction:
    """One version under way; used once, by one thread, as a context manager.

    ``publisher`` is borrowed; None: nothing is published, and sharded weights are gathered along
    with the other ranks all the same. ``version``: a number above all before it, or None for the
    next one. One that is committed already is not published again, so a cycle may be repeated; a
    number whose version was aborted is used up. ``lockstep``: this process is one of the ranks of
    ``group`` which refit together, even if this one fails before it sends. ``phases`` is entered
    around "publish" and "commit". ``wait``: for what the end of the block waits, as in
    ``Publisher.publish``.
    """

    def __init__(
        self,
        publisher: "Publisher | None" = None,
        version: int | None = None,
        *,
        lockstep: bool = False,
        group: "ProcessGroup | None" = None,
        phases: Phases = _unobserved,
        wait: "Wait | None" = None,
    ) -> None:
        self._publisher = publisher
        self._asked = version
        self._lockstep = lockstep
        self._group = group
        self._phases = phases
        self._wait = wait
        self._before = publisher.version if publisher is not None else 0
        self._repeated = publisher is not None and version is not None and version == self._before
        self._begun = False
        self._number = version
        self._over = False
        self._left = False
        self._came = False
        self._committed: int | None = self._before if self._repeated else None
        self._division: Division | None = None
        """How the ranks publish the version together."""
        self._known: set[str] = set()
        self._sent: set[str] = set()

    @property
    def version(self) -> int | None:
        """The number: as asked for, or None for the next one until the block has ended well."""
        return self._asked if self._committed is None else self._committed

    @property
    def committed(self) -> bool:
        """Whether the workers have been told to run on it. True as well if ``commit`` failed
        because workers were lost after that. With ``wait="none"`` it may become so after the block,
        which ``publisher.version`` tells."""
        return self._committed is not None

    @property
    def handed_over(self) -> bool:
        """Whether it is committed, or may still come to be, with ``wait="none"``: ranks in lockstep
        all know."""
        return self.committed or self._left

    def send(self, *weights: Tensors) -> None:
        """Sends named tensors; when it returns, they may change, but for those on the GPU of the
        publisher: workers there read them where they lie until the block ends.

        Each of ``weights`` is a ``NamedWeights``, a mapping, or an iterable of (name, tensor). May
        be called several times, unless ranks publish their shards: then all weights come in one
        call, and from there on a rank that fails is a PeerError at the others. What the first call
        gives is declared if it is new; if later calls give more than that, give all to one call, or
        call ``publisher.declare`` before. An iterator that is the first to say what there is gets
        copied in host memory. Blocks for the copies and until workers let go of an older version.
        Raises InvalidError (a name sent twice, or not declared), StateError (aborted, or over),
        LockstepError (another rank failed), what ``Publisher.begin`` and ``write`` raise, and what
        iterating raises.
        """
        if self._over:
            raise StateError("this transaction is over: begin another one with controller.refit()")
        for one in weights:
            self._join_ranks(one)
        with self._phases("publish"):
            self._division = self._divide(weights)
            if self._division is not None:
                self._publish_shards(self._division)
            else:
                self._send_whole(weights)
        self._came = True

    def _send_whole(self, weights: tuple[Tensors, ...]) -> None:
        publisher = self._publisher
        if publisher is not None and not self._begun:
            publisher.unshard()
        if publisher is None or self._repeated or not self._all_yield(weights):
            for one in weights:
                _drive(one)
        else:
            self._publish(publisher, weights)

    def _divide(self, weights: tuple[Tensors, ...]) -> "Division | None":
        """How the ranks publish these together; None: one of them gathers them."""
        if self._division is not None:
            raise StateError(
                "ranks have published their shards of this version: give all weights to one call of"
                " send"
            )
        if self._came or not any(getattr(one, "divides", False) for one in weights):
            return None
        from refit.weights.division import divide

        return divide(self._publisher, weights, self._asked, self._repeated)

    def abort(self) -> None:
        """Drops the version: workers keep the one before. The block goes on, but sends no more.

        Does nothing a second time.
        """
        self._over = True
        if self._begun and self._publisher is not None:
            self._begun = False
            self._drop(self._publisher)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if value is not None:
            self.abort()
            self._tell(value)
            return
        try:
            self._commit()
        except BaseException as why:
            self._tell(why)
            raise
        self._over = True
        self._tell(None)

    # ---- To the workers

    def _publish(self, publisher: "Publisher", weights: tuple[Tensors, ...]) -> None:
        taken = [planned(one) for one in weights]
        if not publisher.declared:
            taken = [settled(one) for one in taken]
        if not self._begun:
            _declare(publisher, taken)
            self._begin(publisher, self._asked)
            if self._repeated:
                for one in taken:
                    _drive(one)
                return
            self._known = {one.name for one in publisher.declared}
        for one in taken:
            self._write(publisher, one)

    def _publish_shards(self, division: "Division") -> None:
        """The publishers of the ranks tell each other from here on how the version fares."""
        publisher = division.publisher
        if publisher is None:
            return
        self._repeated = division.repeated
        self._committed = division.number if division.repeated else None
        if division.repeated:
            return
        division.tell()
        self._begin(publisher, division.number)
        if not self._repeated:
            self._known = {one.name for one in division.specs}
            self._write(publisher, division.weights)

    def _begin(self, publisher: "Publisher", number: int | None) -> None:
        try:
            chosen = {} if self._wait is None else {"wait": self._wait}
            self._number = publisher.begin(number, **chosen)
            self._begun = True
        except StaleError:  # or it is the one that was left, and begin has waited for its end
            if self._asked != publisher.version:
                raise
            self._repeated, self._committed = True, self._asked
        except RefitError:
            raise
        except BaseException:  # Ctrl-C may come once the version has begun, before it is noted
            self._drop(publisher)
            raise

    def _write(self, publisher: "Publisher", weights: Tensors) -> None:
        """Closes a generator that gathers from other ranks here, not when it is collected."""
        source = weights if isinstance(weights, Mapping) else iter(weights)
        try:
            if is_settled(weights):
                publisher.lend_all(_Settled(self._checked(source), lasting(weights)))
            else:
                publisher.write_all(self._checked(source), together=False)
        finally:
            close = getattr(source, "close", None)
            if close is not None:
                close()

    def _checked(self, source: Tensors) -> Iterator[tuple[str, Any]]:
        for name, tensor in pairs_of(source):
            if name in self._sent:
                raise InvalidError(f'"{name}" is sent twice in one version')
            if name not in self._known:
                raise InvalidError(
                    f'"{name}" came after the version had begun without it: give all weights to '
                    "one call of send; an iterator must bring the names of the last version, which "
                    "a mapping (dict(...)) or publisher.declare changes"
                )
            self._sent.add(name)
            yield name, tensor

    def _commit(self) -> None:
        if not self._begun or self._publisher is None:
            self._refuse_nothing()
            return
        publisher = self._publisher
        self._refuse_missing(publisher)
        try:
            with self._phases("commit"):
                publisher.commit()
        except BaseException:
            if publisher.version != self._number:
                self.abort()
            raise
        finally:
            if publisher.version == self._number:
                self._committed = self._number
                self._begun = False
        self._begun = False
        self._asked, self._left = self._number, True

    def _refuse_nothing(self) -> None:
        """With a publisher, a block that sent nothing has forgotten it, or has caught why."""
        if self._came or self._over or self._repeated or self._publisher is None:
            return
        self.abort()
        kept = f"keep version {self._before}" if self._before else "have no version yet"
        raise StateError(
            "nothing was sent: call tx.send(refit.named_weights(model)) in the block, or tx.abort()"
            f" if no version is wanted; workers {kept}"
        )

    def _refuse_missing(self, publisher: "Publisher") -> None:
        missing = [one.name for one in publisher.declared if self._lacks(one)]
        if missing:
            self.abort()
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise InvalidError(
                f'the version lacks "{missing[0]}"{more}: send every weight that was declared, or '
                "declare those that there are (publisher.declare)"
            )

    def _lacks(self, one: TensorSpec) -> bool:
        if self._division is not None and one.name not in self._division.boxes:
            return False
        return one.alias_of is None and one.name not in self._sent

    def _drop(self, publisher: "Publisher") -> None:
        try:
            publisher.abort()
        except StateError:
            return  # a commit that failed has dropped it already

    # ---- To the other ranks

    def _join_ranks(self, weights: Tensors) -> None:
        if getattr(weights, "collective", False) or getattr(weights, "divides", False):
            self._lockstep = True
            self._group = getattr(weights, "group", self._group)

    @staticmethod
    def _all_yield(weights: tuple[Tensors, ...]) -> bool:
        """Sharded weights come out on one rank; the others only help to gather them."""
        return all(getattr(one, "yields_here", True) for one in weights)

    def _tell(self, why: BaseException | None) -> None:
        """The ranks end together: whose transaction was fine hears whose was not. Publishers that
        have begun to publish shards tell each other: a collective would wait for a rank that is
        lost."""
        if self._division is not None:
            if why is not None:
                self._division.forget()
            return
        if not self._lockstep:
            return
        from refit.weights import lockstep

        if isinstance(why, lockstep.LockstepError):
            return  # all have been told
        error = None if why is None else lockstep.sentence_of(why)
        try:
            known, left = lockstep.agree(
                self._group,
                "end",
                error=error,
                version=self._committed,
                handed_over=self._number if self._left else None,
            )
        except lockstep.LockstepError as others:
            self._committed = self._committed or others.version
            if why is None:
                raise
        else:
            self._committed = self._committed or known
            if left is not None:
                self._asked, self._left = left, True


class _Settled:
    """Pairs that are checked one by one as they are taken, and stay."""

    settled = True

    def __init__(self, pairs: Iterator[tuple[str, Any]], lasts: Callable[[str], bool]) -> None:
        self._pairs = pairs
        self.lasts = lasts

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return self._pairs


def _declare(publisher: "Publisher", weights: Sequence[Tensors]) -> None:
    """Declares what there is, unless a version has all that already. An iterator cannot say."""
    specs: list[TensorSpec] = []
    for one in weights:
        found = _specs_of(one)
        if found is None:
            return
        specs.extend(found)
    if not _has_all(publisher.declared, specs):
        publisher.declare(specs)


def _has_all(declared: Sequence[TensorSpec], specs: Sequence[TensorSpec]) -> bool:
    """A tensor that comes without the one that it is tied to looks like one of its own; the bytes
    of the two are compared when the other one has come."""
    here = {one.name for one in specs}
    seen = (one if one.alias_of in here else one._replace(alias_of=None) for one in declared)
    return set(seen).issuperset(specs)


def _specs_of(weights: Tensors) -> Sequence[TensorSpec] | None:
    manifest = getattr(weights, "manifest", None)
    if callable(manifest):
        return tuple(manifest())
    return collect(weights).specs if is_settled(weights) else None


def _drive(weights: Tensors) -> None:
    """Gathers along with the other ranks, or sees that what is not published could be."""
    for _ in pairs_of(weights):
        pass
