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
from swarmnet.simulate.plan import Plan
from swarmnet.simulate.swarm import Node, VirtualSwarm
from swarmnet.state.rollback import Holding, newest_on_disk
from swarmnet.testing.fault import Duration, Fault, Join, Kill, KillRank, Stop


class KillTogether(Fault):
    """SIGKILL to all replicas of a stage, or to every process. They return one after the other."""

    everybody: bool
    back_s: Duration
    kind = "kill_together"


class LoseRanks(KillRank):
    """A peer's ranks die and come back at once; it hears of it a little later. No state is lost."""

    told_after_s: float


class KillTrainer(Fault):
    """SIGKILL to a trainer. It returns, or another one comes."""

    back_s: Duration
    kind = "kill_trainer"


class Cut(Fault):
    """Two groups of the peers that run then do not hear of each other."""

    for_s: Duration
    kind = "cut"


class Deafen(Fault):
    """What one peer sends does not reach another one."""

    for_s: Duration
    kind = "deafen"


class Drawn(NamedTuple):
    """A fault, and what is drawn for its time. pick: whom it strikes. variant: of the kind. Both in [0, 1)."""

    fault: Fault
    pick: float
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

    def schedule(self, seed: int) -> tuple[Drawn, ...]:
        """What happens when, in order."""
        rng = random.Random(seed)

        def draw(kind: str, at_s: float) -> Fault:
            match kind:
                case "crash":
                    return Kill(at_s=at_s, back_s=_long(rng.expovariate(1.0)))
                case "stop":
                    return Stop(at_s=at_s, for_s=_long(rng.uniform(0.5, self.longest_stop_s)))
                case "trainer":
                    return KillTrainer(at_s=at_s, back_s=_long(rng.expovariate(0.5)))
                case "cut":
                    return Cut(at_s=at_s, for_s=_long(rng.uniform(0.5, self.longest_cut_s)))
                case "deafen":
                    return Deafen(at_s=at_s, for_s=_long(rng.uniform(0.5, self.longest_cut_s)))
                case "join":
                    return Join(at_s=at_s)
                case "ranks":
                    return LoseRanks(at_s=at_s, told_after_s=round(rng.choice((0.0, rng.uniform(0.0, 0.3))), 3))
            back_s = _long(rng.uniform(0.0, self.longest_away_s))
            return KillTogether(at_s=at_s, everybody=kind == "kill_all", back_s=back_s)

        drawn: list[Drawn] = []
        for kind in ("crash", "stop", "trainer", "cut", "deafen", "join", "kill_stage", "kill_all", "ranks"):
            mean_s = getattr(self, f"{kind}_s")
            at = rng.expovariate(1 / mean_s) if mean_s else self.until_s
            while at < self.until_s:
                pick = rng.random()
                drawn.append(Drawn(draw(kind, round(at, 3)), pick, rng.random()))
                at += rng.expovariate(1 / mean_s)
        return tuple(sorted(drawn, key=_at_s))

    def script(self, faults: Sequence[Drawn]) -> Callable[[VirtualSwarm], Awaitable[None]]:
        """What `VirtualSwarm.run` runs beside the swarm."""

        async def act(swarm: VirtualSwarm) -> None:
            away = _Away(swarm)
            async with asyncio.TaskGroup() as group:
                for drawn in faults:
                    await asyncio.sleep(max(_at_s(drawn) - swarm.loop.time(), 0.0))
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

    def kill(self, node: Node) -> None:
        self._swarm.kill(node)
        self.peers.add(node.peer_id)

    def back(self, node: Node, name: PeerId | None) -> None:
        self.peers.discard(node.peer_id)
        self._swarm.add(node.stages, name)

    def _known(self) -> set[PeerId]:
        return self.peers | {node.peer_id for node in self._swarm.nodes if node.up}


