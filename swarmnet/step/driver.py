"""The host of a step machine: does what it asks for, and tells it what came of it. The only module here that awaits.

One driver per (peer, stage). It owns no decision: claims, rounds and commits are the machine's, compute is the
engine's, routes are the pipeline's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, Protocol

from swarmnet.averaging.exchange import Exchange
from swarmnet.errors import SwarmError, leaves
from swarmnet.ids import Chain, PeerId, Restart, RoundId
from swarmnet.messages import Commit, Committed, Finished, Measure, Round, Stamp, StateHeader, StepControl
from swarmnet.pipeline.execution import Execution
from swarmnet.pipeline.host import Spawn
from swarmnet.stage.interfaces import Compute, SavedActivations
from swarmnet.step.commits import gradient_norm
from swarmnet.step.member import Member
from swarmnet.telemetry.spans import SpanBook, SpanKind
from swarmnet.transport import Transport

_P = ParamSpec("_P")

_MOST_REASONS = 32
"""Reasons logged for the failed sums of one round; others can invent reasons, so there is a limit."""


class Listener(Protocol):
    """The peer of a replica: it logs and records progress, and knows other peers."""

    def on_event(self, stage: int, event: str, fields: dict[str, object]) -> None:
        """Something worth a line."""

    def on_resync(self, stage: int, donors: tuple[PeerId, ...]) -> None:
        """The replica is behind or forked: fetch a snapshot."""

    def on_orphaned(self, stage: int) -> None:
        """The run has gone past what the replica can reach; it is suspended."""

    def on_local(self, message: StepControl) -> None:
        """A message from this peer to itself: hand it to whichever of its stages it concerns."""

    def near(self, stage: int) -> Mapping[int, Set[PeerId]]:
        """The other replicas known of `stage`, and those of its neighbour stages; by stage."""

    def everyone(self) -> Iterable[PeerId]:
        """All known replicas of all stages."""


class StepDriver:
    """Binds a Member to transport, engine, pipeline and averaging."""

    def __init__(
        self,
        member: Member,
        *,
        transport: Transport,
        engine: Compute,
        exchange: Exchange,
        listener: Listener,
        spawn: Spawn,
        spans: SpanBook,
    ) -> None:
        """spans: told how long each phase of averaging took, the barrier and the update."""
        self.member, self._spans = member, spans
        self._transport, self._engine, self._exchange = transport, engine, exchange
        self._listener, self._spawn = listener, spawn
        self._execution: Execution | None = None
        self._inbox: deque[tuple[PeerId, StepControl]] = deque()
        self._round: asyncio.Task[None] | None = None
        self._measuring: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._settled.set()
        self._beaten: set[PeerId] = set()  # who has had a heartbeat since it is among my neighbours
        self._beat_again_at = 0.0
        self._known_said = 0  # commits that I knew then
        self._spread_last: Commit | None = None
        self._whole_at = 0.0  # when the last whole sum was here
        self.on_applied: Callable[[Stamp, Finished, tuple[Commit, ...]], None] = lambda stamp, finished, commits: None
        """Is told of every aggregate that the engine has applied, with the commits of all stages."""
        self._failed: tuple[tuple[Stamp, RoundId] | None, set[str]] = (None, set())  # of a round: why its sum failed
        engine.subscribe(self)

    def attach(self, execution: Execution) -> None:
        """Say which pipeline this replica runs (built after the driver, since it claims through it)."""
        self._execution = execution

    # ------------------------------------------------------------ events

    def receive(self, peer: PeerId, message: StepControl) -> None:
        """A message from another replica (or from this one)."""
        # Of what comes in one turn of the event loop the leader makes one sense.
        if not self._inbox:
            asyncio.get_running_loop().call_soon(self._read)
        self._inbox.append((peer, message))

    def tick(self) -> None:
        """One heartbeat interval has passed."""
        self.member.queue, self.member.waits = self._pipeline.queue, self._pipeline.waits
        watch, now = self._exchange.watch, self._now()
        relayed = any(self._transport.relayed(peer) for peer, _ in self.member.view.mates())
        line = replace(self._exchange.meter.line, relayed=relayed)
        self.member.feel(line, watch.trouble(now=now), watch.allowed, watch.waits(now=now), watch.awaited(now=now))
        self._beat(due_only=True)
        self._tell(self.member.tick, now=self._now())

    def gone(self, peer: PeerId, *, definite: bool) -> None:
        """A connection broke."""
        self._tell(self.member.gone, peer, definite=definite, now=self._now())

    def reached(self, peer: PeerId) -> None:
        """A peer answered on a connection that we opened."""
        self.member.view.echo(peer, now=self._now())

    def restored(
        self, header: StateHeader, finished: Finished | None, commits: tuple[Commit, ...], last: tuple[Commit, ...]
    ) -> None:
        """The state is installed, as in `Member.restored`."""
        self._engine.lengthen(header.notices)
        self.member.restored(header, finished, commits, last, now=self._now())
        self._pipeline.stop()
        self._pipeline.begin(self.member.version)
        self.member.calls.make(self)

    # Audience, for the engine

    def on_sums_lost(self) -> None:
        self._tell(self.member.sums_lost)

    def on_engine(self, event: str, fields: dict[str, object]) -> None:
        self._listener.on_event(self.member.stage, event, fields)

    # State

    def suspend(self) -> None:
        """State is about to be replaced: take part in nothing until `restored`."""
        self.member.synced = False
        if self._measuring is not None:
            self._measuring.cancel()
        self.stop()
        self._pipeline.stop()
        self._engine.discard()

    @property
    def is_settled(self) -> bool:
        """Is no step being applied? Then the engine holds the member's version, if any."""
        return self._settled.is_set()

    def late(self, peer: PeerId, reason: str) -> None:
        """A replica of my stage does not do its part (`step.lateness`)."""
        self._tell(self.member.lateness.observe, peer, reason, now=self._now())

    async def settled(self) -> None:
        """Wait for a running apply to end."""
        await self._settled.wait()

    async def follow(self, restart: Restart) -> None:
        """The run goes on from another version: serve nothing until `restored`. Lets a running apply end first."""
        await self._settled.wait()
        self.suspend()
        self.member.follow(restart)

    # Claims, for the pipeline

    def claim(self, step: int, index: int) -> None:
        self._tell(self.member.claim, step, index, now=self._now())

    def withdraw(self, step: int, index: int) -> None:
        self._tell(self.member.withdraw, step, index)

    def added(self, stash: SavedActivations) -> None:
        # Otherwise the accumulator was discarded meanwhile, and this gradient with it (rule 5).
        if stash.discards == self._engine.discards(stash.step):
            self._tell(self.member.add, stash.step, stash.index)

    def non_finite(self, step: int, index: int) -> None:
        self._tell(self.member.found_non_finite, step, index)

    def _read(self) -> None:
        """Hand over what has come since the last turn."""
        came, self._inbox = self._inbox, deque()
        while came:
            peer, message = came.popleft()
            self._tell(self.member.receive, peer, message, now=self._now(), more=bool(came))

    def _tell(self, event: Callable[_P, None], *args: _P.args, **fields: _P.kwargs) -> None:
        """Tell the machine of an event, and do what it asks for."""
        event(*args, **fields)
        self.member.calls.make(self)

    @property
    def _pipeline(self) -> Execution:
        assert self._execution is not None
        return self._execution

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    # ------------------------------------------------------------ host of the machine

    def send(self, peer: PeerId, message: StepControl) -> None:
        if peer == self.member.me:
            self._listener.on_local(message)
        else:
            self._transport.tell(peer, message)

    def beat(self) -> None:
        self._beat()

    def publish(self, committed: Committed) -> None:
        """My stage has committed: tell all peers once; in a large run my neighbours and a few of each stage. The
        others see in a heartbeat that it is known, and ask."""
        member = self.member
        if committed.commit != self._spread_last:
            near = self._beaten if member.view.sparse else self._listener.everyone()
            for peer in sorted({*near, *member.heartbeats.messengers()} - {member.me}):
                self.send(peer, committed)
        self._spread_last = committed.commit
        self.send(member.me, committed)

    def contribute(self, step: int, index: int) -> None:
        if tasks := self._pipeline.steps.get(step):
            tasks.granted(index, self._engine.discards(step))

    def redirect(self, step: int, index: int, assignee: PeerId) -> None:
        if tasks := self._pipeline.steps.get(step):
            tasks.owned_elsewhere(index, assignee)

    def discard(self, step: int) -> None:
        self._engine.discard(step)
        if tasks := self._pipeline.steps.get(step):
            tasks.discarded()

    def aggregate(self, attempt: Round) -> None:
        self._round = self._spawn(self._whole("averaging", attempt, self._take_part))

    def fetch(self, attempt: Round, digest: bytes) -> None:
        self._round = self._spawn(self._whole("collect", attempt, partial(self._exchange.collect, digest=digest)))

    def stop(self) -> None:
        if self._round is not None:
            self._round.cancel()
            self._round = None
        self._exchange.close()

    def execute(self, step: int, index: int) -> None:
        if tasks := self._pipeline.steps.get(step):
            tasks.order(index)

    def apply(self, commits: tuple[Commit, ...]) -> None:
        self._settled.clear()
        self._pipeline.end(self.member.version)
        self._exchange.close()
        self._spawn(self._apply(commits))

    def resync(self, sources: tuple[PeerId, ...]) -> None:
        self._listener.on_resync(self.member.stage, sources)

    def measure(self, version: int, chain: Chain, term_chain: Chain) -> None:
        self._measuring = self._spawn(self._measure(version, chain, term_chain))

    def orphan(self) -> None:
        self.suspend()
        self._listener.on_orphaned(self.member.stage)

    def log(self, event: str, **fields: Any) -> None:
        self._listener.on_event(self.member.stage, event, fields)

    # ------------------------------------------------------------ performing

    def _beat(self, *, due_only: bool = False) -> None:
        """My heartbeat to all my neighbours. due_only: if it is time; else to those who are new among them, or do not
        know of commits that I learnt since."""
        member, now = self.member, self._now()
        known = len(member.oldest.barrier.known)
        due, news = now + member.timers.ask_s >= self._beat_again_at, known > self._known_said
        self._known_said = known
        receivers = member.heartbeats.neighbours(self._listener.near(member.stage), now=now)
        if not due_only or due:
            fresh = receivers
            # Among a few, news never puts off a heartbeat.
            if due_only or member.view.sparse:
                self._beat_again_at = now + member.view.beat_s
        else:
            awaited = member.heartbeats.awaited
            fresh = [peer for peer in receivers if peer not in self._beaten or (news and awaited(peer))]
        self._beaten = set(receivers)
        for peer, beat in member.heartbeats.to_each(fresh):
            self.send(peer, beat)

    async def _take_part(self, current: Round) -> Finished:
        step, began, event = current.stamp.step, self._now(), "sum_left"  # unless it comes to its end
        try:
            finished = await self._exchange.sum(
                current, self._pipeline.steps[step].losses, self._pipeline.works.root(step)
            )
            event = "averaged"
        finally:
            self.log(event, step=step, seconds=self._now() - began)
        return finished

    async def _whole(
        self, kind: SpanKind, current: Round, exchange: Callable[[Round], Coroutine[Any, Any, Finished]]
    ) -> None:
        began = self._now()
        try:
            finished = await exchange(current)
        except (SwarmError, ExceptionGroup) as error:
            if isinstance(error, ExceptionGroup):
                named, bugs = error.split(SwarmError)
                if bugs is not None:
                    raise bugs from error
                assert named is not None
                error = next(leaves(named))
            self._say_failed(current.id, str(error))
            lacking = error.facts.get("lacking") if isinstance(error, SwarmError) else None
            self.member.oldest.sum_failed(current.id, lacking if isinstance(lacking, tuple) else ())
            return
        finally:
            self._spans.add(kind, self.member.stage, current.stamp.step, -1, began, self._now())
        self._whole_at = self._now()
        self._tell(self.member.oldest.sum_whole, finished, now=self._whole_at)

    def _say_failed(self, round_id: RoundId, reason: str) -> None:
        """Say it once: while a dispute stands a sum is tried again, and fails, on every tick."""
        failed_in, reasons = self._failed
        if failed_in != (self.member.oldest.stamp, round_id):
            reasons = set()
            self._failed = (self.member.oldest.stamp, round_id), reasons
        if reason not in reasons and len(reasons) < _MOST_REASONS:
            reasons.add(reason)
            self.log("sum_failed", reason=reason)

    async def _apply(self, commits: tuple[Commit, ...]) -> None:
        member = self.member
        step, finished = member.version, member.oldest.finished
        assert finished is not None
        if not self._exchange.holds(member.oldest.stamp, finished.id):
            # Collecting another one was given up while that came into the buffer: no weights may follow from it.
            self._cannot_apply(step, "the sum is in the buffer no more")
            return
        commit = commits[member.stage]
        self.log(
            "committed",
            step=step,
            loss_sum=commit.loss_sum,
            num_tokens=commit.num_tokens,
            digest=commit.digest.hex(),
            contributions=[[peer, sorted(indexes)] for peer, _, indexes in finished.contributions],
            discarded=sorted(commit.discarded),
        )
        self._engine.lengthen(member.horizon_of(commits).notices)
        began = self._now()
        self._spans.add("barrier", member.stage, step, -1, self._whole_at, began)
        try:
            outer = await self._engine.apply(commits)
        except SwarmError as error:  # what is known of this step cannot be: another replica's state tells better
            self._cannot_apply(step, str(error))
            return
        stamp = member.oldest.stamp
        self._exchange.applied(commits)
        now = self._now()
        self._spans.add("update", member.stage, step, -1, began, now)
        self._spans.applied(member.stage, step, now=now)
        member.applied(now=now)
        self._settled.set()
        self.log(
            "applied",
            step=step,
            version=member.version,
            chain=member.chain,
            **_measures(commits),
            averaging_bytes=self._exchange.take_sent(),
        )
        if outer is not None:
            self.log(
                "outer_missed" if outer.missed else "outer_step",
                step=step,
                elements=outer.elements,
                moved=outer.moved,
                **{"reason": outer.missed} if outer.missed else {},
            )
        self._pipeline.begin(self.member.version)
        self.member.calls.make(self)
        self.on_applied(stamp, finished, commits)

    def _cannot_apply(self, step: int, reason: str) -> None:
        member = self.member
        self._settled.set()
        self.log("apply_failed", step=step, reason=reason)
        self.suspend()
        self._listener.on_resync(
            member.stage,
            tuple(sorted(p for p, seen in member.view.mates() if seen.synced and not member.view.refused(p))),
        )

    async def _measure(self, version: int, chain: Chain, term_chain: Chain) -> None:
        measured, digest = await self._engine.measure()
        if measured == version:  # else the weights have moved on
            self._tell(self.member.measured, Measure(version, chain, digest), term_chain, now=self._now())


def _measures(commits: tuple[Commit, ...]) -> dict[str, object]:
    """The step's mean loss and the norm of its average gradient, as the optimizer saw them."""
    return {"loss": commits[-1].loss_sum / max(commits[-1].num_tokens, 1), "grad_norm": gradient_norm(commits)}
