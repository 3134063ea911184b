"""The lies that `benchmarks/strangers.py` and tests/sim/test_sim_adversaries.py tell a simulated stage, each once.

A lie is told in one of two ways. Most liars are production peers whose words pass through hooks on their way to the
network (`Lie.tells`, `opens`, `answers`) or whose compute is bent (`Lie.bend`): whatever the protocol asks of a member,
signatures included, they do it, and lie in one point. Others (`inside = False`) are bare identities that say what they
like. Forged messages are made from ones that were heard or said before (`dataclasses.replace`), so that a field the
protocol gains is in them, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import struct
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from swarmnet.directory import Record, StageStatus
from swarmnet.errors import PeerTimeout, RejectCode, SwarmError
from swarmnet.ids import Ballot, Chain, Generation, PeerId, Restart, RoundId
from swarmnet.manifest.schema import Audits
from swarmnet.messages import (
    FOR_EVER,
    MAX_LEVEL,
    NONE,
    Accepted,
    Answer,
    Ban,
    Busy,
    Commit,
    Committed,
    Control,
    Exclusion,
    Finished,
    Gradient,
    Heartbeat,
    Late,
    MemberState,
    MovedTo,
    Packed,
    Part,
    PartData,
    Rejected,
    Request,
    Round,
    Running,
    Snapshot,
    SnapshotRequest,
    StagePlan,
    Stamp,
    TrailRequest,
    Trouble,
)
from swarmnet.messages import Process as ProcessCall
from swarmnet.step.commits import commit_of
from swarmnet.testing.clock import SimulatedProcess
from swarmnet.testing.virtual_engine import NUM_ELEMENTS, Arithmetic, SimulatedEngine, proven_tokens_of, tokens_of
from swarmnet.testing.virtual_swarm import Guise, Node, VirtualSwarm
from swarmnet.transport import ReadPayload, Service, Transport

STAGE, BESIDE = 1, 0
"""Whom liars pose as replicas of, and the stage that feeds it. Both are all there is."""

OFTEN_S = 0.25
"""How often a liar repeats what it adds: twice for every heartbeat."""

MOST_CALLS = 32
"""Calls that a liar keeps open to one peer: eight times its slots."""

OFTEN = 0.1
"""A share that is computed again: a lie lasts half a minute in a test, sixty steps."""

NO_ONE, OTHER_CHAIN = PeerId("ghost"), Chain("f" * 64)

FORGED = (1, 2, 3, 4)
"""A sum that nobody made."""


def without_work(message: Control) -> Iterable[Control]:
    """Of what a leader says only that it leads."""
    if isinstance(message, Committed):
        return ()
    return (StagePlan(message.stamp, message.ballot),) if isinstance(message, StagePlan) else (message,)


# ---------------------------------------------------------------- how a peer lies


class Lie(Guise):
    """One identity and how it lies; by itself it is honest. Hooks are asked from the moment `lying` is set."""

    words: ClassVar[str] = "is honest"
    inside: ClassVar[bool] = True
    stage: ClassVar[int] = STAGE
    audited: ClassVar[Audits | None] = None
    """How much is computed again in the run of a lie that only this shows, when its steps are applied."""

    def __init__(self, swarm: VirtualSwarm, me: PeerId) -> None:
        self.swarm, self.me, self.lying = swarm, me, False
        self.friends: frozenset[PeerId] = frozenset()
        self.node: Node | None = None
        self.said: dict[type, Any] = {}
        self.heard: dict[type, Any] = {}
        self.attempt: Round | None = None  # the last one that was said or heard here
        self.chains: dict[int, Chain] = {}
        self.ballot, self._at = Ballot(0, me), -1
        self._calls: Counter[PeerId] = Counter()

    # ------------------------------------------------------------ hooks

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        """What is said instead of this message."""
        return (message,)

    def opens(self, to: PeerId, request: Request) -> bool:
        """Is this call made? If not, it hangs."""
        return True

    def answers(
        self, caller: PeerId, request: Request, read: ReadPayload, honest: AsyncGenerator[Answer, None]
    ) -> AsyncGenerator[Answer, None]:
        """What a caller gets."""
        return honest

    def bend(self, engine: SimulatedEngine) -> Any:
        """What computes instead of this engine, from the beginning; it may look at `lying`."""
        return engine

    def acts(self) -> None:
        """Add what this identity says on its own account; done every OFTEN_S."""

    # ------------------------------------------------------------ where it stands

    @property
    def now(self) -> float:
        return self.swarm.loop.time()

    @property
    def mates(self) -> list[PeerId]:
        """Honest replicas of my stage."""
        return [node.peer_id for node in self.swarm.honest if self.stage in node.stages]

    @property
    def everybody(self) -> list[PeerId]:
        """All honest peers."""
        return [node.peer_id for node in self.swarm.honest]

    @property
    def stamp(self) -> Stamp:
        """Of the step that is open in my stage."""
        heartbeat: Heartbeat = self.said.get(Heartbeat) or self.heard[Heartbeat]
        return heartbeat.stamp

    @property
    def above(self) -> Ballot:
        """A ballot of mine above all that I have heard of at this step."""
        return replace(self.ballot, number=self.ballot.number + 1, peer=self.me)

    @property
    def every_index(self) -> frozenset[int]:
        return frozenset(range(self.swarm.plan.microbatches))

    def known(self, kind: type) -> Any:
        """The last message of that kind that was said or heard here; None: there was none."""
        return self.said.get(kind) or self.heard.get(kind)

    # ------------------------------------------------------------ what it can do

    def tell(self, to: Iterable[PeerId], message: Control) -> None:
        """Say it past all hooks."""
        for peer in to:
            self.swarm.network.tell(self.me, peer, message)

    def call(self, to: PeerId, request: Request, payload: tuple[Any, ...] = ()) -> None:
        """Call past all hooks, unless very many calls to that peer are open; the answer is of no interest."""
        if self._calls[to] >= MOST_CALLS:
            return
        self._calls[to] += 1

        async def ask() -> None:
            with contextlib.suppress(SwarmError):
                async for _ in self.swarm.network.transport(self.me).call(to, request, payload, deadline=self.now + 60):
                    pass
            self._calls[to] -= 1

        self.swarm.loop.start(self._process, ask())

    # ------------------------------------------------------------ life

    def begin(self) -> None:
        """Join: as a replica of my stage, or as an identity that is nothing."""
        if self.inside:
            self.swarm.guises[self.me] = self
            self.node = self.swarm.add((self.stage,), self.me)
            self._process = self.node.process
        else:
            self._process = SimulatedProcess(self.me)
            self.swarm.network.attach(self.me, self._process, Ears(self, Deaf()))

    async def live(self, from_s: float) -> None:
        """Lie from then on."""
        await asyncio.sleep(max(from_s - self.now, 0.0))
        self.lying = True
        while True:
            if self.said or self.heard or not self.inside:
                self.acts()
            await asyncio.sleep(OFTEN_S)

    def hear(self, message: Control) -> None:
        """Remember what was said by anybody in my hearing."""
        if isinstance(message, Heartbeat):
            self.chains[message.stamp.stage] = message.stamp.chain
            if message.stamp.stage != self.stage:
                return
        self.heard[type(message)] = message
        self._note(message)

    def say(self, message: Control) -> None:
        """Remember what my production peer says."""
        if not isinstance(message, MemberState) or message.whole:  # a lie is told about all that it holds
            self.said[type(message)] = message
        self._note(message)

    def _note(self, message: Control) -> None:
        if isinstance(message, StagePlan) and message.attempt is not None:
            self.attempt = message.attempt
        ballot = message.leader if isinstance(message, Heartbeat) else getattr(message, "ballot", None)
        if ballot is not None and (self.stamp_of(message).step > self._at or ballot > self.ballot):
            self.ballot, self._at = ballot, self.stamp_of(message).step

    @staticmethod
    def stamp_of(message: Any) -> Stamp:
        stamp: Stamp = message.stamp
        return stamp

    # Guise

    def transport(self, honest: Transport) -> Transport:
        """See Guise.transport."""
        return Voice(self, honest)

    def service(self, honest: Service) -> Service:
        """See Guise.service."""
        return Ears(self, honest)

    def engine(self, honest: SimulatedEngine) -> Any:
        """See Guise.engine."""
        return self.bend(honest)


class Voice:
    """The transport of a liar: what its production peer says passes through its lie."""

    def __init__(self, lie: Lie, honest: Transport) -> None:
        self._lie, self._honest = lie, honest

    def tell(self, peer: PeerId, message: Control) -> None:
        """See Transport.tell."""
        self._lie.say(message)
        for said in self._lie.tells(peer, message) if self._lie.lying else (message,):
            self._honest.tell(peer, said)

    def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        """See Transport.call."""
        if self._lie.lying and not self._lie.opens(peer, request):
            return silence()
        return self._honest.call(peer, request, payload, deadline=deadline)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)


class Ears:
    """The service of a liar: what others get of its production peer passes through its lie."""

    def __init__(self, lie: Lie, honest: Service) -> None:
        self._lie, self._honest = lie, honest

    def on_tell(self, caller: PeerId, message: Control) -> None:
        """See Service.on_tell."""
        self._lie.hear(message)
        self._honest.on_tell(caller, message)

    async def on_call(self, caller: PeerId, request: Request, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
        """See Service.on_call."""
        answers = self._honest.on_call(caller, request, payload)
        if self._lie.lying:
            answers = self._lie.answers(caller, request, payload, answers)
        async with contextlib.aclosing(answers):
            async for answer in answers:
                yield answer

    def on_gone(self, peer: PeerId, *, definite: bool) -> None:
        """See Service.on_gone."""
        self._honest.on_gone(peer, definite=definite)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)


class Deaf:
    """A service of nothing, for identities without a peer."""

    def on_tell(self, caller: PeerId, message: Control) -> None:
        """See Service.on_tell."""

    async def on_call(self, caller: PeerId, request: Request, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
        """See Service.on_call."""
        await asyncio.sleep(3600)
        yield Running()

    def on_gone(self, peer: PeerId, *, definite: bool) -> None:
        """See Service.on_gone."""

    def on_reached(self, peer: PeerId) -> None:
        """See Service.on_reached."""


class Bent:
    """An engine of which one method is another one."""

    def __init__(self, honest: SimulatedEngine, **bent: Any) -> None:
        self.__dict__.update(_honest=honest, **bent)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)


async def silence() -> AsyncGenerator[Answer, None]:
    """A call to which nothing comes, though the other process lives."""
    await asyncio.sleep(600)
    raise PeerTimeout("never called")
    yield Running()


async def just(*answers: Answer) -> AsyncGenerator[Answer, None]:
    """These answers."""
    for answer in answers:
        yield answer


async def running() -> AsyncGenerator[Answer, None]:
    """A call that is always about to be answered."""
    yield Accepted()
    while True:
        yield Running()
        await asyncio.sleep(0.5)


def packed(values: Sequence[int]) -> Packed:
    """Elements of a sum, as the simulated engine sends them."""
    return Packed("int64", (len(values),), struct.pack(f"<{len(values)}q", *values))


def hidden(value: float) -> Packed:
    """An activation that no stage has computed."""
    return Packed("fp32", (1, 1, 1), struct.pack("<f", value))


LIES: dict[str, type[Lie]] = {}
"""By name, in the order they are printed."""


def lie(kind: type[Lie]) -> type[Lie]:
    """Add it to the table under its name in words: NeverReports is `never-reports`."""
    name = re.sub(r"(?<!^)(?=[A-Z0-9])", "-", kind.__name__).lower()
    kind.words = " ".join((kind.__doc__ or "").split())
    LIES[name] = kind
    return kind


# ---------------------------------------------------------------- members that do not do their part


@lie
class NeverReports(Lie):
    """does everything a member does but report"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        return () if isinstance(message, MemberState) else (message,)


