"""One replica: everything one (peer, stage) is made of, wired together. READ FIRST.

    network -> Peer -> Replica -> Execution (microbatches)   \\
                               -> StepDriver -> Member (what counts)  > Engine (arithmetic)
                               -> Exchange (sums)             /
                               -> Donor (state for joiners)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarmnet.averaging.exchange import Exchange
from swarmnet.errors import SwarmError
from swarmnet.ids import PeerId, RunId, first_chain
from swarmnet.manifest.schema import Manifest
from swarmnet.messages import Answer, Commit, Finished, Packed, Process, Round
from swarmnet.net.transport import Transport
from swarmnet.pipeline.caller import Caller
from swarmnet.pipeline.execution import Execution, Limits
from swarmnet.pipeline.patience import Patience
from swarmnet.pipeline.payload import AnswerCheck, InputCheck
from swarmnet.pipeline.relay import Spawn
from swarmnet.pipeline.router import Router
from swarmnet.pipeline.sources import Sources
from swarmnet.stage.engine import Engine
from swarmnet.state.cut import Cut
from swarmnet.state.handover import Donor, fetch_snapshot
from swarmnet.step.driver import Listener, StepDriver
from swarmnet.step.gate import Shape
from swarmnet.step.member import Member
from swarmnet.step.view import Timers

_BYTES_PER_ELEMENT, _NAMES_BYTES = 16, 64 << 20
"""No snapshot is larger: a weight and two moments of 4 bytes each take 12, names and shapes a few MiB."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a replica is given by its peer. holders(): who may have tokens; tokens(step, index): this peer's own."""

    me: PeerId
    run: RunId
    incarnation: int
    manifest: Manifest
    transport: Transport
    listener: Listener
    spawn: Spawn
    holders: Callable[[], Sequence[PeerId]]
    tokens: Callable[[int, int], tuple[Packed, ...] | None]


def timers_of(manifest: Manifest) -> Timers:
    """The run's timers."""
    protocol = manifest.protocol
    return Timers(protocol.heartbeat_s, protocol.suspect_s, protocol.long_silence_s, protocol.idle_index_s)


