"""Our way of `benchmarks/averaging.py`: an exchange over the real transport, and as much of a leader as a round needs.

A round as a run has it: every member reports to the leader that its microbatches are summed; when all have, the leader
tells them the round; they exchange, check and digest, and report what they hold; when all hold the same, the leader
tells them the `Committed`. That is what group forming is here. When a member's process is gone the leader opens the
next round without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from averaging_place import die, sample_of

from swarmnet.averaging.butterfly import ExchangeContext
from swarmnet.averaging.exchange import Exchange
from swarmnet.engine.compute_thread import ComputeThread, StageJobs
from swarmnet.ids import Ballot, Chain, Generation, PeerId, Signer
from swarmnet.manifest.schema import Averaging, Manifest, Numerics
from swarmnet.messages import (
    UNMEASURED,
    Answer,
    Committed,
    Control,
    Finished,
    Indexes,
    LineQuality,
    MemberState,
    Part,
    Request,
    Round,
    StagePlan,
    Stamp,
)
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.stage.canonical import Canonical
from swarmnet.stage.rounding import MAX_SUM, FineRounding
from swarmnet.step.commits import commit_of
from swarmnet.step.ledger import Ledger
from swarmnet.step.rounds import RoundBuilder
from swarmnet.sums.step_sum import StepSum
from swarmnet.transport import ReadPayload

CHAIN = Chain("00" * 32)
GENERATION = Generation(1, 0)
GROUP_SIZE = Averaging().group_size
_TOKENS = 10
T = TypeVar("T")


class Given:
    """What `StepSum` asks of a replica's state and of its accumulator, over one given vector: version 0, one shape."""

    stage = version = discards = 0

    def __init__(self, vector: torch.Tensor, manifest: Manifest) -> None:
        self.vector, self.canonical = vector, Canonical(manifest.of_stage(0), {"vector": vector.shape})
        self._rounding = FineRounding(manifest.numerics.grid_bits, 1)

    def read(self, step: int) -> torch.Tensor:
        """The sum of a step's gradients."""
        return self.vector

    def settle(self) -> None:
        """No update needs its sum."""

    def most(self, num_microbatches: int) -> int:
        """The largest magnitude of so many microbatches."""
        return MAX_SUM

    def square_norm(self, total: torch.Tensor) -> float:
        """Of a finished sum."""
        return self.canonical.square_norm(total, self._rounding)


class VectorSum(StepSum):
    """The sums of a run over one given vector: the run's own arithmetic, no model."""

    def __init__(self, vector: torch.Tensor, codec: str, compute: ComputeThread) -> None:
        manifest = Manifest(averaging=Averaging(codec=codec), numerics=Numerics(mode="fast"))
        self._unit = {"small": 0.25, "int64": 2.0**-manifest.numerics.grid_bits}[codec]
        given: Any = Given((vector / self._unit).round_().to(torch.int64), manifest)
        super().__init__(
            StageJobs(compute, 0, vector.device, reproducible=False),
            given,
            (given,),
            memory=torch.zeros_like(given.vector),
        )

    def sample(self) -> torch.Tensor:
        """Both ends of the finished sum, in the vector's own unit."""
        return sample_of(self.flat) * self._unit


class Shares:
    """As much of a ledger as a round asks of it: every member has summed one microbatch."""

    discarded: frozenset[int] = frozenset()

    def __init__(self, everyone: Sequence[PeerId]) -> None:
        self.live = {peer: index for index, peer in enumerate(everyone)}

    def contributions(self) -> tuple[tuple[PeerId, Generation, Indexes], ...]:
        """See `step.ledger.Ledger`."""
        return tuple((peer, GENERATION, frozenset({index})) for peer, index in sorted(self.live.items()))


class Leader:
    """Opens a round when all have reported, another when a member is lost on the way, and commits what all hold."""

    def __init__(self, ballot: Ballot, everyone: Sequence[PeerId], tell: Callable[[PeerId, Control], None]) -> None:
        self._ballot, self._shares, self._tell = ballot, Shares(everyone), tell
        self._lines: dict[PeerId, LineQuality] = {}
        self._holding: set[PeerId] = set()
        self._builder: RoundBuilder | None = None  # of the step under way
        self._current: Round | None = None

    def heard(self, member: PeerId, report: MemberState) -> None:
        """A member has summed its microbatches, or holds the finished sum."""
        if report.ack is None:
            self._lines[member] = report.line or UNMEASURED
            if self._lines.keys() >= self._shares.live.keys():
                self._builder = RoundBuilder(report.stamp, self._ballot, GROUP_SIZE, itertools.count())
                for peer, line in self._lines.items():
                    self._builder.measured(peer, line)
                self._lines.clear()
                self._open(self._builder)
        elif self._current is not None and report.ack.id == self._current.id:
            self._holding.add(member)
            if self._holding >= self._shares.live.keys():
                self._tell_all(Committed(report.ack))
                self._builder = self._current = None

    def gone(self, member: PeerId) -> None:
        """Its process is gone."""
        if self._shares.live.pop(member, None) is not None and self._builder is not None:
            self._open(self._builder)

    def _open(self, opening: RoundBuilder) -> None:
        self._holding.clear()
        self._current = opening.open(self._shares.live.keys(), cast(Ledger, self._shares))
        self._tell_all(StagePlan(self._current.stamp, self._ballot, attempt=self._current))

    def _tell_all(self, message: StagePlan | Committed) -> None:
        for peer in self._shares.live:
            self._tell(peer, message)