@lie
class NewAccumulators(Lie):
    """reports another accumulator with every state"""

    states = 0

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if not isinstance(message, MemberState):
            return (message,)
        self.states += 1
        generation = message.generation
        return (replace(message, generation=replace(generation, number=generation.number + self.states)),)


@lie
class NewLives(Lie):
    """says every half second that its process has started again"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        later = int(2 * self.now)
        if isinstance(message, Heartbeat):
            return (replace(message, incarnation=message.incarnation + later),)
        if isinstance(message, MemberState):
            generation = message.generation
            return (replace(message, generation=replace(generation, incarnation=generation.incarnation + later)),)
        return (message,)


@lie
class OnlyBeats(Lie):
    """sends heartbeats, answers calls and says nothing else"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        return (message,) if isinstance(message, Heartbeat) else ()


@lie
class ReportsLate(Lie):
    """says everything but heartbeats 2.5 s late"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if isinstance(message, Heartbeat):
            return (message,)
        self.swarm.loop.call_later(2.5, self.tell, (to,), message)
        return ()


@lie
class SpeaksToOne(Lie):
    """is a member for one mate, and silent to all others"""

    def knows(self, peer: PeerId) -> bool:
        return peer == self.mates[0]

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        return (message,) if self.knows(to) else ()

    def opens(self, to: PeerId, request: Request) -> bool:
        return self.knows(to)

    def answers(
        self, caller: PeerId, request: Request, read: ReadPayload, honest: AsyncGenerator[Answer, None]
    ) -> AsyncGenerator[Answer, None]:
        return honest if self.knows(caller) else silence()


@lie
class HeardByOne(SpeaksToOne):
    """is a member for one mate and for other stages, and silent to all other mates"""

    def knows(self, peer: PeerId) -> bool:
        return peer not in self.mates[1:]


@lie
class NeverExchanges(Lie):
    """takes part in rounds, sends nothing and asks for nothing"""

    def opens(self, to: PeerId, request: Request) -> bool:
        return not isinstance(request, Part)

    def answers(
        self, caller: PeerId, request: Request, read: ReadPayload, honest: AsyncGenerator[Answer, None]
    ) -> AsyncGenerator[Answer, None]:
        return running() if isinstance(request, Part) else honest


@lie
class KeepsWhatItReduced(Lie):
    """takes part in rounds and hands out neither what it reduced nor the whole sum"""

    def answers(
        self, caller: PeerId, request: Request, read: ReadPayload, honest: AsyncGenerator[Answer, None]
    ) -> AsyncGenerator[Answer, None]:
        return running() if isinstance(request, Part) and request.kind != "contribution" else honest


@lie
class WithholdsFromOne(Lie):
    """hands one mate nothing of what it reduces"""

    def answers(
        self, caller: PeerId, request: Request, read: ReadPayload, honest: AsyncGenerator[Answer, None]
    ) -> AsyncGenerator[Answer, None]:
        withheld = isinstance(request, Part) and request.kind == "reduced" and caller == self.mates[0]
        return running() if withheld else honest


@lie
class SlowParts(Lie):
    """hands out every part of a round 2.5 s late"""

    def answers(
        self, caller: PeerId, request: Request, read: ReadPayload, honest: AsyncGenerator[Answer, None]
    ) -> AsyncGenerator[Answer, None]:
        return self._late(honest) if isinstance(request, Part) else honest

    async def _late(self, honest: AsyncGenerator[Answer, None]) -> AsyncGenerator[Answer, None]:
        async with contextlib.aclosing(honest):
            async for answer in honest:
                await asyncio.sleep(2.5)
                yield answer


@lie
class BadParts(Lie):
    """sends parts of a shape that no round has"""

    def answers(
        self, caller: PeerId, request: Request, read: ReadPayload, honest: AsyncGenerator[Answer, None]
    ) -> AsyncGenerator[Answer, None]:
        return self._bad(honest) if isinstance(request, Part) else honest

    async def _bad(self, honest: AsyncGenerator[Answer, None]) -> AsyncGenerator[Answer, None]:
        async with contextlib.aclosing(honest):
            async for answer in honest:
                yield replace(answer, payload=(packed(range(9)),)) if isinstance(answer, PartData) else answer


# ---------------------------------------------------------------- claims, grants and the ledger


@lie
class ClaimsEverything(Lie):
    """claims every index and delivers none"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if isinstance(message, MemberState):
            return (replace(message, owned=self.every_index, summed=NONE, progress=0, whole=True),)
        return (message,)

    def acts(self) -> None:
        state = self.said.get(MemberState)
        if state is not None:
            self.tell((state.ballot.peer,), state.unchanged(revision=0, wants=self.every_index))

    def bend(self, engine: SimulatedEngine) -> Any:
        return Bent(engine, accumulate=lambda stash: never(self, engine.accumulate, stash))


