"""Take a copy of a stage's state from everybody who has it, piece by piece, believing nobody.

All donors are asked for a description; those who offer the same copy are its sources. `stage.piece_schedule` decides
who is asked for what. A piece that has not its digest costs its donor the transfer, and only that piece is fetched
again. What is verified stays when all sources are lost, and is used when somebody has that copy again. Knows no steps:
which copies are of the run's present state is handed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from swarmnet.errors import BadMessage, NoReplica, PeerGone, PeerTimeout, Refused, RejectCode, SwarmError
from swarmnet.ids import PeerId
from swarmnet.messages import Busy, Packed, Rejected, Snapshot, SnapshotPiece, SnapshotRequest
from swarmnet.stage.piece_schedule import Action, Ask, PieceSchedule
from swarmnet.state.header import loop_time
from swarmnet.state.snapshot_index import LARGE, Seal, digest_of, num_pieces, same_copy, sha256, span
from swarmnet.transport import Transport, ask

T = TypeVar("T")

Donors = Callable[[], Sequence[PeerId]]
Failed = Callable[[PeerId, SwarmError], None]
Unfit = Callable[[Snapshot, int], Refused | BadMessage | None]

ASIDE_S = 60.0
"""How long a donor that has lied, or was late, is set aside."""

GRACE_S = 1.0
"""How long after the first donor's description those of others are waited for; who takes longer is late."""

_PATIENCE_S, _PAUSE_S = 5.0, 0.5
"""How long somebody with a description is looked for, and how often."""

_LONGEST_WAIT_S, _BUSY_S = 10.0, 60.0
"""How long a busy donor is left alone, whatever it says, and how long busy donors are all that is waited for."""

_TICK_S, _LOOK_S = 0.25, 2.0
"""How often progress is judged, and how often further donors are looked for."""


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """How far a transfer is."""

    version: int
    done_bytes: int
    total_bytes: int
    donors: int
    bytes_per_s: float
    """So far."""

    @property
    def seconds_left(self) -> float | None:
        """At that rate, None before there is one."""
        return (self.total_bytes - self.done_bytes) / self.bytes_per_s if self.bytes_per_s else None


class Aside:
    """The donors that one joiner has set aside. Pure.

    A liar is asked for nothing at all. Who was only late is left out as long as somebody else is there: a peer that
    cannot be called costs a joiner its patience once a minute, and not once a step.
    """

    def __init__(self) -> None:
        self._lied: dict[PeerId, float] = {}
        self._late: dict[PeerId, float] = {}

    def lied(self, donor: PeerId, *, now: float) -> None:
        """What it handed over was not what it described, or could not be true."""
        self._lied[donor] = now + ASIDE_S

    def late(self, donor: PeerId, *, now: float) -> None:
        """It has not answered in time."""
        self._late[donor] = now + ASIDE_S

    def answered(self, donor: PeerId) -> None:
        """It has answered: whatever kept it is over."""
        self._late.pop(donor, None)

    def asked(self, donors: Iterable[PeerId], *, now: float) -> list[PeerId]:
        """Whom of these to ask now, each once. Those who were late only if there is nobody else."""
        honest = [donor for donor in dict.fromkeys(donors) if self._lied.get(donor, now) <= now]
        return [donor for donor in honest if self._late.get(donor, now) <= now] or honest


async def first_answers(
    asked: Mapping[PeerId, Coroutine[Any, Any, T]], *, grace_s: float, counts: Callable[[T], bool]
) -> tuple[dict[PeerId, T], list[PeerId]]:
    """Answers by peer, in the order in which they came, and who has not answered `grace_s` after the first that counts.

    Once one answer counts, those of others are waited for a little, and not for as long as the slowest takes.
    """
    loop = asyncio.get_running_loop()
    answers: dict[PeerId, T] = {}
    until: float | None = None
    async with asyncio.TaskGroup() as group:
        tasks = {group.create_task(work): peer for peer, work in asked.items()}
        waiting = set(tasks)
        while waiting and (until is None or until > loop.time()):
            timeout = None if until is None else until - loop.time()
            done, waiting = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                answers[tasks[task]] = task.result()
                # From now on the others have `grace_s` left.
                if until is None and counts(task.result()):
                    until = loop.time() + grace_s
        # They had their time, and would hold up the joiner.
        for task in waiting:
            task.cancel()
    return answers, [tasks[task] for task in waiting]


