"""Random faults for a simulated swarm: crashes with restarts, stops, and the faults of the links. All from one seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swarmnet.simulate.swarm import Node, Swarm


@dataclass(frozen=True, slots=True)
class Chaos:
    """Means, in virtual seconds, between two faults of a kind; 0 for never. until_s: quiet afterwards."""

    until_s: float = 30.0
    crash_s: float = 0.0
    stop_s: float = 0.0
    new_name: float = 0.2       # share of restarts under a new identity
    longest_stop_s: float = 20.0
    trainer_s: float = 0.0

    def script(self, seed: int) -> Callable[[Swarm], Awaitable[None]]:
        """What `Swarm.run` runs beside the swarm."""

        async def act(swarm: Swarm) -> None:
            rng = random.Random(seed)
            async with asyncio.TaskGroup() as group:
                if self.crash_s:
                    group.create_task(self._crash(swarm, rng))
                if self.stop_s:
                    group.create_task(self._stop(swarm, rng))
                if self.trainer_s:
                    group.create_task(self._trainers(swarm, rng))

        return act

    async def _crash(self, swarm: Swarm, rng: random.Random) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(rng.expovariate(1 / self.crash_s))
                if swarm.loop.time() > self.until_s or swarm.done:
                    return
                mortal = [node for node in swarm.nodes if node.up and not node.process.stopped and swarm.may_die(node)]
                if mortal:
                    node = rng.choice(mortal)
                    swarm.kill(node)
                    name = None if rng.random() < self.new_name else node.peer_id
                    group.create_task(self._restart(swarm, node.stages, name, rng.expovariate(1.0)))

    async def _restart(self, swarm: Swarm, stages: tuple[int, ...], name: str | None, after_s: float) -> None:
        await asyncio.sleep(after_s)
        swarm.add(stages, name)

    async def _stop(self, swarm: Swarm, rng: random.Random) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(rng.expovariate(1 / self.stop_s))
                if swarm.loop.time() > self.until_s or swarm.done:
                    return
                running = [node for node in swarm.nodes if node.up and not node.process.stopped and swarm.may_die(node)]
                if running:
                    node = rng.choice(running)
                    swarm.stop(node)
                    group.create_task(self._resume(swarm, node, rng.uniform(0.5, self.longest_stop_s)))

    async def _resume(self, swarm: Swarm, node: Node, after_s: float) -> None:
        await asyncio.sleep(after_s)
        swarm.resume(node)

    async def _trainers(self, swarm: Swarm, rng: random.Random) -> None:
        while True:
            await asyncio.sleep(rng.expovariate(1 / self.trainer_s))
            if swarm.loop.time() > self.until_s or swarm.done:
                return
            if swarm.trainers:
                trainer = rng.choice(sorted(swarm.trainers))
                swarm.kill_trainer(trainer)
                await asyncio.sleep(rng.expovariate(0.5))
                swarm.add_trainer(trainer if rng.random() < 0.5 else f"trainer.{rng.getrandbits(30)}")