async def never(of: Lie, honest: Any, *args: Any) -> Any:
    """Compute that never ends while the peer lies."""
    if of.lying:
        await asyncio.sleep(3600)
    return await honest(*args)


@lie
class NeverSums(Lie):
    """takes what it is granted, reports progress and never has it summed"""

    count = 0

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if isinstance(message, MemberState):
            self.count += 1
            return (replace(message, progress=self.count),)
        return (message,)

    def bend(self, engine: SimulatedEngine) -> Any:
        return Bent(engine, accumulate=lambda stash: never(self, engine.accumulate, stash))


@lie
class Releases(Lie):
    """releases what rounds name under its name and others', whether it holds it or not"""

    def acts(self) -> None:
        report = self.said.get(MemberState)
        if report is None:
            return
        for indexes in (report.owned, self.every_index):
            if indexes:
                release = report.unchanged(revision=0, returns=indexes)
                self.tell((report.ballot.peer,), release)


@lie
class DiscardsEverything(Lie):
    """says that no index gives a finite value"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if not isinstance(message, MemberState):
            return (message,)
        return (replace(message, non_finite=self.every_index, whole=True),)


@lie
class Accuses(Lie):
    """asks one mate for nothing in any round, and reports that it is late and sends bad parts"""

    @property
    def accused(self) -> PeerId:
        return self.mates[self.stamp.step % len(self.mates)]

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        current = self.attempt
        if not isinstance(message, MemberState) or current is None:
            return (message,)
        late = (Late(self.accused, True, 0.0),)
        return (replace(message, trouble=Trouble(current.id, late, (self.accused,))),)

    def opens(self, to: PeerId, request: Request) -> bool:
        return not isinstance(request, Part) or to != self.accused


@lie
class ReachesNobody(Lie):
    """says in every heartbeat that it cannot connect to two mates, other ones in each step"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if not isinstance(message, Heartbeat):
            return (message,)
        first = message.stamp.step % len(self.mates)
        named = (*self.mates[first:], *self.mates[:first])[:2]
        return (replace(message, unreached=tuple(sorted(named))),)


