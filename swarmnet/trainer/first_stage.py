"""What the directory says of stage 0, and calls to it: all that whoever brings microbatches needs to know of a run.

Trainers and evaluations use it alike. It does not know what the microbatches are for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from swarmnet.directory import Directory, Record
from swarmnet.ids import NO_RESTART, PeerId, Restart
from swarmnet.manifest.schema import Manifest
from swarmnet.messages import Gradient, Packed, Process
from swarmnet.net.records import nobody_serves, unserved
from swarmnet.pipeline.caller import Caller
from swarmnet.pipeline.inputs import AnswerCheck
from swarmnet.pipeline.router import AdaptiveTimeout, Router, RoutingRule, least_time
from swarmnet.state.rollback import MAX_RESTARTS_AHEAD
from swarmnet.transport import Transport


class FirstStage:
    """Replicas of stage 0 as they are announced. records: everybody's but mine, as last read by `refresh`.

    rerouted(event's fields) hears of every microbatch that had to leave a replica.
    """

    def __init__(
        self,
        me: PeerId,
        manifest: Manifest,
        *,
        transport: Transport,
        directory: Directory,
        rerouted: Callable[[dict[str, object]], None],
        rule: RoutingRule = least_time,
    ) -> None:
        self._me, self._manifest, self._directory, self._rerouted = me, manifest, directory, rerouted
        self.records: dict[PeerId, Record] = {}
        self.restart = NO_RESTART
        self._dead: dict[PeerId, int] = {}  # peer -> the incarnation that is gone
        self._caller = Caller(
            transport,
            Router(AdaptiveTimeout.of(manifest.protocol, stages=manifest.cut.stages), rule=rule),
            self.candidates,
            AnswerCheck((), manifest.training.microbatch_size * manifest.training.sequence_length),
            self._left,
            leaving=self._leaving,
        )

    async def process(self, request: Process, tokens: tuple[Packed, ...]) -> Gradient:
        return await self._caller.process(request, tokens)

    async def evaluate(self, version: int, number: int, tokens: tuple[Packed, ...]) -> Gradient:
        """The loss of one microbatch by the weights of `version`, in every stage. Nothing is counted or kept.

        number: any. Replicas accept indexes below `training.eval_microbatches` and treat all alike, so it goes round.
        Raises Refused, as `process`: STALE when the weights have moved on.
        """
        step = version + self._manifest.averaging.delay.ahead(version)
        index = number % self._manifest.training.eval_microbatches
        return await self._caller.process(Process(step, 0, index, purpose="eval"), tokens)

    async def refresh(self) -> bool:
        """Read everybody's records. Returns True if the run goes on from another version (`restart`)."""
        self.records = {record.peer: record for record in await self._directory.records() if record.peer != self._me}
        newest = min(self._newest_restart(stage) for stage in range(self._manifest.cut.stages))
        if newest <= self.restart:
            return False
        self.restart = newest
        return True

    def gone(self, peer: PeerId) -> None:
        """The peer is definitely dead."""
        if peer in self.records:
            self._dead[peer] = self.records[peer].incarnation
            self._caller.gone(peer)

    def candidates(self) -> Mapping[PeerId, int]:
        """Live replicas that have their state, and their queues."""
        found: dict[PeerId, int] = {}
        for peer, record in self.records.items():
            if self._dead.get(peer) == record.incarnation:
                continue
            for status in record.stages:
                if status.stage == 0 and status.synced:
                    found[peer] = status.queue
        return found

    def lacks(self) -> dict[str, object] | None:
        """What no step can be done without and is not there, as fields of the event `waiting`; None if all is there."""
        if missing := unserved(self.records.values(), num_stages=self._manifest.cut.stages):
            return nobody_serves(missing)
        return None if self.candidates() else {"reason": "no replica of stage 0 has its weights yet"}

    def newest_version(self) -> int:
        """Of the weights, as half of those who serve the stage say: what one says is a word."""
        versions = [
            s.version
            for record in self.records.values()
            if record.restart == self.restart
            for s in record.stages
            if s.stage == 0 and s.synced
        ]
        return sorted(versions, reverse=True)[(len(versions) - 1) // 2] if versions else self.restart.version

    def room(self) -> int:
        """Microbatches in flight: what stage 0 says it has room for, and one waiting in front of each replica."""
        slots = [s.slots + 1 for record in self.records.values() for s in record.stages if s.stage == 0]
        return max(sum(slots), 2)

    def _leaving(self) -> frozenset[PeerId]:
        return frozenset(
            peer
            for peer, record in self.records.items()
            for status in record.stages
            if status.stage == 0 and status.draining
        )

    def _newest_restart(self, stage: int) -> Restart:
        """The highest restart that most of this stage are under, or beyond. What one says moves no trainer."""
        restarts = sorted(
            (
                record.restart
                for record in self.records.values()
                if any(s.stage == stage for s in record.stages)
                and record.restart.version <= self._manifest.training.total_steps
                and record.restart.number <= self.restart.number + MAX_RESTARTS_AHEAD
            ),
            reverse=True,
        )
        return restarts[len(restarts) // 2] if restarts else NO_RESTART

    def _left(self, request: Process, peer: PeerId, reason: str) -> None:
        self._rerouted({"stage": -1, "step": request.step, "index": request.index, "from": peer, "reason": reason})