class _PartialCopy:
    """A copy that is being put together."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        # Not a bytearray: that would first write every byte as zero.
        self.data: memoryview = np.empty(snapshot.num_bytes, dtype=np.uint8).data
        self.done: set[int] = set()

    @property
    def done_bytes(self) -> int:
        return sum(stop - start for start, stop in (span(self.snapshot, piece) for piece in self.done))

    async def put(self, piece: int, data: bytes | bytearray | memoryview, donor: PeerId) -> None:
        """Take in a piece. Raises BadMessage if it is not the one described."""
        if await sha256(data) != digest_of(self.snapshot, piece):
            raise BadMessage(RejectCode.MALFORMED, "a piece that does not have its digest", piece=piece, peer=donor)
        start, stop = span(self.snapshot, piece)
        if len(data) <= LARGE:
            self.data[start:stop] = data
        else:
            await asyncio.to_thread(self.data.__setitem__, slice(start, stop), data)


class Fetcher:
    """Fetches copies of one (peer, stage), one after the other.

    failed(donor, error) hears of every donor that did not deliver. max_bytes: no state of this stage is larger.
    unfit(snapshot, version): why a described copy is not to be had when `version` was asked for (-1: the newest), or
    None. It is asked of every description, and again of what is kept and of what has become whole.
    """

    def __init__(
        self,
        transport: Transport,
        stage: int,
        seal: Seal,
        *,
        max_bytes: int,
        failed: Failed,
        progress: Callable[[TransferProgress], None] = lambda _: None,
        unfit: Unfit = lambda snapshot, version: None,
    ) -> None:
        self._transport, self._stage, self._seal = transport, stage, seal
        self._max_bytes, self.progress, self._failed, self._unfit = max_bytes, progress, failed, unfit
        self._copy: _PartialCopy | None = None
        self._aside = Aside()
        self.vouched: set[PeerId] = set()  # who described the copy that is fetched, or was last

    async def fetch(self, donors: Donors, *, version: int = -1) -> tuple[Snapshot, memoryview]:
        """Fetch and verify one copy of `version` (-1: the newest) from whoever donors() names at the time.

        Raises NoReplica if nobody hands one over; what has been verified by then serves the next call.
        """
        until = loop_time() + _PATIENCE_S
        while True:
            copy, sources = await self._choose(donors, version)
            self._copy, self.vouched = copy, set(sources)
            had = len(copy.done)
            pull = _Pull(self, copy, sources, donors, version)
            await pull.run()
            if len(copy.done) == num_pieces(copy.snapshot):
                self._copy = None
                # The run may have gone back while the copy came in.
                if self._unfit(copy.snapshot, version) is None:
                    return copy.snapshot, copy.data
            # As long as pieces come in, patience starts anew.
            if len(copy.done) > had:
                until = loop_time() + _PATIENCE_S
            elif loop_time() >= until:
                raise NoReplica("those who describe a copy hand over none of it", stage=self._stage)
            await asyncio.sleep(_PAUSE_S)

    def forget(self) -> None:
        """What has been fetched by halves is of no use any more."""
        self._copy = None

    def useless(self, error: BadMessage) -> None:
        """The copy fetched last was whole and is no state: whoever vouched for it is asked no more for a while."""
        for donor in sorted(self.vouched):
            self.failed(donor, error)

    async def _choose(self, donors: Donors, version: int) -> tuple[_PartialCopy, list[PeerId]]:
        """What to fetch, and from whom."""
        began = loop_time()
        while True:
            candidates = self.trusted(donors())
            kept = self._copy
            # What is here by halves is of a past that was given up.
            if kept is not None and self._unfit(kept.snapshot, version) is not None:
                kept = self._copy = None
            # Somebody may still have the copy that is here by halves.
            if kept is not None and version in (-1, kept.snapshot.version):
                request = SnapshotRequest(self._stage, kept.snapshot.version, kept.snapshot.root)
                offers, _ = await self._offers(candidates, request, version)
                having = [peer for peer, offer in offers.items() if same_copy(offer, kept.snapshot)]
                if having:
                    return kept, having
            offers, wait_s = await self._offers(candidates, SnapshotRequest(self._stage, version), version)
            if offers:
                # Equal states have equal roots: the copy with most donors is the fastest, and the likeliest.
                groups: dict[bytes, list[PeerId]] = {}
                for peer, offer in sorted(offers.items()):
                    groups.setdefault(offer.root, []).append(peer)
                best = max(groups.values(), key=lambda peers: (len(peers), offers[peers[0]].version, peers))
                chosen = offers[best[0]]
                return _PartialCopy(chosen), [peer for peer in best if same_copy(offers[peer], chosen)]
            if loop_time() - began >= (_PATIENCE_S if wait_s is None else _BUSY_S):
                raise NoReplica("nobody hands over a copy", stage=self._stage, asked=len(candidates))
            await asyncio.sleep(_PAUSE_S if wait_s is None else wait_s)

    async def _offers(
        self, donors: Sequence[PeerId], request: SnapshotRequest, version: int
    ) -> tuple[dict[PeerId, Snapshot], float | None]:
        """Descriptions by donor, and after how long to ask again if donors are busy."""
        asked = {donor: self.describe(donor, request, version) for donor in donors}
        answers, _ = await first_answers(asked, grace_s=GRACE_S, counts=lambda answer: isinstance(answer, Snapshot))
        offers = {donor: answer for donor, answer in answers.items() if isinstance(answer, Snapshot)}
        return offers, min((pause_s(busy) for busy in answers.values() if isinstance(busy, Busy)), default=None)

    async def describe(self, donor: PeerId, request: SnapshotRequest, version: int) -> Snapshot | Busy | None:
        """A donor's checked description; None if it gave none that can be used. version: as `fetch` was asked for."""
        began = loop_time()
        try:
            answer = await ask(self._transport, donor, request)
            self._aside.answered(donor)
            match answer:
                case Busy():
                    return answer
                case Rejected():
                    raise Refused(answer.code, answer.reason, peer=donor)
                case Snapshot():
                    self._seal.check(answer, donor=donor, stage=self._stage, max_bytes=self._max_bytes)
                    # It answers another question.
                    if request.version not in (-1, answer.version) or request.root not in (b"", answer.root):
                        raise BadMessage(RejectCode.MALFORMED, "another copy than asked for", peer=donor)
                    error = self._unfit(answer, version)
                    if error is not None:
                        raise error
                    return answer
                case _:
                    raise BadMessage(RejectCode.MALFORMED, "not an answer to SnapshotRequest", peer=donor)
        except (BadMessage, Refused, PeerGone, PeerTimeout) as error:
            self.failed(donor, error, after_s=loop_time() - began)
            return None

    async def piece(self, donor: PeerId, copy: _PartialCopy, piece: int) -> None:
        """Fetch one piece and put it in its place. Raises BadMessage, Refused, PeerGone, PeerTimeout."""
        described = copy.snapshot
        request = SnapshotRequest(self._stage, described.version, described.root, piece)
        start, stop = span(described, piece)
        match answer := await ask(self._transport, donor, request):
            case Rejected():
                raise Refused(answer.code, answer.reason, peer=donor)
            case SnapshotPiece((Packed(_, _, data),)) if len(data) == stop - start:
                await copy.put(piece, data, donor)
            case _:
                raise BadMessage(RejectCode.MALFORMED, "not the piece asked for", piece=piece, peer=donor)

    def failed(self, donor: PeerId, error: SwarmError, *, after_s: float = 0.0) -> None:
        """A donor did not deliver, `after_s` after it was asked; one that lied or kept us waiting is set aside."""
        # A lie costs a minute of being asked for nothing.
        if isinstance(error, BadMessage):
            self._aside.lied(donor, now=loop_time())
        elif isinstance(error, PeerGone | PeerTimeout) and after_s >= GRACE_S:
            self._aside.late(donor, now=loop_time())
        self._failed(donor, error)

    def trusted(self, donors: Sequence[PeerId]) -> list[PeerId]:
        """Those who have not lied lately, nor kept us waiting; see `Aside.asked`."""
        return self._aside.asked(donors, now=loop_time())