# ---------------------------------------------------------------- leaders


@lie
class Usurps(Lie):
    """keeps under a ballot above all others, always, and grants nothing"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        return without_work(message)

    def acts(self) -> None:
        if self.known(StagePlan) is not None:
            self.tell(self.mates, StagePlan(self.stamp, self.above))


@lie
class GhostBallot(Lie):
    """reports under the ballot of somebody who does not exist"""

    def acts(self) -> None:
        report = self.known(MemberState)
        if report is not None:
            ghost = replace(self.above, number=self.above.number + 8, peer=NO_ONE)
            self.tell(self.mates, replace(report, stamp=self.stamp, ballot=ghost))


@lie
class KeepsIdle(Lie):
    """keeps without progress when its honest turn comes"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        return without_work(message)


@lie
class LeadsSlowly(Lie):
    """as a leader opens the round of each second step ten seconds late"""

    held_s: float = 10.0
    every: int = 2

    def begin(self) -> None:
        super().begin()
        self._first: dict[int, float] = {}

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if not isinstance(message, StagePlan) or message.attempt is None or message.stamp.step % self.every:
            return (message,)
        wait_s = self._first.setdefault(message.stamp.step, self.now) + self.held_s - self.now
        if wait_s <= 0.0:
            return (message,)
        self.swarm.loop.call_later(wait_s, self.tell, (to,), message)
        return (replace(message, attempt=None),)


@lie
class LeadsALittleSlowly(LeadsSlowly):
    """as a leader opens the round of each step 2.4 seconds late"""

    held_s = 2.4
    every = 1


@lie
class NeverKeeps(Lie):
    """does not keep when its turn comes"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if isinstance(message, Heartbeat) and message.leader is not None and message.leader.peer == self.me:
            return (replace(message, leader=None),)
        return () if isinstance(message, StagePlan | Committed) else (message,)


@lie
class LeavesOut(Lie):
    """as a leader opens rounds without what one member has counted"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if isinstance(message, StagePlan) and message.attempt is not None:
            contributions = message.attempt.contributions
            others = sorted(peer for peer, _, _ in contributions if peer != self.me)
            kept = tuple(one for one in contributions if one[0] not in others[:1])
            message = replace(message, attempt=replace(message.attempt, contributions=kept))
        return (message,)


@lie
class KeepsAndEvicts(Lie):
    """as a leader discards whoever asks to count something"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if isinstance(message, StagePlan) and message.assigned:
            return (replace(message, assigned=NONE, evicted="discard"),)
        return (message,)


@lie
class KeepsForAGhost(Lie):
    """as a leader says that everything is owned by somebody who does not exist"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if isinstance(message, StagePlan) and message.assigned:
            return (replace(message, assigned=NONE, moved=tuple((index, NO_ONE) for index in message.assigned)),)
        return (message,)


@lie
class TwoRounds(Lie):
    """as a leader opens a round of one id with each member apart"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if not isinstance(message, StagePlan) or message.attempt is None:
            return (message,)
        pair = {to, self.me}
        mine = tuple(entry for entry in message.attempt.contributions if entry[0] in pair)
        counted = frozenset(index for _, _, indexes in mine for index in indexes)
        attempt = replace(
            message.attempt,
            contributions=mine,
            receivers=tuple(sorted(pair)),
            discarded=self.every_index - counted,
            bandwidths=(),
            rows=(),
        )
        return (replace(message, attempt=attempt),)


@lie
class LeaderDiscardsAll(Lie):
    """as the leader says in each round that no microbatch gives a finite value but one of its own"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if not isinstance(message, StagePlan) or message.attempt is None:
            return (message,)
        contributions = message.attempt.contributions
        counted = frozenset({min(index for _, _, indexes in contributions for index in indexes)})
        peer, generation, _ = contributions[0]
        attempt = replace(
            message.attempt, contributions=((peer, generation, counted),), discarded=self.every_index - counted
        )
        return (replace(message, attempt=attempt),)


@lie
class NamesCorrectPeersLate(Lie):
    """leads whenever it can, and names as many correct peers late as a round can name"""

    def acts(self) -> None:
        if self.node is not None and self.stage in self.node.peer.replicas:
            member = self.node.peer.replicas[self.stage].member
            for mate in self.mates:
                member.lateness.observe(mate, "is correct", now=self.now)


@lie
class NamesCorrectPeersAgain(Lie):
    """in each round that it opens names a correct peer late, one after the other, excluded or not"""

    def acts(self) -> None:
        if self.node is None or self.stage not in self.node.peer.replicas:
            return
        membership = self.node.peer.replicas[self.stage].member.membership
        signed = type(membership).named_signed.__get__(membership)

        def named(step: int, leader: PeerId) -> Any:
            if leader != self.me:
                return signed(step, leader)
            return (sorted(self.mates)[step % len(self.mates)],), ()

        membership.named_signed = named  # type: ignore[method-assign]


@lie
class BansCorrectPeers(Lie):
    """leads whenever it can, and has each round that it opens ban a correct peer"""

    def acts(self) -> None:
        if self.node is not None and self.stage in self.node.peer.replicas:
            member = self.node.peer.replicas[self.stage].member
            # Of more no quorum would be left.
            member.bans = (Ban(min(self.mates), -1, bytes(32)),)
            member.membership.vouched = frozenset(member.bans)