class Replica:
    """A stage served by this peer."""

    def __init__(self, stage: int, engine: Engine, around: Surroundings, *, slots: int, memo_bytes: int) -> None:
        manifest, timers = around.manifest, timers_of(around.manifest)
        num_stages = manifest.cut.stages
        self.stage, self.engine, self._around = stage, engine, around
        self._first_chain = first_chain(around.run, stage)
        self.member = Member(
            around.me,
            stage,
            Shape(num_stages, manifest.training.microbatches, manifest.training.total_steps,
                  manifest.protocol.keeper_term_steps, manifest.training.max_void),
            timers,
            incarnation=around.incarnation,
            chain=self._first_chain,
            now=self._now(),
        )
        self.exchange = Exchange(
            around.me, engine, around.transport, self.member.sum_of, running_s=timers.heartbeat_s
        )
        self.driver = StepDriver(
            self.member,
            transport=around.transport,
            engine=engine,
            exchange=self.exchange,
            listener=around.listener,
            spawn=around.spawn,
        )
        self.caller: Caller | None = None
        answer_check = AnswerCheck.of(manifest, stage + 1)
        if stage + 1 < num_stages:
            patience = Patience(floor_s=timers.suspect_s, ceiling_s=max(2 * timers.long_silence_s, timers.suspect_s))
            self.caller = Caller(
                around.transport, Router(patience), self._next_replicas, answer_check, self._rerouted,
                leaving=self._next_leaving,
            )
        check = InputCheck.of(manifest, stage)
        self.execution = Execution(
            stage,
            num_stages,
            engine=engine,
            claims=self.driver,
            caller=self.caller,
            sources=Sources(
                around.transport,
                stage,
                before=lambda: self._live(stage - 1),
                after=lambda: self._live(stage + 1),
                holders=around.holders,
                tokens=around.tokens,
                check=check,
                check_answer=answer_check.remembered,
            ),
            check=check,
            limits=Limits(slots, timers.heartbeat_s, 2 * timers.suspect_s, memo_bytes),
            spawn=around.spawn,
        )
        self.driver.attach(self.execution)
        self.donor = Donor(stage, engine, self._cut, self._sum_and_commits)
        self._restoring = False
        self._touched = False  # does the engine hold other weights than it was built with?
        self._failed: set[tuple[PeerId, type[SwarmError], object]] = set()

    # ------------------------------------------------------------ state

    def start_from_seed(self) -> None:
        """Serve the weights of version 0, which every engine is built with."""
        if self._touched:
            self.engine.reset_to_seed()
        self.driver.restored(0, self._first_chain, self._first_chain, None, ())
        self._event("synced", {"version": 0, "how": "seed", "seconds": 0.0, "bytes": 0})

    async def restore_from(self, donors: Sequence[PeerId]) -> bool:
        """Fetch a snapshot from the first donor that has one and serve from it. False if none had."""
        if self._restoring:
            return False
        self._restoring = True
        began = self._now()
        self.driver.suspend()
        try:
            for donor in donors:
                try:
                    num_bytes = await self._restore(donor)
                except SwarmError as error:
                    self._say_failed(donor, error)
                    continue
                self._failed.clear()
                self._event("synced", {
                    "version": self.member.version, "how": "snapshot", "donor": donor,
                    "seconds": round(self._now() - began, 3), "bytes": num_bytes,
                })
                return True
            return False
        finally:
            self._restoring = False

    def resume(self) -> None:
        """Nobody could hand over newer state, or not all of it: go on with the weights that are here."""
        member = self.member
        self.driver.restored(member.version, member.chain, member.term_chain, None, ())

    async def _restore(self, donor: PeerId) -> int:
        max_bytes = _BYTES_PER_ELEMENT * self.engine.num_elements + _NAMES_BYTES
        snapshot, data = await fetch_snapshot(self._around.transport, donor, self.stage, max_bytes=max_bytes)
        self._touched = True
        await self.engine.restore(memoryview(data), version=snapshot.version)
        member = self.member
        member.version, member.chain, member.term_chain = snapshot.version, snapshot.chain, snapshot.term_chain
        finished, commits = snapshot.finished, snapshot.commits
        if finished is not None:
            # A member must hold the step's sum as well, or its commit would have one holder less (rule 18).
            wanted = Round(member.stamp, finished.id.ballot, finished.id, (), (), (donor,))
            finished = await self.exchange.collect_from(wanted, donor)
        self.driver.restored(snapshot.version, snapshot.chain, snapshot.term_chain, finished, commits)
        return len(data)

    def _say_failed(self, donor: PeerId, error: SwarmError) -> None:
        """Once per donor and kind of failure until a join succeeds: it is tried again at every heartbeat."""
        known = donor, type(error), error.facts.get("code")
        if known not in self._failed:
            self._failed.add(known)
            self._event("join_failed", {"donor": donor, "reason": str(error)})

    def _cut(self) -> Cut | None:
        member = self.member
        if not member.synced or member.applying:
            return None
        return Cut(member.version, member.chain, member.term_chain)

    def _sum_and_commits(self) -> tuple[Finished | None, tuple[Commit, ...]]:
        return self.member.finished, self.member.barrier.known

    # ------------------------------------------------------------ microbatches

    def process(self, caller: PeerId, request: Process, read: Callable[..., Any]) -> AsyncGenerator[Answer, None]:
        """See Execution.process."""
        return self.execution.process(caller, request, read)

    def gone(self, peer: PeerId, *, definite: bool) -> None:
        """A connection to `peer` broke."""
        if definite and self.caller is not None:
            self.caller.gone(peer)
        self.driver.gone(peer, definite=definite)

    def _live(self, stage: int) -> list[PeerId]:
        return self.member.view.live(stage, now=self._now())

    def _next_replicas(self) -> Mapping[PeerId, int]:
        view = self.member.view
        live = ((peer, view.get(peer, self.stage + 1)) for peer in self._live(self.stage + 1))
        return {peer: seen.queue for peer, seen in live if seen is not None}

    def _next_leaving(self) -> frozenset[PeerId]:
        view = self.member.view
        live = ((peer, view.get(peer, self.stage + 1)) for peer in self._live(self.stage + 1))
        return frozenset(peer for peer, seen in live if seen is not None and seen.draining)

    def _rerouted(self, request: Process, peer: PeerId, reason: str) -> None:
        self._event("rerouted", {"step": request.step, "index": request.index, "from": peer, "reason": reason})

    def _event(self, event: str, fields: dict[str, object]) -> None:
        self._around.listener.on_event(self.stage, event, fields)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
