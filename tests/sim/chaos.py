"""Random faults for a simulated swarm, all from one seed: a schedule that can be printed, replayed and shrunk.

Crashes with restarts, stops, cuts between groups of peers or one way, trainers that come and go. Whom a fault strikes
is a number in the schedule, resolved among those it may strike when its time comes, so that a schedule from which
faults were dropped still means something.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from swarmnet.simulate.swarm import Node, Swarm


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
    longest_stop_s: float = 20.0
    longest_cut_s: float = 20.0
    new_name: float = 0.2       # share of restarts under a new identity

    def schedule(self, seed: int) -> tuple[Fault, ...]:
        """What happens when, in order."""
        rng = random.Random(seed)
        lasting: dict[str, tuple[float, Callable[[], float]]] = {
            "crash": (self.crash_s, lambda: rng.expovariate(1.0)),
            "stop": (self.stop_s, lambda: rng.uniform(0.5, self.longest_stop_s)),
            "trainer": (self.trainer_s, lambda: rng.expovariate(0.5)),
            "cut": (self.cut_s, lambda: rng.uniform(0.5, self.longest_cut_s)),
            "deafen": (self.deafen_s, lambda: rng.uniform(0.5, self.longest_cut_s)),
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
            async with asyncio.TaskGroup() as group:
                for fault in faults:
                    await asyncio.sleep(max(fault.at_s - swarm.loop.time(), 0.0))
                    if swarm.done:
                        return
                    group.create_task(_STRIKES[fault.kind](swarm, fault, self))

        return act


async def _crash(swarm: Swarm, fault: Fault, chaos: Chaos) -> None:
    node = _victim(swarm, fault)
    if node is not None:
        swarm.kill(node)
        await asyncio.sleep(fault.for_s)
        swarm.add(node.stages, None if fault.variant < chaos.new_name else node.peer_id)


async def _stop(swarm: Swarm, fault: Fault, chaos: Chaos) -> None:
    node = _victim(swarm, fault)
    if node is not None:
        swarm.stop(node)
        await asyncio.sleep(fault.for_s)
        swarm.resume(node)


async def _trainer(swarm: Swarm, fault: Fault, chaos: Chaos) -> None:
    if swarm.trainers:
        trainer = _pick(sorted(swarm.trainers), fault.pick)
        swarm.kill_trainer(trainer)
        await asyncio.sleep(fault.for_s)
        swarm.add_trainer(trainer if fault.variant < 0.5 else f"trainer.{int(fault.variant * 1e9)}")


async def _cut(swarm: Swarm, fault: Fault, chaos: Chaos) -> None:
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


async def _deafen(swarm: Swarm, fault: Fault, chaos: Chaos) -> None:
    up = [node.peer_id for node in swarm.nodes if node.up]
    pairs = list(itertools.permutations(up, 2))
    if pairs:
        swarm.deafen(*_pick(pairs, fault.pick))
        await asyncio.sleep(fault.for_s)
        swarm.heal()


_STRIKES = {"crash": _crash, "stop": _stop, "trainer": _trainer, "cut": _cut, "deafen": _deafen}


def _victim(swarm: Swarm, fault: Fault) -> Node | None:
    """A running replica without which every stage keeps its state; of a third of the faults, one that keeps."""
    mortal = [node for node in swarm.nodes if node.up and not node.process.stopped and swarm.may_die(node)]
    if fault.variant > 2 / 3:
        keepers = [node for node in mortal if any(r.member.keeper is not None for r in node.peer.replicas.values())]
        mortal = keepers or mortal
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
            fewer = left[:start] + left[start + size:]
            if fails(fewer):
                left, spared = fewer, True
                break
        if not spared:
            if size == 1:
                break
            size //= 2
    return left