def pause_s(busy: Busy) -> float:
    """How long to leave a busy donor alone: as it wishes, within reason."""
    return min(max(busy.retry_after_s, _PAUSE_S), _LONGEST_WAIT_S)


class _Pull:
    """One copy on its way: performs what the schedule asks for until it is whole or nobody is left."""

    def __init__(
        self, fetcher: Fetcher, copy: _PartialCopy, sources: Sequence[PeerId], donors: Donors, version: int
    ) -> None:
        self._fetcher, self._copy, self._donors, self._first = fetcher, copy, donors, sources
        self._version = version
        self._schedule = PieceSchedule(num_pieces(copy.snapshot), done=copy.done)
        self._asking: dict[tuple[PeerId, int], asyncio.Task[None]] = {}
        self._over = asyncio.Event()
        self._began, self._had_bytes, self._said = loop_time(), copy.done_bytes, -1e9
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Until the copy is whole or all sources are lost."""
        async with asyncio.TaskGroup() as self._group:
            looking = [self._group.create_task(self._ticking()), self._group.create_task(self._looking())]
            for peer in self._first:
                self._perform(self._schedule.add(peer, now=loop_time()))
            self._look_whether_over()
            await self._over.wait()
            for task in [*looking, *self._asking.values()]:
                task.cancel()

    def _perform(self, actions: Sequence[Action]) -> None:
        assert self._group is not None
        for action in actions:
            at = action.peer, action.piece
            if isinstance(action, Ask):
                self._asking[at] = self._group.create_task(self._piece(*at))
            elif (task := self._asking.pop(at, None)) is not None and task is not asyncio.current_task():
                task.cancel()

    async def _piece(self, peer: PeerId, piece: int) -> None:
        try:
            await self._fetcher.piece(peer, self._copy, piece)
        except (BadMessage, Refused, PeerGone, PeerTimeout) as error:
            if peer in self._schedule.sources:  # else it has been said of another piece
                self._fetcher.failed(peer, error)
            self._perform(self._schedule.remove(peer, now=loop_time()))
        else:
            self._copy.done.add(piece)
            self._asking.pop((peer, piece), None)
            self._perform(self._schedule.arrived(peer, piece, now=loop_time()))
        self._look_whether_over()

    def _look_whether_over(self) -> None:
        if self._schedule.complete or not self._schedule.sources:
            self._say()
            self._over.set()

    async def _ticking(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._perform(self._schedule.fill(loop_time()))
            # A line a second is enough for people.
            if loop_time() - self._said >= 1.0:
                self._say()

    async def _looking(self) -> None:
        """Others may have the same copy: those who come up meanwhile, and those who were a step behind."""
        described = self._copy.snapshot
        asked: set[PeerId] = set()
        async with asyncio.TaskGroup() as group:
            while True:
                for peer in self._fetcher.trusted(self._donors()):
                    if peer not in asked and peer not in self._schedule.sources:
                        asked.add(peer)
                        group.create_task(self._invite(peer, described, asked))
                await asyncio.sleep(_LOOK_S)

    async def _invite(self, peer: PeerId, described: Snapshot, asked: set[PeerId]) -> None:
        request = SnapshotRequest(described.stage, described.version)
        offer = await self._fetcher.describe(peer, request, self._version)
        # It may have room later, while we still fetch.
        if isinstance(offer, Busy):
            await asyncio.sleep(pause_s(offer))
        if not isinstance(offer, Snapshot):
            asked.discard(peer)
        elif same_copy(offer, described):
            asked.discard(peer)
            self._fetcher.vouched.add(peer)
            self._perform(self._schedule.add(peer, now=loop_time()))

    def _say(self) -> None:
        self._said = loop_time()
        done, total = self._copy.done_bytes, self._copy.snapshot.num_bytes
        fetched, took = done - self._had_bytes, loop_time() - self._began
        rate = fetched / took if took > 0.0 else 0.0
        self._fetcher.progress(
            TransferProgress(self._copy.snapshot.version, done, total, len(self._schedule.sources), rate)
        )
