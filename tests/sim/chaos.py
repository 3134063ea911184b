"""Random faults for a simulated swarm, all from one seed: a schedule that can be printed, replayed and shrunk.

Crashes with restarts, stops, cuts between groups of peers or one way, trainers that come and go, newcomers; ranks of a
mesh that die under a peer, which hears of it later; all
replicas of a stage at once, or everybody, who come back with their disks or without, as long as all that was on them is
on another disk too. Whom a fault strikes is a number in the schedule, resolved among those it may strike when its time
comes, so that a schedule from which faults were dropped still means something.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from swarmnet.ids import PeerId
from swarmnet.simulate.swarm import Node, Swarm
from swarmnet.state.rollback import Holding, newest_on_disk


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. pick: whom, in [0, 1). for_s: how long it lasts. variant: of the kind, in [0, 1)."""

    at_s: float
    kind: str
    pick: float
    for_s: float
    variant: float


@dataclass(frozen=True, slots=True)
class Chaos:
    """Means, in virtual seconds, between two faults of a kind; 0 for never. until_s: quiet afterwards."""

    until_s: float = 30.0
    crash_s: float = 0.0
    stop_s: float = 0.0
    trainer_s: float = 0.0
    cut_s: float = 0.0
    deafen_s: float = 0.0
    join_s: float = 0.0
    kill_stage_s: float = 0.0
    kill_all_s: float = 0.0
    ranks_s: float = 0.0
    longest_stop_s: float = 20.0
    longest_cut_s: float = 20.0
    longest_away_s: float = 40.0
    most_replicas: int = 4  # of a stage; newcomers beyond it stay away
    new_name: float = 0.2  # share of restarts under a new identity
    new_disk: float = 0.4  # share of those killed together who come back with an empty disk

    def schedule(self, seed: int) -> tuple[Fault, ...]:
        """What happens when, in order."""
        rng = random.Random(seed)
        lasting: dict[str, tuple[float, Callable[[], float]]] = {
            "crash": (self.crash_s, lambda: rng.expovariate(1.0)),
            "stop": (self.stop_s, lambda: rng.uniform(0.5, self.longest_stop_s)),
            "trainer": (self.trainer_s, lambda: rng.expovariate(0.5)),
            "cut": (self.cut_s, lambda: rng.uniform(0.5, self.longest_cut_s)),
            "deafen": (self.deafen_s, lambda: rng.uniform(0.5, self.longest_cut_s)),
            "join": (self.join_s, lambda: 0.0),
            "kill_stage": (self.kill_stage_s, lambda: rng.uniform(0.0, self.longest_away_s)),
            "kill_all": (self.kill_all_s, lambda: rng.uniform(0.0, self.longest_away_s)),
            "ranks": (self.ranks_s, lambda: rng.choice((0.0, rng.uniform(0.0, 0.3)))),
        }
        faults: list[Fault] = []
        for kind, (mean_s, length_s) in lasting.items():
            at = rng.expovariate(1 / mean_s) if mean_s else self.until_s
            while at < self.until_s:
                faults.append(Fault(round(at, 3), kind, rng.random(), round(length_s(), 3), rng.random()))
                at += rng.expovariate(1 / mean_s)
        return tuple(sorted(faults, key=lambda fault: fault.at_s))

    def script(self, faults: Sequence[Fault]) -> Callable[[Swarm], Awaitable[None]]:
        """What `Swarm.run` runs beside the swarm."""

        async def act(swarm: Swarm) -> None:
            away = _Away(swarm)
            async with asyncio.TaskGroup() as group:
                for fault in faults:
                    await asyncio.sleep(max(fault.at_s - swarm.loop.time(), 0.0))
                    if swarm.done and not away.peers:
                        return
                    group.create_task(_STRIKES[fault.kind](swarm, fault, self, away))

        return act