@lie
class RefusesEveryLate(Lie):
    """says that it observed every correct peer late, and neither names anybody nor signs what names somebody"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if isinstance(message, Heartbeat):
            return (replace(message, late=tuple(sorted(self.mates))),)
        if isinstance(message, MemberState) and message.ack is not None and message.ack.late:
            return (replace(message, ack=None, vote=b"", whole=True),)
        if isinstance(message, StagePlan) and message.attempt is not None:
            return (replace(message, attempt=replace(message.attempt, late=())),)
        return (message,)


@lie
class KeepsTheCommit(Lie):
    """as a leader tells nobody the commit, and nothing of it in heartbeats"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if isinstance(message, Heartbeat):
            return (replace(message, commits=(), last_commits=()),)
        return () if isinstance(message, Committed) else (message,)


# ---------------------------------------------------------------- sums and commits


class Forges(Lie):
    """A description of a sum that nobody made, and the sum itself for whoever wants it."""

    def sum_of(self, step: int) -> list[int]:
        return [value + step for value in FORGED]

    def forged(self) -> Finished | None:
        report = self.said.get(MemberState)
        if report is None:
            return None
        digest, norm = Arithmetic.digest(self.sum_of(self.stamp.step))
        number = RoundId(self.ballot, 1 << 40)
        mine = ((self.me, report.generation, self.every_index),)
        return Finished(number, digest, len(self.every_index), 1.0, norm, mine)

    def acked(self, report: MemberState) -> MemberState:
        """The same with an ack of the sum that nobody made."""
        forged = self.forged()
        ack = None if forged is None else commit_of(report.stamp, forged, named=False)
        return report if ack is None else replace(report, ack=ack, whole=True)

    def answers(
        self, caller: PeerId, request: Request, read: ReadPayload, honest: AsyncGenerator[Answer, None]
    ) -> AsyncGenerator[Answer, None]:
        forged = self.forged()
        if not isinstance(request, Part) or request.kind != "sum" or forged is None:
            return honest
        wanted = self.sum_of(request.stamp.step)
        digest, norm = Arithmetic.digest(wanted)
        told = replace(forged, id=request.id, digest=digest, grad_sq_norm=norm)
        return just(PartData((packed(wanted[request.start : request.stop]),), finished=told))

    def forged_commit(self, stage: int) -> Commit | None:
        forged = self.forged()
        committed = self.known(Committed)
        if forged is None or committed is None or stage not in {**self.chains, self.stage: NONE}:
            return None
        chain = self.stamp.chain if stage == self.stage else self.chains[stage]
        commit: Commit = replace(
            committed.commit,
            stage=stage,
            step=self.stamp.step,
            chain=chain,
            id=forged.id,
            digest=forged.digest,
            num_tokens=forged.num_tokens,
            loss_sum=1.0 if stage == STAGE else 0.0,
            grad_sq_norm=forged.grad_sq_norm,
            discarded=NONE,
        )
        return commit


@lie
class ForgedSum(Forges):
    """reports a finished sum that nobody made, and hands it out"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        return (self.acked(message),) if isinstance(message, MemberState) else (message,)

    def acts(self) -> None:
        report, forged = self.said.get(MemberState), self.forged()
        if report is not None and forged is not None:
            self.tell(self.mates, replace(self.acked(report), stamp=self.stamp))


@lie
class ForgedSumKept(Forges):
    """reports a finished sum that nobody made, and hands out nothing"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        return (self.acked(message),) if isinstance(message, MemberState) else (message,)

    def answers(
        self, caller: PeerId, request: Request, read: ReadPayload, honest: AsyncGenerator[Answer, None]
    ) -> AsyncGenerator[Answer, None]:
        return running() if isinstance(request, Part) and request.kind == "sum" else honest


@lie
class ForgedCommit(Forges):
    """tells everybody a commit of its own stage that nobody made, and hands out its sum"""

    def acts(self) -> None:
        commit = self.forged_commit(self.stage)
        if commit is not None:
            self.tell(self.everybody, replace(self.known(Committed), commit=commit, restart=self.stamp.restart))


@lie
class ForgedCommitBeside(Forges):
    """tells everybody a commit of the stage beside it"""

    def acts(self) -> None:
        commit = self.forged_commit(BESIDE)
        if commit is not None:
            self.tell(self.everybody, replace(self.known(Committed), commit=commit, restart=self.stamp.restart))

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        commit = self.forged_commit(BESIDE)
        if isinstance(message, Heartbeat) and commit is not None:
            kept = tuple(each for each in message.commits if each.stage != BESIDE)
            return (replace(message, commits=(commit, *kept)),)
        return (message,)


@lie
class FalseAck(Lie):
    """acks every sum under a digest that it does not have"""

    def bend(self, engine: SimulatedEngine) -> Any:
        async def seal() -> tuple[bytes, float]:
            digest, norm = await engine.seal()
            return (bytes(32) if self.lying else digest), norm

        return Bent(engine, seal=seal)


@lie
class AcksTwoWays(Lie):
    """acks one digest to one half of its mates and another to the rest"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if isinstance(message, MemberState) and message.ack is not None and to in self.mates[::2]:
            return (replace(message, ack=replace(message.ack, digest=bytes(32))),)
        return (message,)


@lie
class AcksLate(Lie):
    """acks every sum five seconds late"""

    late_s: ClassVar[float] = 5.0

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if isinstance(message, MemberState) and message.ack is not None:
            self.swarm.loop.call_later(self.late_s, self.tell, (to,), message)
            return ()
        return (message,)


@lie
class AcksALittleLate(AcksLate):
    """acks every sum 1.2 s late, in steps of half a second"""

    late_s = 1.2


# ---------------------------------------------------------------- where it says it stands


@lie
class FiftyAhead(Lie):
    """says that it is 50 versions ahead, and hands out no state"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if not isinstance(message, Heartbeat):
            return (message,)
        stamp = replace(message.stamp, step=message.stamp.step + 50, chain=OTHER_CHAIN)
        return (replace(message, stamp=stamp, commits=(), last_commits=()),)

    def answers(
        self, caller: PeerId, request: Request, read: ReadPayload, honest: AsyncGenerator[Answer, None]
    ) -> AsyncGenerator[Answer, None]:
        return running() if isinstance(request, SnapshotRequest | TrailRequest) else honest


