"""Fetch a snapshot of a stage's state from all replicas that have it.

All sources are asked for a description. A snapshot is taken that most of those describe whom its witnesses name
(`peer.witnesses`), and all who describe the same become its holders (`fetch`). A piece
that does not have its digest costs its source the transfer, and only that piece is fetched again. What was verified
stays when all sources are lost, and is used when one of them has that snapshot again. It knows no steps: which
snapshots are of the run's present state is handed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import NamedTuple, Protocol

from swarmnet.clock import loop_time
from swarmnet.errors import BadMessage, NoReplica, PeerTimeout, Refused, RejectCode, SwarmError
from swarmnet.fetch.driver import MOST_S, HolderCalls, PartialContent, PieceFetch, expect, first_answers
from swarmnet.fetch.plan import address, check_content, num_pieces
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Busy, Snapshot, SnapshotPiece, SnapshotRequest, StateHeader, TrailStep
from swarmnet.quorum import has_quorum, quorum
from swarmnet.transport import Transport, ask

Sources = Callable[[], Sequence[PeerId]]
Unfit = Callable[[Snapshot, int], Refused | BadMessage | None]
Offers = dict[Snapshot, list[PeerId]]
"""The sources of each snapshot that is described."""

Progress = Callable[[Snapshot, int, int, float], None]
"""Called with the progress of a snapshot: its bytes received, the number of sources, and bytes per second so far."""

_PATIENCE_S, _PAUSE_S = 5.0, 0.5
"""How long a source with a description is looked for, and how often."""

_SLOWER, _PROMISED_S = 4.0, 12.0
"""A witness may take so many times as long to describe a state as the first source, or so many seconds: one that has
gone is found out by then."""

_DESCRIBED_BYTES_PER_S = 100_000_000
"""As fast as a slow machine copies and hashes a state."""

_LONGEST_WAIT_S, _BUSY_S = 10.0, 60.0
"""How long a busy source is left alone, whatever it says, and how long busy sources are all that is waited for."""

_LOOK_S, _SAY_S = 2.0, 1.0
"""How often further sources are looked for, and progress is said."""


class WitnessRule(Protocol):
    """Who is believed about a state (`peer.witnesses`)."""

    async def told(self, calls: HolderCalls, described: Mapping[PeerId, StateHeader]) -> dict[PeerId, TrailStep]:
        """What each source says of the commits around the state that it described."""
        ...

    def of(self, header: StateHeader, steps: Collection[TrailStep]) -> Named | None:
        """The peers that should describe it alike; None: it cannot be told who they are. Raises BadMessage if the
        header is false."""
        ...

    def class_of(self, peer: PeerId) -> str:
        """Of a peer's weights, since others round differently; "": not known."""
        ...


class Named(NamedTuple):
    """Peers that should describe the same state; empty: the contributors are unknown. usual: the class of their
    weights."""

    witnesses: frozenset[PeerId] = frozenset()
    usual: str = ""


class _Votes(NamedTuple):
    """The witnesses that describe a snapshot, all that have answered, and when to ask again if some are busy."""

    agreed: Set[PeerId]
    heard: Set[PeerId]
    busy_s: float | None