class Member:
    """The service: an exchange per codec. Rank 0 is the leader too."""

    def __init__(self, me: PeerId, vector: torch.Tensor, signer: Signer) -> None:
        self.me, self._vector, self._signer = me, vector, signer
        self._checked_s = self._summed_at = 0.0  # how long the check of sums took in the last round, and its begin
        self.transport: GrpcTransport
        self.everyone: tuple[PeerId, ...] = ()
        self._compute = ComputeThread()
        self._exchanges: dict[str, tuple[Exchange, VectorSum]] = {}
        self._codec = ""
        self._told: asyncio.Queue[StagePlan | Committed] = asyncio.Queue()
        self._ballot: Ballot
        self._leader: Leader
        self.dies_after_s: float | None = None

    def meet(self, everyone: Sequence[PeerId]) -> None:
        """These are the members, by rank."""
        self.everyone, self._ballot = tuple(sorted(everyone)), Ballot(1, everyone[0])
        self._leader = Leader(self._ballot, self.everyone, self._tell)

    def _tell(self, peer: PeerId, message: Control) -> None:
        if peer == self.me:
            self.on_tell(self.me, message)
        else:
            self.transport.tell(peer, message)

    def _exchange(self, codec: str) -> tuple[Exchange, VectorSum]:
        if codec not in self._exchanges:
            self._exchanges.clear()  # one vector's memory at a time
            engine = VectorSum(self._vector, codec, self._compute)
            context = ExchangeContext(
                self.me, engine, self.transport, num_tokens=_TOKENS, signer=self._signer, on_event=self._on_event
            )
            exchange = Exchange(context)
            self._exchanges[codec] = exchange, engine
        return self._exchanges[codec]

    def _on_event(self, event: str, fields: dict[str, object]) -> None:
        if event == "sum_checked":
            self._checked_s = float(str(fields["seconds"]))
            self._summed_at = time.monotonic() - self._checked_s

    def prepare(self, codec: str) -> None:
        """Have this codec's exchange ready."""
        self._codec = codec
        self._exchange(codec)

    async def turn(self, number: int) -> dict[str, Any]:
        """One good round, from the report that all is summed to the commit; again if a member is lost on the way."""
        exchange, engine = self._exchange(self._codec)
        stamp, sent, rounds, began = Stamp(number, 0, CHAIN), self._sent(), 0, time.monotonic()
        summing: asyncio.Task[tuple[float, float, Finished]] | None = None
        async with asyncio.TaskGroup() as group:
            self._report(stamp, None, exchange.meter.line)
            while isinstance(heard := await self._told.get(), StagePlan):
                if summing is not None:
                    summing.cancel()
                    exchange.close()
                if self.dies_after_s is not None:
                    asyncio.get_running_loop().call_later(self.dies_after_s, die)
                assert heard.attempt is not None
                current, rounds = heard.attempt, rounds + 1
                summing = group.create_task(self._sum(exchange, current))
            ended = time.monotonic()
        assert summing is not None and heard.commit.step == number
        *phase, finished = summing.result()
        return {
            "began": began,
            "ended": ended,
            "phase": tuple(phase),
            "checked_s": self._checked_s,
            "summed_at": self._summed_at,
            "ended_at": phase[1],
            "rounds": rounds,
            "sample": engine.sample(),
            "digest": finished.digest,
            "sent": self._sent() - sent,
            "members": len(current.receivers),
            "line": exchange.meter.line.bytes_per_s,
        }

    async def _sum(self, exchange: Exchange, current: Round) -> tuple[float, float, Finished]:
        entered = time.monotonic()
        finished = await exchange.sum(current, {self.everyone.index(self.me): (1.0, _TOKENS)})
        summed = time.monotonic()
        self._report(current.stamp, finished)
        return entered, summed, finished

    def _report(self, stamp: Stamp, finished: Finished | None, line: LineQuality = UNMEASURED) -> None:
        mine = frozenset({self.everyone.index(self.me)})
        ack = commit_of(stamp, finished, named=False) if finished is not None else None
        self._tell(self._ballot.peer, MemberState(stamp, self._ballot, GENERATION, mine, mine, ack, None, 1, line=line))

    def _sent(self) -> int:
        return sum(int(str(row["sent"])) for row in self.transport.traffic.rows())

    # Service

    def on_tell(self, caller: PeerId, message: Control) -> None:
        """To the leader, or from it."""
        if isinstance(message, MemberState):
            self._leader.heard(caller, message)
        else:
            assert isinstance(message, StagePlan | Committed)
            self._told.put_nowait(message)

    async def on_call(self, caller: PeerId, request: Request, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
        """My share of a round."""
        assert isinstance(request, Part)
        async with contextlib.aclosing(self._exchange(self._codec)[0].serve(request)) as answers:
            async for answer in answers:
                yield answer

    def on_reached(self, peer: PeerId) -> None:
        """Everybody can be called here."""

    def on_gone(self, peer: PeerId, *, definite: bool) -> None:
        """The leader goes on without it."""
        if definite and peer != self.me and self.me == self._ballot.peer:
            self._leader.gone(peer)