@lie
class Rollbacks(Lie):
    """says that the run has gone back to its beginning, again and again"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if not isinstance(message, Heartbeat):
            return (message,)
        number = message.stamp.restart.number + 1 + int(self.now / 30)
        return (replace(message, stamp=replace(message.stamp, restart=Restart(number, 0))),)


@lie
class Forks(Lie):
    """says that it is on another chain of the same version, and that it has a commit there"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if not isinstance(message, Heartbeat):
            return (message,)
        stamp, committed = replace(message.stamp, chain=OTHER_CHAIN), self.known(Committed)
        commits: tuple[Commit, ...] = ()
        if committed is not None:
            commits = (
                replace(committed.commit, stage=stamp.stage, step=stamp.step, chain=stamp.chain, digest=bytes(32)),
            )
        return (replace(message, stamp=stamp, commits=commits),)


@lie
class Flaps(Lie):
    """is synced and unsynced by turns of three seconds, each time as another incarnation"""

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        if not isinstance(message, Heartbeat):
            return (message,)
        turn = int(self.now / 3)
        return (replace(message, synced=turn % 2 == 0, incarnation=message.incarnation + turn),)


@lie
class FalseRecords(Lie):
    """announces itself with endless room in stage 0, at the last version of the run and under another restart"""

    def acts(self) -> None:
        total = self.swarm.plan.steps
        status = StageStatus(BESIDE, total - 1, OTHER_CHAIN, True, 0, 1 << 20)
        mine = StageStatus(self.stage, total - 1, OTHER_CHAIN, True, 0, 1 << 20)
        record = Record(
            self.swarm.plan.run, self.me, 1, ("memory",), (status, mine), finished=True, halted=0, restart=Restart(1, 0)
        )
        self.swarm.loop.start(self._process, self.swarm.directory.publish(record))


@lie
class BadState(Lie):
    """hands forged weights to mates that come back; one is killed and comes back every minute"""

    _last = -1

    def bend(self, engine: SimulatedEngine) -> Any:
        async def snapshot() -> bytes:
            state = await engine.snapshot()
            return state.replace(b"[", b"[", 1).replace(b",", b",9", 1) if self.lying else state

        return Bent(engine, snapshot=snapshot)

    def acts(self) -> None:
        turn = int((self.now + 30) / 60)
        if self._last < 0:
            self._last = turn
        if turn == self._last or self.me != min({self.me, *self.friends}):
            return
        self._last = turn
        victim = next(node for node in self.swarm.honest if self.stage in node.stages)
        self.swarm.kill(victim)
        self.swarm.loop.call_later(2.0, lambda: self.swarm.over or self.swarm.add(victim.stages, victim.peer_id))


class Key(Lie):
    """An identity that beats as a replica of the stage, and answers joining replicas as the liar does."""

    inside = False

    def __init__(self, swarm: VirtualSwarm, me: PeerId, liar: ForgesState) -> None:
        super().__init__(swarm, me)
        self._liar = liar

    def begin(self) -> None:
        self._process, self.lying = SimulatedProcess(self.me), True
        self.swarm.network.attach(self.me, self._process, Ears(self, Deaf()))

    def answers(
        self, caller: PeerId, request: Request, read: ReadPayload, honest: AsyncGenerator[Answer, None]
    ) -> AsyncGenerator[Answer, None]:
        assert self._liar.ears is not None
        asks = isinstance(request, SnapshotRequest | TrailRequest)
        return self._liar.ears.on_call(caller, request, read) if asks else honest

    def acts(self) -> None:
        heartbeat = self._liar.said[Heartbeat]
        self.tell(self.everybody, replace(heartbeat, incarnation=7, leader=None, commits=(), last_commits=()))


class ForgesState(Lie):
    """With three keys that only beat, describes one forged state; every half minute a replica joins."""

    def __init__(self, swarm: VirtualSwarm, me: PeerId) -> None:
        super().__init__(swarm, me)
        self.ears: Ears | None = None
        self.keys = [Key(swarm, PeerId(f"{me}.{number}"), self) for number in range(3)]
        self._next = -1.0

    def service(self, honest: Service) -> Service:
        self.ears = Ears(self, honest)
        return self.ears

    def acts(self) -> None:
        if self._next < 0:
            self._next = self.now + 4.0
            for key in self.keys:
                key.begin()
        for key in self.keys:
            key.acts()
        if self.now >= self._next and self.me == min({self.me, *self.friends}):
            self._next = self.now + 30.0
            self.swarm.add((self.stage,), f"joins.{self.now:.0f}")


@lie
class ForgedWeights(ForgesState):
    """with three keys that only beat, describes forged weights to whoever joins; every half minute one does"""

    def bend(self, engine: SimulatedEngine) -> Any:
        async def snapshot() -> bytes:
            state = await engine.snapshot()
            version, weights, *more = json.loads(state)
            return json.dumps([version, weights + 1, *more]).encode().ljust(len(state)) if self.lying else state

        return Bent(engine, snapshot=snapshot)


@lie
class ForgedTable(ForgesState):
    """with three keys that only beat, tells whoever joins that all others are banned; every half minute one does"""

    async def answers(
        self, caller: PeerId, request: Request, read: ReadPayload, honest: AsyncGenerator[Answer, None]
    ) -> AsyncGenerator[Answer, None]:
        banned = tuple(Exclusion(peer, FOR_EVER, MAX_LEVEL) for peer in self.mates if peer != caller)
        async for answer in honest:
            if isinstance(answer, Snapshot):
                header = replace(answer.header, exclusions=banned, exclusions_before=banned)
                answer = replace(answer, header=header)
            yield answer


# ---------------------------------------------------------------- answers to callers


