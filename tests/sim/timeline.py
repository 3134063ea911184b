"""What every device of a simulated swarm did when, what was averaged when, and for what the devices stood still.

A device *stalls* while it has nothing to do and a call somewhere waits for the next version of the weights: work is
there, only averaging is not done. Spans are (start, stop) in virtual seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swarmnet.ids import PeerId
from swarmnet.messages import Process
from swarmnet.testing.network import Message
from swarmnet.testing.virtual_swarm import VirtualSwarm

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that took a while at one peer. what: "forward", "backward", "weights", "state" (the optimizer, other
    weights), "averaging" or "held" (a call of a step that was not open yet)."""

    peer: PeerId
    stage: int
    what: str
    step: int
    start: float
    stop: float


class Timeline:
    """Watches a swarm from before it runs."""

    def __init__(self, swarm: VirtualSwarm) -> None:
        self._swarm = swarm
        self._averaged: list[Bar] = []
        self._held: list[Bar] = []
        self._waiting: dict[tuple[PeerId, int, int], float] = {}
        swarm.hooks.append(self._on_event)
        swarm.network.intercepts.append(self._on_message)

    def bars(self) -> list[Bar]:
        """Everything, in order of its start."""
        jobs = [
            Bar(node.peer_id, -job.turn.later_stage, job.turn.kind.name.lower(), job.turn.step, job.start, job.stop)
            for node in self._swarm.nodes
            # Stages of one peer share its device.
            for device in {id(engine.device): engine.device for engine in node.engines.values()}.values()
            for job in device.log
        ]
        return sorted([*jobs, *self._averaged, *self._held], key=lambda bar: (bar.start, bar.stop, bar.peer))

    def stalls(self, peer: PeerId, begin: float, end: float) -> list[Span]:
        """When the peer's device had nothing to do while some call waited for a version."""
        changes = [(end, 0, 0)]  # when, and how many more jobs are done and calls held from then on
        for bar in self.bars():
            if bar.what == "held":
                changes += [(bar.start, 0, 1), (bar.stop, 0, -1)]
            elif bar.peer == peer and bar.what != "averaging":
                changes += [(bar.start, 1, 0), (bar.stop, -1, 0)]
        found: list[Span] = []
        before, jobs, calls = begin, 0, 0
        for at, more_jobs, more_calls in sorted(changes):
            now = min(max(at, begin), end)
            if calls and not jobs and now > before:
                found.append((before, now))
            before, jobs, calls = now, jobs + more_jobs, calls + more_calls
        return found

    # ------------------------------------------------------------ watching

    def _ahead(self, version: int) -> int:
        return self._swarm.plan.delay.ahead(version)

    def _on_message(self, caller: PeerId, callee: PeerId, request: Message) -> None:
        """If a call was opened: is it of a step that is not open there?"""
        if not isinstance(request, Process):
            return
        node = next((node for node in self._swarm.nodes if node.up and node.peer_id == callee), None)
        replica = node.peer.replicas.get(request.stage) if node is not None else None
        # A call of a step beyond what is open now waits for weights, and not for a device.
        if replica is not None and request.step > replica.member.version + self._ahead(replica.member.version):
            self._waiting.setdefault((callee, request.stage, request.step), self._swarm.loop.time())

    def _on_event(self, peer: PeerId, event: str, fields: dict[str, Any]) -> None:
        now, stage = self._swarm.loop.time(), fields.get("stage", -1)
        if event == "averaged":
            self._averaged.append(Bar(peer, stage, "averaging", fields["step"], now - fields["seconds"], now))
        if event == "applied":
            newest = fields["version"] + self._ahead(fields["version"])
            for at, of, step in [key for key in self._waiting if key[:2] == (peer, stage)]:
                if step <= newest:
                    self._held.append(Bar(at, of, "held", step, self._waiting.pop((at, of, step)), now))


def seconds_of(spans: Sequence[Span]) -> float:
    """How long they are together."""
    return sum(stop - start for start, stop in spans)
