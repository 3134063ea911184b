"""Runs a fleet, does its faults to it, and says what came of it.

The faults are decided by `testing.schedule`, as in a swarm of real processes, and the swarm holds every sum and every
version of the weights against those of a single process.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import math
import random
import statistics
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Control
from swarmnet.simulate.fleet import Fleet, Machine, shape
from swarmnet.telemetry.kinds import EventFold
from swarmnet.testing.fault import Join, stage_of
from swarmnet.testing.network import Message
from swarmnet.testing.schedule import Action, FaultAction, FaultSchedule, RestartAction
from swarmnet.testing.swarm import carry_out
from swarmnet.testing.virtual_swarm import Enough, VirtualSwarm
from swarmnet.wire.convert import write_control, write_request
from swarmnet.wire.deflate import Deflater
from swarmnet.wire.peer_ids import peer_id_from_public_bytes

_TICK_S, _FAULT_S = 0.25, 0.1
"""How often it is looked whether the run is over; where there are faults, whether one is due."""

_EVERY = 61
"""What one of so many links carries is written and packed to weigh it: writing all takes longer than the rest. In a
fleet of fewer peers one of as many links as there are peers."""

_COLLECT = 50_000, 20, 100
"""When garbage is collected: rarely."""


@dataclass(frozen=True, slots=True)
class FleetProgress:
    """How far a run is."""

    virtual_s: float
    wall_s: float
    step: int
    share: float
    """Of the steps or of the seconds, whichever ends first."""
    alive: int

    @property
    def left_s(self) -> float:
        """Of wall time, about."""
        return max(self.wall_s * (1 / self.share - 1), 0.0) if self.share else math.inf


class _Weights:
    """How many messages of each kind were sent, and what those weigh that were written."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._links: dict[tuple[PeerId, PeerId], Deflater | None] = {}
        self._count: Counter[type] = Counter()
        self._written: Counter[type] = Counter()
        self._num_bytes: Counter[type] = Counter()

    def add(self, sender: PeerId, receiver: PeerId, message: Message) -> None:
        kind, link = type(message), (sender, receiver)
        if kind in _ANSWERS:
            return
        self._count[kind] += 1
        if link not in self._links:
            weighed = zlib.crc32(f"{sender}/{receiver}".encode()) % self._every == 0
            self._links[link] = Deflater() if weighed else None
        packed = self._links[link]
        # A rare kind may never come on a link that is weighed.
        if packed is not None or not self._written[kind]:
            self._written[kind] += 1
            write: Callable[[Any], bytes] = write_control if kind in _ONE_WAY else write_request
            data = write(message)
            self._num_bytes[kind] += len(packed(data) if packed is not None and kind in _ONE_WAY else data)

    def total(self) -> dict[str, float]:
        """Bytes by kind."""
        return {
            kind.__name__: self._num_bytes[kind] / self._written[kind] * count for kind, count in self._count.items()
        }


_ONE_WAY = frozenset(Control.__args__)
_ANSWERS = frozenset(Answer.__args__)


def peer_id_of(name: str) -> PeerId:
    """An id as the wire wants it."""
    return peer_id_from_public_bytes(hashlib.sha256(name.encode()).digest())