async def _strike(swarm: VirtualSwarm, drawn: Drawn, chaos: Chaos, away: _Away) -> None:
    """Carry out one fault, to its end."""
    fault, pick, variant = drawn
    up = [node for node in swarm.nodes if node.up]
    match fault:
        case Kill(back_s=back_s) if node := _victim(swarm, drawn):
            away.kill(node)
            await asyncio.sleep(back_s)
            renamed = variant < chaos.new_name and away.may_lose_disk(node)
            away.back(node, None if renamed else node.peer_id)
        case Stop(for_s=for_s) if node := _victim(swarm, drawn):
            swarm.stop(node)
            await asyncio.sleep(for_s)
            if node.up:
                swarm.resume(node)
        case Join():
            stage = int(pick * swarm.plan.stages)
            if len(swarm.replicas(stage)) < chaos.most_replicas:
                swarm.add((stage,))
        case LoseRanks(told_after_s=told_after_s):
            if able := [node for node in up if not node.process.stopped]:
                node = _pick(able, pick)
                swarm.counts["ranks"] += 1
                node.engines[_pick(node.stages, variant)].lose_ranks(told_after_s=told_after_s)
        case KillTrainer(back_s=back_s) if swarm.trainers:
            trainer = _pick(sorted(swarm.trainers), pick)
            swarm.kill_trainer(trainer)
            await asyncio.sleep(back_s)
            swarm.add_trainer(trainer if variant < 0.5 else f"trainer.{int(variant * 1e9)}")
        case KillTogether(everybody=everybody, back_s=back_s) if away.may_lose_memory():
            trainers = sorted(swarm.trainers) if everybody else []
            for trainer in trainers:
                swarm.kill_trainer(trainer)
            stage = int(pick * swarm.plan.stages)
            victims = [node for node in up if everybody or stage in node.stages]
            await _kill_together(swarm, victims, back_s, random.Random(variant), chaos, away)
            for trainer in trainers:
                swarm.add_trainer(trainer)
        case Cut(for_s=for_s):
            _cut(swarm, up, variant, random.Random(pick))
            await asyncio.sleep(for_s)
            swarm.heal()
        case Deafen(for_s=for_s) if len(up) > 1:
            swarm.deafen(*_pick([(one.peer_id, two.peer_id) for one, two in itertools.permutations(up, 2)], pick))
            await asyncio.sleep(for_s)
            swarm.heal()


async def _kill_together(
    swarm: VirtualSwarm, victims: list[Node], back_s: float, rng: random.Random, chaos: Chaos, away: _Away
) -> None:
    """They come back one after the other."""
    swarm.counts["kill_together"] += 1
    for node in victims:
        away.kill(node)
    await asyncio.sleep(back_s)
    rng.shuffle(victims)
    for node in victims:
        if rng.random() < chaos.new_disk and away.may_lose_disk(node):
            swarm.disks[node.peer_id].files.clear()
        away.back(node, node.peer_id)
        await asyncio.sleep(rng.choice((0.0, rng.expovariate(1.0))))


def _cut(swarm: VirtualSwarm, up: list[Node], variant: float, rng: random.Random) -> None:
    """Any two groups; a third of the cuts run inside one stage, a third through all of them, the rest anywhere."""
    if variant < 1 / 3:
        stage = rng.randrange(swarm.plan.stages)
        up = [node for node in up if stage in node.stages]
    rng.shuffle(up)
    if variant < 2 / 3:
        sides = up[::2], up[1::2]
    else:
        place = rng.randrange(len(up) + 1)
        sides = up[:place], up[place:]
    swarm.partition(*sides, directory=rng.random() < 0.3)


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


def _at_s(drawn: Drawn) -> float:
    assert drawn.fault.at_s is not None
    return drawn.fault.at_s


def _long(seconds: float) -> float:
    return max(round(seconds, 3), 0.001)


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
    struck = swarm.counts["kill_together"] + swarm.counts["partitions"]
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
        for fault, pick, variant in shrink(faults, fails):
            error.add_note(f"    {fault.kind} {fault.model_dump(exclude_defaults=True)} {pick} {variant}")
        raise