class Answers(Lie):
    """Answers microbatches in a way of its own."""

    def answers(
        self, caller: PeerId, request: Request, read: ReadPayload, honest: AsyncGenerator[Answer, None]
    ) -> AsyncGenerator[Answer, None]:
        return self.instead(request) if isinstance(request, ProcessCall) else honest

    def instead(self, request: ProcessCall) -> AsyncGenerator[Answer, None]:
        raise NotImplementedError


@lie
class RunningForEver(Answers):
    """accepts microbatches and is always about to answer"""

    def instead(self, request: ProcessCall) -> AsyncGenerator[Answer, None]:
        return running()


@lie
class AcceptsNeverFinishes(Lie):
    """accepts and contributes microbatches like any member, and answers their callers Running for ever"""

    def answers(
        self, caller: PeerId, request: Request, read: ReadPayload, honest: AsyncGenerator[Answer, None]
    ) -> AsyncGenerator[Answer, None]:
        return self.withhold(honest) if isinstance(request, ProcessCall) else honest

    async def withhold(self, honest: AsyncGenerator[Answer, None]) -> AsyncGenerator[Answer, None]:
        async for answer in honest:
            if isinstance(answer, Gradient):
                break
            yield answer
        async for answer in running():
            yield answer


@lie
class BusyForEver(Answers):
    """answers every microbatch with Busy"""

    def instead(self, request: ProcessCall) -> AsyncGenerator[Answer, None]:
        return just(Busy(0.05, request.step))


@lie
class MovesOn(Answers):
    """says of every microbatch that a mate has it"""

    def instead(self, request: ProcessCall) -> AsyncGenerator[Answer, None]:
        return just(MovedTo(self.mates[request.index % len(self.mates)]))


@lie
class SaysDiscard(Answers):
    """says of every microbatch that it gives no finite value"""

    def instead(self, request: ProcessCall) -> AsyncGenerator[Answer, None]:
        return just(Rejected(RejectCode.OVERFLOWED, "not finite"))


@lie
class SaysStale(Answers):
    """says of every microbatch that its step is over"""

    def instead(self, request: ProcessCall) -> AsyncGenerator[Answer, None]:
        return just(Rejected(RejectCode.STALE, "applied", request.step + 1))


@lie
class SaysFinished(Answers):
    """says of every microbatch that the run is over"""

    def instead(self, request: ProcessCall) -> AsyncGenerator[Answer, None]:
        return just(Rejected(RejectCode.FINISHED, "over"))


# ---------------------------------------------------------------- callers and bare identities


class Bare(Lie):
    """An identity without a peer that knows where the run stands."""

    inside = False

    @property
    def step(self) -> int:
        return max(node.peer.replicas[STAGE].member.version for node in self.swarm.honest if STAGE in node.stages)

    def beat(self) -> None:
        """A heartbeat as any replica of the stage sends it, made from one that was sent here or to a mate."""
        node = next(node for node in self.swarm.honest if STAGE in node.stages)
        heartbeat = node.peer.replicas[STAGE].member.heartbeat(self.me)
        self.tell(self.everybody, replace(heartbeat, incarnation=7, leader=None, commits=(), last_commits=()))


@lie
class HoardsSlots(Bare):
    """opens calls of microbatches and evaluations in both stages, and uploads for ever"""

    def acts(self) -> None:
        hoard(self, self.step, self.swarm.honest)


@lie
class HoardsAsMember(Lie):
    """as a replica of the first stage opens calls of every microbatch in the later one, and uploads for ever"""

    stage = BESIDE

    def acts(self) -> None:
        hoard(self, self.stamp.step, [node for node in self.swarm.honest if STAGE in node.stages])


class Endless:
    """A payload that is declared as this one is, and takes a quarter of an hour on any line."""

    num_bytes = 10**12

    def __init__(self, like: Packed) -> None:
        self.codec, self.shape = like.codec, like.shape


def endless(stage: int, index: int, *, train: bool) -> tuple[Endless, ...]:
    """The input of that stage, declared as it should be."""
    tokens, proof = proven_tokens_of(index)
    return tuple(map(Endless, (tokens, *((hidden(1.0),) if stage else ()), *((proof,) if train else ()))))


def hoard(of: Lie, step: int, nodes: Iterable[Node]) -> None:
    """Calls that take slots and bring nothing."""
    for node in nodes:
        for stage in node.stages:
            for _ in range(of.swarm.plan.slots):
                of.call(node.peer_id, ProcessCall(step, stage, 0, purpose="eval"), endless(stage, 0, train=False))
                of.call(node.peer_id, ProcessCall(step + 1, stage, 0, purpose="eval"), endless(stage, 0, train=False))
            for index in of.every_index:
                of.call(node.peer_id, ProcessCall(step, stage, index), endless(stage, index, train=True))
                of.call(node.peer_id, ProcessCall(step + 1, stage, index), endless(stage, index, train=True))


@lie
class SilentStranger(Bare):
    """a fresh identity that sends the stage's heartbeat and nothing else"""

    def acts(self) -> None:
        self.beat()


@lie
class FreshEveryTenSeconds(Bare):
    """a fresh identity every ten seconds sends the stage's heartbeat and nothing else, and they all stay"""

    def __init__(self, swarm: VirtualSwarm, me: PeerId) -> None:
        super().__init__(swarm, me)
        self._others: list[SilentStranger] = []
        self._next = 0.0

    def acts(self) -> None:
        if self.now >= self._next:
            self._next = self.now + 10.0
            fresh = SilentStranger(self.swarm, PeerId(f"{self.me}.{len(self._others)}"))
            fresh.begin()
            self._others.append(fresh)
        for other in self._others:
            other.acts()


class ReportsNothing(Bare):
    """Sends the stage's heartbeat, and its leader a report that it holds nothing."""

    def acts(self) -> None:
        self.beat()
        report = self.heard.get(StagePlan)
        if report is not None:
            empty = MemberState(report.stamp, report.ballot, Generation(7, 0), NONE, NONE, None, None, progress=0)
            self.tell((report.ballot.peer,), empty)