class FleetSimulation(EventFold):
    """One run of a fleet. `stop` ends it early; `report` says what there is by then."""

    def __init__(self, fleet: Fleet, *, on_progress: Callable[[FleetProgress], None] = lambda progress: None) -> None:
        self.fleet, self._on_progress = fleet, on_progress
        self.swarm = swarm = VirtualSwarm(fleet.plan, fleet.seed)
        swarm.detailed = False
        self._rng = random.Random(f"{fleet.seed}/whom")
        replicas = {name: stage_of(name) or 0 for name in fleet.machines}
        self._schedule = FaultSchedule(fleet.faults, replicas=replicas, steps=fleet.plan.steps)
        swarm.on_start, swarm.on_gone = self._starting, self._gone
        self._machines = dict(fleet.machines)
        swarm.ids = {name: peer_id_of(name) for name in fleet.machines}
        self._names = {peer: name for name, peer in swarm.ids.items()}
        self._spare = list(reversed(fleet.spare))
        swarm.names = dict(enumerate(swarm.ids.values()))
        swarm.network.lines.between = fleet.latencies_s
        for name, machine in fleet.machines.items():
            self._equip(name, machine)
        for number in range(fleet.plan.trainers):
            name = f"trainer-{number}"
            swarm.ids[name] = peer_id_of(name)
            swarm.network.lines.regions[swarm.ids[name]] = number % len(fleet.regions)
        self._weights = _Weights(min(_EVERY, len(fleet.machines)))
        swarm.network.intercepts.append(self._weights.add)
        swarm.hooks.append(self._on_event)
        self._stopped = False
        self._wall = 0.0
        self._began_at: float | None = None
        self._synced: set[int] = set()
        self._applied: dict[int, dict[int, float]] = {}
        self._ends: list[float] = []
        self._averaged_at: dict[tuple[PeerId, int], float] = {}
        self._seconds = {"averaging": 0.0, "barrier": 0.0}
        self.done: Counter[str] = Counter()

    def stop(self) -> None:
        """End soon. Safe in a signal handler."""
        self._stopped = True

    def run(self) -> bool:
        """Until all steps are done (True), its time is over, or it is stopped. Raises `Broken`."""
        self._wall = time.monotonic()
        # Nearly all objects live as long as the run: looking through them again and again finds nothing.
        usual = gc.get_threshold()
        gc.set_threshold(*_COLLECT)
        try:
            return self.swarm.run(until_s=math.inf, script=self._script)
        finally:
            gc.set_threshold(*usual)
            self._wall = time.monotonic() - self._wall

    # ------------------------------------------------------------ while it runs

    def _equip(self, name: str, machine: Machine) -> None:
        swarm, peer = self.swarm, self.swarm.ids[name]
        swarm.slowdown[peer], swarm.slots[peer] = 1 / machine.speed, machine.slots
        swarm.free_bytes[peer] = round(machine.memory_bytes / self.fleet.scale)
        swarm.network.lines.regions[peer] = machine.region
        self._set_line(name)

    def _set_line(self, name: str) -> None:
        machine, scale = self._machines[name], self.fleet.scale
        self.swarm.limit(
            self.swarm.ids[name],
            up_bytes_per_s=machine.up_bytes_per_s / scale,
            down_bytes_per_s=machine.down_bytes_per_s / scale,
        )

    async def _script(self, swarm: VirtualSwarm) -> None:
        while not swarm.done:
            await asyncio.sleep(_FAULT_S if self.fleet.faults else _TICK_S)
            now = swarm.loop.time()
            self._perform(self._schedule.tick(now=now))
            self._on_progress(self.progress())
            if self._stopped or now >= self.fleet.seconds:
                raise Enough

    def progress(self) -> FleetProgress:
        """How far it is now."""
        now = self.swarm.loop.time()
        share = max(min(now / self.fleet.seconds, 1.0), self._share_of_steps(now))
        alive = sum(node.up for node in self.swarm.nodes)
        wall = time.monotonic() - self._wall
        return FleetProgress(now, wall, len(self._ends), share, alive)

    def _share_of_steps(self, now: float) -> float:
        if not self._ends or self._began_at is None:
            return 0.0
        # Of the step that goes on as much as its time tells.
        last_s = (self._ends[-1] - self._began_at) / len(self._ends)
        return (len(self._ends) + min((now - self._ends[-1]) / last_s, 0.95)) / self.fleet.plan.steps

    def _on_event(self, peer: PeerId, event: str, fields: dict[str, Any]) -> None:
        now, stage = self.swarm.loop.time(), fields.get("stage", -1)
        self.take(event, peer, fields, stage, now)
        if actions := self._schedule.on(self._names[peer], {"event": event, **fields}, now=now) if stage >= 0 else []:
            # Actions are for the script: who says this may be the one that is killed.
            self.swarm.loop.call_soon(self._perform, actions)

    def on_synced(self, peer: PeerId, fields: Mapping[str, Any], stage: int, now: float) -> None:
        self._synced.add(stage)
        if self._began_at is None and len(self._synced) == self.fleet.plan.stages:
            self._began_at = now
        self._schedule.moved(self._names[peer], stage)

    def on_averaged(self, peer: PeerId, fields: Mapping[str, Any], stage: int, now: float) -> None:
        self._seconds["averaging"] += fields["seconds"]
        self._averaged_at[peer, stage] = now

    def on_applied(self, peer: PeerId, fields: Mapping[str, Any], stage: int, now: float) -> None:
        self._seconds["barrier"] += now - self._averaged_at.pop((peer, stage), now)
        stages = self._applied.setdefault(fields["version"], {})
        stages.setdefault(stage, now)
        if len(stages) == self.fleet.plan.stages and fields["version"] == len(self._ends) + 1:
            self._ends.append(now)
            del self._applied[fields["version"]]

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, FaultAction):
                self.done[action.fault.kind] += 1
            carry_out(action, self.swarm)
            # Only now is there a process that it may be told of.
            if isinstance(action, RestartAction) or (
                isinstance(action, FaultAction) and isinstance(action.fault, Join)
            ):
                self._perform(self._schedule.started(action.name, now=self.swarm.loop.time()))

    def _starting(self, name: str) -> None:
        if name not in self._machines:
            # Machines of peers that have left are reused; without any, machines begin again from the first.
            machine = self._spare.pop() if self._spare else self._rng.choice(self.fleet.spare)
            self._machines[name], self.swarm.ids[name] = machine, peer_id_of(name)
            self._names[self.swarm.ids[name]] = name
            self._equip(name, machine)

    def _gone(self, peer: PeerId, back: bool) -> None:
        self._perform(self._schedule.gone(self._names[peer], now=self.swarm.loop.time(), back=back))

    # ------------------------------------------------------------ after it

    def report(self) -> dict[str, Any]:
        """What came of it; docs/simulate.md says what each is."""
        plan, swarm = self.fleet.plan, self.swarm
        now, steps = swarm.loop.time(), len(self._ends)
        began = self._began_at if self._began_at is not None else now
        end = self._ends[-1] if self._ends else now
        lived = {node: (now if node.ended_at is None else node.ended_at) - node.began_at for node in swarm.nodes}
        peer_s = sum(lived.values())
        capacity = sum(s / swarm.slowdown[node.peer_id] for node, s in lived.items()) / max(now, 1e-9)
        best = capacity / (plan.stages * 3 * plan.forward_s)
        seconds = max(end - began, 1e-9)
        throughput = steps * plan.microbatches / seconds
        forwards: Counter[int] = Counter()
        busy = 0.0
        for node in swarm.nodes:
            for engine in node.engines.values():
                forwards.update(engine.device.forwards)
                busy += engine.device.busy_s
        counted = steps * plan.microbatches * plan.stages
        executed = sum(count for step, count in forwards.items() if step < steps)
        each = [after - before for before, after in zip([began, *self._ends], self._ends, strict=False)]
        step_s = statistics.fmean(each) if each else 0.0
        parts = {
            "compute": busy / max(peer_s, 1e-9),
            "averaging": self._seconds["averaging"] / max(peer_s, 1e-9),
            "barrier": self._seconds["barrier"] / max(peer_s, 1e-9),
        }
        # Where steps overlap devices compute meanwhile.
        parts["waiting"] = max(1 - sum(parts.values()), 0.0)
        weights = self._weights.total()
        return {
            **shape(self.fleet),
            "virtual_s": now,
            "wall_s": self._wall,
            "steps_done": steps,
            "steps_s": each,
            "step_s": step_s,
            "of_a_step": parts,
            "throughput": throughput,
            "optimal": best,
            "of_optimal": throughput / best if best else 0.0,
            "utilisation": parts["compute"],
            "executed": executed,
            "repairs": max(executed - counted, 0),
            "moves": swarm.counts["moved"],
            "faults": dict(sorted(self.done.items())),
            "alive": sum(node.up for node in swarm.nodes),
            "control_bytes_per_peer_s": sum(weights.values()) / max(peer_s, 1e-9),
            "control_bytes": {kind: round(size) for kind, size in sorted(weights.items())},
            "messages": dict(sorted(swarm.network.sent.items())),
            "losses": [swarm.reference.losses[step] / plan.microbatches for step in range(steps)],
        }
