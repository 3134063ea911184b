"""Random faults for a simulated swarm, all from one seed: a schedule that can be printed, replayed and shrunk.

Crashes with restarts, stops, cuts between groups of peers or one way, trainers that come and go, newcomers; ranks of a
mesh that die under a peer, which hears of it later; all replicas of a stage at once, or everybody, who come back with
their disks or without, as long as all that was on them is on another disk too. Whom a fault strikes is a number in the
schedule, resolved among those it may strike when its time comes, so that a schedule from which faults were dropped
still means something.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from going_back import GoingBack
from strike import watched

from swarmnet.ids import PeerId
from swarmnet.state.rollback import Holding, newest_on_disk
from swarmnet.testing.fault import Fault, Group, Join, Kill, KillAll, KillRank, OneWayCut, Partition, Stop
from swarmnet.testing.plan import Plan
from swarmnet.testing.schedule import FaultAction, FaultEnded, RestartAction
from swarmnet.testing.swarm import carry_out
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm


class Drawn(NamedTuple):
    """A fault of some kind, and what is drawn for its time. seconds: how long it lasts, or until its victim is back.
    pick: whom it strikes. variant: of the kind. Both in [0, 1)."""

    kind: str
    at_s: float
    seconds: float
    pick: float
    variant: float


@dataclass(frozen=True, slots=True)
class Chaos:
    """Means, in virtual seconds, between two faults of a kind; 0 for never. Quiet before from_s and after until_s."""

    from_s: float = 0.0
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

    def schedule(self, seed: int) -> tuple[Drawn, ...]:
        """What happens when, in order."""
        rng = random.Random(seed)

        def seconds(kind: str) -> float:
            match kind:
                case "crash":
                    return rng.expovariate(1.0)
                case "trainer":
                    return rng.expovariate(0.5)
                case "stop":
                    return rng.uniform(0.5, self.longest_stop_s)
                case "cut" | "deafen":
                    return rng.uniform(0.5, self.longest_cut_s)
                case "kill_stage" | "kill_all":
                    return rng.uniform(0.0, self.longest_away_s)
            return 0.0

        drawn: list[Drawn] = []
        for kind in ("crash", "stop", "trainer", "cut", "deafen", "join", "kill_stage", "kill_all", "ranks"):
            mean_s = getattr(self, f"{kind}_s")
            at = self.from_s + rng.expovariate(1 / mean_s) if mean_s else self.until_s
            while at < self.until_s:
                pick = rng.random()
                drawn.append(Drawn(kind, round(at, 3), max(round(seconds(kind), 3), 0.001), pick, rng.random()))
                at += rng.expovariate(1 / mean_s)
        return tuple(sorted(drawn, key=lambda each: each.at_s))

    def script(self, faults: Sequence[Drawn]) -> Callable[[VirtualSwarm], Awaitable[None]]:
        """What `VirtualSwarm.run` runs beside the swarm."""

        async def act(swarm: VirtualSwarm) -> None:
            away = _Away(swarm)
            async with asyncio.TaskGroup() as group:
                for drawn in faults:
                    await asyncio.sleep(max(drawn.at_s - swarm.loop.time(), 0.0))
                    if swarm.done and not away.peers:
                        return
                    group.create_task(_strike(swarm, drawn, self, away))

        return act


class _Away:
    """Who is dead and will be back, and what must not be lost with a disk."""

    def __init__(self, swarm: VirtualSwarm) -> None:
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

    def back(self, node: Node, name: PeerId | None) -> None:
        self.peers.discard(node.peer_id)
        self._swarm.add(node.stages, name)

    def _known(self) -> set[PeerId]:
        return self.peers | {node.peer_id for node in self._swarm.nodes if node.up}


async def _strike(swarm: VirtualSwarm, drawn: Drawn, chaos: Chaos, away: _Away) -> None:
    """Carry out one fault, to its end."""
    kind, at_s, seconds, pick, variant = drawn
    up = [node for node in swarm.nodes if node.up]

    def do(fault: Fault, name: str = "", **whom: int) -> None:
        carry_out(FaultAction(fault, -1, name, **whom), swarm)

    async def lasts(fault: Fault, name: str = "") -> None:
        do(fault, name)
        await asyncio.sleep(seconds)
        carry_out(FaultEnded(fault, name), swarm)

    match kind:
        case "crash" if node := _victim(swarm, drawn):
            do(Kill(at_s=at_s), node.peer_id)
            away.peers.add(node.peer_id)
            await asyncio.sleep(seconds)
            renamed = variant < chaos.new_name and away.may_lose_disk(node)
            away.back(node, None if renamed else node.peer_id)
        case "stop" if node := _victim(swarm, drawn):
            await lasts(Stop(at_s=at_s, for_s=seconds), node.peer_id)
        case "join":
            stage = int(pick * swarm.plan.stages)
            if len(swarm.replicas(stage)) < chaos.most_replicas:
                do(Join(at_s=at_s), f"s{stage}.{len(swarm.nodes)}", stage=stage)
        case "ranks" if able := [node for node in up if not node.process.stopped]:
            node = _pick(able, pick)
            swarm.counts["ranks"] += 1
            do(KillRank(at_s=at_s), node.peer_id, rank=int(variant * len(node.stages)))
        case "trainer" if swarm.trainers:
            trainer = _pick(sorted(swarm.trainers), pick)
            do(Kill(at_s=at_s), trainer)
            await asyncio.sleep(seconds)
            carry_out(RestartAction(trainer if variant < 0.5 else f"trainer.{int(variant * 1e9)}"), swarm)
        case "kill_stage" | "kill_all" if away.may_lose_memory():
            swarm.counts["kill_together"] += 1
            stage = int(pick * swarm.plan.stages) if kind == "kill_stage" else None
            trainers = sorted(swarm.trainers) if stage is None else []
            victims = [node for node in up if stage is None or stage in node.stages]
            do(KillAll(at_s=at_s, stage=stage))
            away.peers |= {node.peer_id for node in victims}
            await asyncio.sleep(seconds)
            await _come_back(swarm, victims, random.Random(variant), chaos, away)
            for trainer in trainers:
                carry_out(RestartAction(trainer), swarm)
        case "cut":
            rng = random.Random(pick)
            sides = _sides(swarm, up, variant, rng)
            if rng.random() < 0.3:
                swarm.directory.split()
            await lasts(Partition(at_s=at_s, for_s=seconds, between=sides))
        case "deafen" if len(up) > 1:
            sender, receiver = _pick([*itertools.permutations(up, 2)], pick)
            cut = {"senders": (sender.peer_id,), "receivers": (receiver.peer_id,)}
            await lasts(OneWayCut(at_s=at_s, for_s=seconds, **cut))


async def _come_back(swarm: VirtualSwarm, victims: list[Node], rng: random.Random, chaos: Chaos, away: _Away) -> None:
    """One after the other."""
    rng.shuffle(victims)
    for node in victims:
        if rng.random() < chaos.new_disk and away.may_lose_disk(node):
            swarm.disks[node.peer_id].files.clear()
        away.back(node, node.peer_id)
        await asyncio.sleep(rng.choice((0.0, rng.expovariate(1.0))))


def _sides(swarm: VirtualSwarm, up: list[Node], variant: float, rng: random.Random) -> tuple[Group, ...]:
    """Any two groups; a third of the cuts run inside one stage, a third through all of them, the rest anywhere."""
    if variant < 1 / 3:
        stage = rng.randrange(swarm.plan.stages)
        up = [node for node in up if stage in node.stages]
    rng.shuffle(up)
    names = [node.peer_id for node in up]
    if variant < 2 / 3:
        return tuple(names[::2]), tuple(names[1::2])
    place = rng.randrange(len(up) + 1)
    return tuple(names[:place]), tuple(names[place:])


def _victim(swarm: VirtualSwarm, drawn: Drawn) -> Node | None:
    """A running replica without which every stage keeps its state; of a third of the faults, one that leads."""
    mortal = [node for node in swarm.nodes if node.up and not node.process.stopped and swarm.may_die(node)]
    if drawn.variant > 2 / 3:
        leaders = [
            node for node in mortal if any(r.member.oldest.leader is not None for r in node.peer.replicas.values())
        ]
        mortal = leaders or mortal
    return _pick(mortal, drawn.pick) if mortal else None


def _pick(among: Sequence, number: float):
    return among[int(number * len(among))]


def shrink(faults: Sequence[Drawn], fails: Callable[[Sequence[Drawn]], bool]) -> list[Drawn]:
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


def play(plan: Plan, chaos: Chaos, seed: int, faults: Sequence[Drawn], *, end_s: float) -> VirtualSwarm:
    """One run under a schedule. It goes back at most twice for each time that many are killed or cut off."""
    swarm = watched(plan, seed)
    back = GoingBack(swarm)
    swarm.run(until_s=end_s, script=chaos.script(faults))
    struck = swarm.counts["kill_together"] + swarm.counts["partition"]
    assert len(back.restarts) <= 2 * struck, (struck, sorted(back.restarts))
    return swarm


def run_seed(plan: Plan, chaos: Chaos, seed: int, *, end_s: float = 600.0) -> VirtualSwarm:
    """One run under the seed's schedule. A failure names the fewest of its faults that still break it."""
    faults = chaos.schedule(seed)

    def fails(fewer: Sequence[Drawn]) -> bool:
        try:
            play(plan, chaos, seed, fewer, end_s=end_s)
        except Exception:  # whatever it is, it is what we look for
            return True
        return False

    try:
        return play(plan, chaos, seed, faults, end_s=end_s)
    except Exception as error:
        error.add_note(f"seed {seed}, shrunk from {len(faults)} faults to:")
        for drawn in shrink(faults, fails):
            error.add_note(f"    {drawn}")
        raise