class SnapshotFetch:
    """Fetches snapshots of one stage, one after the other.

    Args:
        max_bytes: no state of this stage is larger.
        failed: called for every source that did not deliver.
        unfit: why a described snapshot is of no use when `version` was asked for (-1: the newest), or None. It is asked
            of every description, and again of what is kept and of what has become whole.
        witnesses: the peers that decide which description is right; None: the number of sources decides.
    """

    def __init__(
        self,
        transport: Transport,
        stage: int,
        *,
        max_bytes: int,
        failed: Callable[[PeerId, SwarmError], None],
        progress: Progress = lambda *facts: None,
        unfit: Unfit = lambda snapshot, version: None,
        witnesses: WitnessRule | None = None,
    ) -> None:
        self.calls = HolderCalls(transport, failed)
        self._stage, self._max_bytes, self._progress, self._unfit = stage, max_bytes, progress, unfit
        self._witnesses = witnesses
        self._partial: tuple[Snapshot, PartialContent] | None = None
        self._described_by: set[PeerId] = set()
        """The sources of the snapshot that is fetched, or was last."""
        self._described_s = 0.0
        """How long the first description took."""

    async def fetch(self, sources: Sources, *, version: int = -1) -> tuple[Snapshot, memoryview]:
        """Fetch one snapshot of `version` (-1: the newest) from the peers that sources() names at the time.

        Raises NoReplica if no source hands one over; what has been verified by then serves the next call.
        """
        since = loop_time()
        while True:
            offers, busy_s = await self._choose(sources(), version)
            if offers:
                # The snapshot with most sources is the fastest, and the likeliest.
                snapshot = max(offers, key=lambda offer: (len(offers[offer]), offer.header.version, offers[offer]))
                if self._partial is None or self._partial[0] != snapshot:
                    self._partial = snapshot, PartialContent(snapshot.content)
                self._described_by, partial = set(offers[snapshot]), self._partial[1]
                had = len(partial.done)
                await self._pull(snapshot, partial, sources, version)
                if partial.complete:
                    self._partial = None
                    # The run may have gone back while the snapshot travelled.
                    if self._unfit(snapshot, version) is None:
                        return snapshot, partial.data
                # As long as pieces arrive, patience starts again.
                if len(partial.done) > had:
                    since = loop_time()
            if loop_time() - since >= (_PATIENCE_S if busy_s is None else _BUSY_S):
                reason = "the peers that describe a copy send none of it" if offers else "no peer hands over a copy"
                raise NoReplica(reason, stage=self._stage)
            await asyncio.sleep(_PAUSE_S if busy_s is None else busy_s)

    def forget(self) -> None:
        """The pieces of an incomplete snapshot are of no use any more."""
        self._partial = None

    def useless(self, error: BadMessage) -> None:
        """The snapshot fetched last was whole and is no state: its sources are left out for a while."""
        for source in sorted(self._described_by):
            self.calls.failed(source, error)

    async def _choose(self, sources: Sequence[PeerId], version: int) -> tuple[Offers, float | None]:
        """What may be fetched, and from which sources; see `_offers`."""
        usable = self.calls.usable(sources)
        kept = self._partial[0] if self._partial is not None else None
        # A source may still have the snapshot of which some pieces are here.
        if kept is not None and version in (-1, kept.header.version) and self._unfit(kept, version) is None:
            offers, _ = await self._offers(usable, kept.header.version, version)
            if kept in offers:
                return {kept: offers[kept]}, None
        began = loop_time()
        offers, busy_s = await self._offers(usable, version, version)
        self._described_s = loop_time() - began
        return await self._witnessed(offers, sources, version) if offers and self._witnesses else (offers, busy_s)

    async def _witnessed(self, offers: Offers, sources: Sequence[PeerId], version: int) -> tuple[Offers, float | None]:
        """The snapshot that its witnesses agree on, if there is one; all that are not false, if no witness is a source.

        With fewer than a quorum of the largest group of witnesses no snapshot is taken: a forged chain has witnesses,
        too. One witness alone is believed as long as no source contradicts it. Of two with equally many the older one
        is taken if the other follows from it, else none.
        """
        assert self._witnesses is not None
        named = await self._named(self._witnesses, offers)
        asked = {snapshot: of.witnesses & set(sources) for snapshot, of in named.items() if of.witnesses & set(sources)}
        # Those who contributed may all have been lost since, or be this peer itself before it was started again.
        if not asked:
            return {snapshot: offers[snapshot] for snapshot in named}, None
        found = await asyncio.gather(*(self._votes(snapshot, offers, of, version) for snapshot, of in asked.items()))
        votes = dict(zip(asked, found, strict=True))
        ranked = sorted(votes, key=lambda snapshot: (-len(votes[snapshot].agreed), snapshot.header.version))
        busy_s = min((of.busy_s for of in found if of.busy_s is not None), default=None)
        best, (agreed, heard, _) = ranked[0], votes[ranked[0]]
        ties = [other for other in ranked[1:] if len(votes[other].agreed) == len(agreed)]
        rivals = [
            source
            for other, of in offers.items()
            if other != best and _is_same_past(other, best)
            for source in of
            if self._witnesses.class_of(source) in ("", named[best].usual)
        ]
        if (
            len(agreed) < quorum(max(len(of.heard) for of in found))
            or not has_quorum(agreed, heard)
            or (len(agreed) == 1 and rivals)
            or any(other.header.before != best.header.chain for other in ties)
        ):
            return {}, busy_s
        for source in sorted(rivals):
            odd = Refused(RejectCode.STALE, "describes another state than most contributors do", peer=source)
            self.calls.failed(source, odd)
        return {best: sorted({*offers[best], *agreed})}, None

    async def _named(self, rule: WitnessRule, offers: Offers) -> dict[Snapshot, Named]:
        """The witnesses of each snapshot, but for false ones and those of which that cannot be told."""
        described = {source: snapshot.header for snapshot, of in offers.items() for source in of}
        told, named = await rule.told(self.calls, described), dict[Snapshot, Named]()
        steps: dict[tuple[int, str], list[TrailStep]] = {}
        for source, step in sorted(told.items()):
            steps.setdefault(_past(described[source]), []).append(step)
        for snapshot in offers:
            try:
                # Commits that contradict each other can come from any peer: they are no fault of the sources that
                # describe the state.
                if (found := rule.of(snapshot.header, steps.get(_past(snapshot.header), []))) is not None:
                    named[snapshot] = found
            except BadMessage as error:
                for source in offers[snapshot]:
                    self.calls.failed(source, error)
        return named

    async def _votes(self, snapshot: Snapshot, offers: Offers, witnesses: Set[PeerId], version: int) -> _Votes:
        at, busy = snapshot.header.version, list[float]()
        agreed = {*witnesses & set(offers[snapshot])}
        heard = {
            source for other, of in offers.items() if other.header.version == at for source in of if source in witnesses
        }

        async def ask(source: PeerId) -> None:
            answer = await self._describe(source, at, version, heard=heard)
            if answer == snapshot:
                agreed.add(source)
            elif isinstance(answer, Busy):
                busy.append(answer.retry_after_s)

        # A large state takes some time to describe: a fast source must not decide before the others have. But one may
        # promise an answer for ever: it counts as one that does not agree, and by the next version others may decide.
        if not has_quorum(agreed, witnesses):
            asked = {source: ask(source) for source in witnesses - heard}
            # A Byzantine source may describe at once what others copy and hash first.
            size_s = snapshot.content.num_bytes // _DESCRIBED_BYTES_PER_S
            most_s = max(_SLOWER * self._described_s, min(_PROMISED_S + size_s, MOST_S))
            _, late = await first_answers(asked, counts=lambda _: has_quorum(agreed, witnesses), most_s=most_s)
            heard.update(late)
            for source in late:
                self.calls.failed(source, PeerTimeout("promises to describe a state", peer=source), after_s=most_s)
        return _Votes(agreed, heard, _wait_s(busy))

    async def _offers(self, sources: Sequence[PeerId], asked: int, version: int) -> tuple[Offers, float | None]:
        """The sources of each snapshot that is described; without any, when to ask again if sources are busy."""
        describe = {source: self._describe(source, asked, version) for source in sources}
        answers, _ = await first_answers(describe, counts=lambda answer: isinstance(answer, Snapshot))
        offers: Offers = {}
        for source, answer in sorted(answers.items()):
            if isinstance(answer, Snapshot):
                offers.setdefault(answer, []).append(source)
        busy = [answer.retry_after_s for answer in answers.values() if isinstance(answer, Busy)]
        return offers, None if offers else _wait_s(busy)

    async def _describe(
        self, source: PeerId, asked: int, version: int, *, heard: set[PeerId] | None = None
    ) -> Snapshot | Busy | None:
        """A source's checked description of version `asked`; None if it gave none that can be used.

        heard: gets the source if it answers at all.
        """

        def check(answer: Answer) -> Snapshot | Busy:
            if heard is not None:
                heard.add(source)
            if isinstance(answer, Busy):
                return answer
            snapshot = expect(answer, Snapshot, source)
            # It answers another question.
            if snapshot.stage != self._stage or asked not in (-1, snapshot.header.version):
                raise BadMessage(RejectCode.MALFORMED, "another copy than asked for", peer=source)
            check_content(snapshot.content, max_bytes=self._max_bytes, holder=source)
            if (error := self._unfit(snapshot, version)) is not None:
                raise error
            return snapshot

        return await self.calls.ask(source, SnapshotRequest(self._stage, asked), check)

    async def _pull(self, snapshot: Snapshot, partial: PartialContent, sources: Sources, version: int) -> None:
        """Fetch the pieces that are missing, until all are here or all sources are lost."""
        named, began, had = address(snapshot.content), loop_time(), partial.done_bytes
        said_at = began - _SAY_S

        async def get(source: PeerId, piece: int) -> None:
            request = SnapshotRequest(self._stage, snapshot.header.version, named, piece)
            answer = expect(await ask(self.calls.transport, source, request), SnapshotPiece, source)
            if len(answer.payload) != 1:
                raise BadMessage(RejectCode.MALFORMED, "not one piece", piece=piece, peer=source)
            await partial.put(piece, answer.payload[0].data, source)
            if loop_time() - said_at >= _SAY_S:
                say()

        def say() -> None:
            nonlocal said_at
            said_at, done = loop_time(), partial.done_bytes
            rate = (done - had) / (said_at - began) if said_at > began else 0.0
            self._progress(snapshot, done, len(fetch.plan.holders), rate)

        fetch = PieceFetch(
            num_pieces(snapshot.content), get, sorted(self._described_by), done=partial.done, dropped=self.calls.failed
        )
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(self._look(snapshot, fetch, sources, version))
            await fetch.run()
            say()
            looking.cancel()

    async def _look(self, snapshot: Snapshot, fetch: PieceFetch, sources: Sources, version: int) -> None:
        """Other sources may have the same snapshot: those that start meanwhile, and those that were a step behind."""
        while True:
            others = [source for source in self.calls.usable(sources()) if source not in fetch.plan.holders]
            offers, _ = await self._offers(others, snapshot.header.version, version)
            for source in offers.get(snapshot, ()):
                self._described_by.add(source)
                fetch.plan.add(source)
            await asyncio.sleep(_LOOK_S)


def _wait_s(busy: Sequence[float]) -> float | None:
    """When to ask busy sources again: as they wish, within reason. None: there are none."""
    return min(max(min(busy), _PAUSE_S), _LONGEST_WAIT_S) if busy else None


def _past(header: StateHeader) -> tuple[int, str]:
    return header.version, header.chain


def _is_same_past(one: Snapshot, other: Snapshot) -> bool:
    return _past(one.header) == _past(other.header)