class _Away:
    """Who is dead and will be back, and what must not be lost with a disk."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self.peers: set[PeerId] = set()

    def may_lose_disk(self, node: Node) -> bool:
        """Is everything on it on the disk of another who is there or will be back?"""
        disks = self._swarm.disks
        others = [disks[peer].files for peer in self._known() if peer != node.peer_id]
        return all(
            any(place in files and files[place][0].header == info.header for files in others)
            for place, (info, _) in disks[node.peer_id].files.items()
        )

    def may_lose_memory(self) -> bool:
        """Can the run go on from disks, or from the seed, if everything that is in memory is lost?"""
        stages, disks = self._swarm.plan.stages, self._swarm.disks
        found = [
            Holding(peer, stage, disk=(version,)) for peer in self._known() for stage, version in disks[peer].files
        ]
        newest = max((r.member.version for n in self._swarm.nodes if n.up for r in n.peer.replicas.values()), default=0)
        begun = bool(found) or newest > self._swarm.plan.checkpoint_every
        return not begun or newest_on_disk(found, stages) is not None

    def kill(self, node: Node) -> None:
        self._swarm.kill(node)
        self.peers.add(node.peer_id)

    def back(self, node: Node, name: PeerId | None) -> None:
        self.peers.discard(node.peer_id)
        self._swarm.add(node.stages, name)

    def _known(self) -> set[PeerId]:
        return self.peers | {node.peer_id for node in self._swarm.nodes if node.up}


async def _crash(swarm: Swarm, fault: Fault, chaos: Chaos, away: _Away) -> None:
    node = _victim(swarm, fault)
    if node is not None:
        away.kill(node)
        await asyncio.sleep(fault.for_s)
        renamed = fault.variant < chaos.new_name and away.may_lose_disk(node)
        away.back(node, None if renamed else node.peer_id)


async def _kill_stage(swarm: Swarm, fault: Fault, chaos: Chaos, away: _Away) -> None:
    stage = int(fault.pick * swarm.plan.stages)
    await _kill_together(swarm, [node for node in swarm.nodes if node.up and stage in node.stages], fault, chaos, away)


async def _kill_all(swarm: Swarm, fault: Fault, chaos: Chaos, away: _Away) -> None:
    trainers = sorted(swarm.trainers)
    if not away.may_lose_memory():
        return
    for trainer in trainers:
        swarm.kill_trainer(trainer)
    await _kill_together(swarm, [node for node in swarm.nodes if node.up], fault, chaos, away)
    for trainer in trainers:
        swarm.add_trainer(trainer)


async def _kill_together(swarm: Swarm, victims: list[Node], fault: Fault, chaos: Chaos, away: _Away) -> None:
    """They come back one after the other."""
    if not away.may_lose_memory():
        return
    rng = random.Random(fault.variant)
    swarm.counts[fault.kind] += 1
    for node in victims:
        away.kill(node)
    await asyncio.sleep(fault.for_s)
    rng.shuffle(victims)
    for node in victims:
        if rng.random() < chaos.new_disk and away.may_lose_disk(node):
            swarm.disks[node.peer_id].files.clear()
        away.back(node, node.peer_id)
        await asyncio.sleep(rng.choice((0.0, rng.expovariate(1.0))))


async def _join(swarm: Swarm, fault: Fault, chaos: Chaos, away: _Away) -> None:
    stage = int(fault.pick * swarm.plan.stages)
    if len(swarm.replicas(stage)) < chaos.most_replicas:
        swarm.add((stage,))


async def _stop(swarm: Swarm, fault: Fault, chaos: Chaos, away: _Away) -> None:
    node = _victim(swarm, fault)
    if node is not None:
        swarm.stop(node)
        await asyncio.sleep(fault.for_s)
        if node.up:
            swarm.resume(node)


async def _trainer(swarm: Swarm, fault: Fault, chaos: Chaos, away: _Away) -> None:
    if swarm.trainers:
        trainer = _pick(sorted(swarm.trainers), fault.pick)
        swarm.kill_trainer(trainer)
        await asyncio.sleep(fault.for_s)
        swarm.add_trainer(trainer if fault.variant < 0.5 else f"trainer.{int(fault.variant * 1e9)}")


async def _cut(swarm: Swarm, fault: Fault, chaos: Chaos, away: _Away) -> None:
    """Any two groups; a third of the cuts run inside one stage, a third through all of them, the rest anywhere."""
    rng = random.Random(fault.pick)
    up = [node for node in swarm.nodes if node.up]
    if fault.variant < 1 / 3:
        stage = rng.randrange(swarm.plan.stages)
        up = [node for node in up if stage in node.stages]
    rng.shuffle(up)
    if fault.variant < 2 / 3:
        sides = up[::2], up[1::2]
    else:
        place = rng.randrange(len(up) + 1)
        sides = up[:place], up[place:]
    swarm.partition(*sides, directory=rng.random() < 0.3)
    await asyncio.sleep(fault.for_s)
    swarm.heal()


async def _deafen(swarm: Swarm, fault: Fault, chaos: Chaos, away: _Away) -> None:
    up = [node.peer_id for node in swarm.nodes if node.up]
    pairs = list(itertools.permutations(up, 2))
    if pairs:
        swarm.deafen(*_pick(pairs, fault.pick))
        await asyncio.sleep(fault.for_s)
        swarm.heal()


async def _ranks(swarm: Swarm, fault: Fault, chaos: Chaos, away: _Away) -> None:
    """A peer's ranks die and come back at once; it hears of it a little later. No state is lost."""
    up = [node for node in swarm.nodes if node.up and not node.process.stopped]
    if up:
        node = _pick(up, fault.pick)
        swarm.counts["ranks"] += 1
        node.engines[_pick(node.stages, fault.variant)].lose_ranks(told_after_s=fault.for_s)


_STRIKES = {
    "crash": _crash,
    "stop": _stop,
    "trainer": _trainer,
    "cut": _cut,
    "deafen": _deafen,
    "join": _join,
    "kill_stage": _kill_stage,
    "kill_all": _kill_all,
    "ranks": _ranks,
}


def _victim(swarm: Swarm, fault: Fault) -> Node | None:
    """A running replica without which every stage keeps its state; of a third of the faults, one that keeps."""
    mortal = [node for node in swarm.nodes if node.up and not node.process.stopped and swarm.may_die(node)]
    if fault.variant > 2 / 3:
        leaders = [
            node for node in mortal if any(r.member.oldest.leader is not None for r in node.peer.replicas.values())
        ]
        mortal = leaders or mortal
    return _pick(mortal, fault.pick) if mortal else None


def _pick(among: Sequence, number: float):
    return among[int(number * len(among))]


def shrink(faults: Sequence[Fault], fails: Callable[[Sequence[Fault]], bool]) -> list[Fault]:
    """The smallest schedule found that still fails: drop halves, then quarters, then single faults, as long as any can
    be spared (delta debugging, Zeller 2002)."""
    left = list(faults)
    size = max(len(left) // 2, 1)
    while left:
        spared = False
        for start in range(0, len(left), size):
            fewer = left[:start] + left[start + size :]
            if fails(fewer):
                left, spared = fewer, True
                break
        if not spared:
            if size == 1:
                break
            size //= 2
    return left