@lie
class FreshKeyEvery4S(Bare):
    """one machine that takes a new key every 4 s, says that it is in sync, reports and contributes nothing"""

    number = 0

    def __init__(self, swarm: VirtualSwarm, me: PeerId) -> None:
        super().__init__(swarm, me)
        self._key: ReportsNothing | None = None

    def acts(self) -> None:
        number = int(self.now // 4)
        if self._key is None or number != self.number:
            self.number, self._key = number, ReportsNothing(self.swarm, PeerId(f"{self.me}.{number}"))
            self._key.begin()
        self._key.acts()


class Worker(Lie):
    """A member of its stage like any other, until so many commits name it; then it beats, and says nothing else."""

    def __init__(self, swarm: VirtualSwarm, me: PeerId, after: int) -> None:
        super().__init__(swarm, me)
        self.lying, self._left, self._counted = True, after, -1

    @property
    def mute(self) -> bool:
        return self._left <= 0

    def tells(self, to: PeerId, message: Control) -> Iterable[Control]:
        assert self.node is not None
        replica = self.node.peer.replicas.get(self.stage)
        finished = replica.member.last_finished if replica is not None else None
        if replica is not None and finished is not None and replica.member.version > self._counted:
            self._counted = replica.member.version
            self._left -= any(peer == self.me and indexes for peer, _, indexes in finished.contributions)
        return (message,) if isinstance(message, Heartbeat) or not self.mute else ()


class FreshWorkers(Bare):
    """Keys that work until they have contributed so often. most: of them are in the run at a time."""

    contributions: ClassVar[int] = 1
    most: ClassVar[int] = 1
    every_s: ClassVar[float] = 6.0

    def __init__(self, swarm: VirtualSwarm, me: PeerId) -> None:
        super().__init__(swarm, me)
        self.keys: list[Worker] = []
        self._began_at, self._number, self._muted_at = -self.every_s, 0, 0.0

    def acts(self) -> None:
        self.keys = [key for key in self.keys if not self._is_of_no_use(key)]
        if len(self.keys) < self.most and self.now - self._began_at >= self.every_s:
            self._began_at, self._number = self.now, self._number + 1
            self.keys.append(Worker(self.swarm, PeerId(f"{self.me}.{self._number}"), self.contributions))
            self.keys[-1].begin()

    def _is_of_no_use(self, key: Worker) -> bool:
        """Is it mute, and the run has gone on without it?"""
        return False


class FreshWorkerAtATime(FreshWorkers):
    """One key at a time, which is taken back once the run goes on without it."""

    every_s = 0.0

    def _is_of_no_use(self, key: Worker) -> bool:
        if not key.mute:
            return False
        assert key.node is not None
        if self.step > key.node.peer.replicas[STAGE].member.version + 1:
            self.swarm.kill(key.node)
            return True
        return False


@lie
class FreshKeyAfterFirstContribution(FreshWorkerAtATime):
    """one machine that takes a new key after each first contribution, after which it says no state"""


@lie
class FreshKeyAfterFortyContributions(FreshWorkerAtATime):
    """the same, after forty contributions"""

    contributions = 40


@lie
class MuteKeysStay(FreshWorkers):
    """a key every 6 s that contributes once and then only beats; three at most, and they all stay"""

    most = 3


@lie
class MuteKeysStayLater(FreshWorkers):
    """the same after forty contributions"""

    most, contributions = 3, 40


@lie
class FeedsStage(Bare):
    """sends the later stage microbatches with forged activations, in the open step and the next one"""

    def acts(self) -> None:
        for node in self.swarm.honest:
            if STAGE in node.stages:
                for index in range(self.swarm.plan.microbatches):
                    for step in (self.step, self.step + 1):
                        tokens, proof = proven_tokens_of(step * self.swarm.plan.microbatches + index)
                        self.call(node.peer_id, ProcessCall(step, STAGE, index), (tokens, hidden(1.0), proof))


@lie
class FeedsTokens(Bare):
    """sends stage 0 microbatches of its own text, in the open step and the next one"""

    def acts(self) -> None:
        for node in self.swarm.honest:
            if BESIDE in node.stages:
                for index in range(self.swarm.plan.microbatches):
                    for step in (self.step, self.step + 1):
                        number = step * self.swarm.plan.microbatches + index
                        forged = (*tokens_of(9999 + index), proven_tokens_of(number)[1])
                        self.call(node.peer_id, ProcessCall(step, BESIDE, index), forged)


# ---------------------------------------------------------------- lies about work

OPEN: dict[str, type[Lie]] = {}
"""What is not withstood: nothing that is known."""


@lie
class WrongGradient(Lie):
    """adds another weight gradient than the one it computed"""

    audited = Audits(microbatches=0.0, contributions=OFTEN)

    def bend(self, engine: SimulatedEngine) -> Any:
        async def accumulate(stash: Any) -> bool:
            added = await engine.accumulate(stash)
            if added and self.lying:
                into = engine.accumulator(stash.step)
                into.total = engine.arithmetic.add(
                    into.total, engine.arithmetic.numbers([5] * (NUM_ELEMENTS - 1) + [0])
                )
            return added

        return Bent(engine, accumulate=accumulate)


@lie
class LyingReducer(Lie):
    """hands out another sum than that of the contributions it reduced"""

    def bend(self, engine: SimulatedEngine) -> Any:
        async def reduce(contributions: Any, start: int, stop: int, *, hop: int = 0) -> Any:
            reduced = await engine.reduce(contributions, start, stop, hop=hop)
            return replace(reduced, packed=packed([7] * (stop - start))) if self.lying else reduced

        return Bent(engine, reduce=reduce)


@lie
class WrongActivations(Lie):
    """as a replica of the first stage sends forged activations on, and counts what came of them"""

    stage = BESIDE
    audited = Audits(microbatches=OFTEN, contributions=0.0)

    def bend(self, engine: SimulatedEngine) -> Any:
        async def forward(step: int, index: int, payload: Any, *, train: bool) -> Any:
            stash = await engine.forward(step, index, payload, train=train)
            if self.lying and train:
                stash.output = (payload[0], hidden(1.0))
            return stash

        return Bent(engine, forward=forward)
