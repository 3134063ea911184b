"""What others do, on the simulator's lines and devices: seconds of one step, each as its papers and code describe it.

    swarm_like    SWARM's published code (arXiv:2301.11913): every tensor passes a trainer, so that a stage in the
                  middle moves five for a microbatch (input, output; input again, gradient, gradient), in fp32; then an
                  all-reduce in fp32. As many trainers as servers, each on a line of its own, and all microbatches in
                  flight at once. Its recomputed forwards are not charged. Without faults nobody would be banned.
    one_f_one_b   1F1B (arXiv:2006.09503): R static pipelines, each stage straight to the next, sends beside compute
    all_reduce    every member sends each other one its part, then the reduced part: nobody could do it sooner

Devices and lines are those that whole swarms run on (`swarmnet/simulate`); a message takes 0.67 to 1.33 of half a round
trip. No tensor is made: bytes only take their time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from swarmnet.ids import PeerId
from swarmnet.plan.cost import Load, Site
from swarmnet.testing.clock import VirtualLoop
from swarmnet.testing.links import Links
from swarmnet.testing.network import MemoryNetwork
from swarmnet.testing.virtual_device import Device, JobKind, JobTurn


class Place:
    """Machines on lines of one speed, on virtual time."""

    def __init__(self, loop: VirtualLoop, site: Site) -> None:
        # With jitter an average message takes half as long again.
        self.network = MemoryNetwork(loop, Links(latency_s=site.round_trip_s / 3), 1)
        self._rate = site.bytes_per_s

    def machine(self, name: str) -> PeerId:
        """A new one."""
        peer = PeerId(name)
        self.network.lines.limit(peer, self._rate, self._rate)
        return peer

    async def send(self, sender: PeerId, receiver: PeerId, num_bytes: float) -> None:
        """Return when it is there."""
        await self.network.lines.carry(sender, receiver, round(num_bytes))
        await asyncio.sleep(self.network.delay(sender, receiver))


def seconds_of(work: Callable[[Place], Coroutine[None, None, None]], site: Site) -> float:
    """Virtual seconds until the work is done."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(work(Place(loop, site)))
        return loop.time()
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def all_reduce(members: int, num_bytes: float, site: Site) -> float:
    """Of a vector of so many bytes."""

    async def work(place: Place) -> None:
        peers = [place.machine(f"m{number}") for number in range(members)]
        pairs = [(one, other) for one in peers for other in peers if one != other]
        for _ in ("scattered", "gathered"):
            await asyncio.gather(*(place.send(*pair, num_bytes / members) for pair in pairs))

    return seconds_of(work, site) if members > 1 else 0.0


def swarm_like(load: Load, site: Site, *, element_bytes: float = 4.0) -> float:
    """A step's microbatches."""
    crossing, last = element_bytes * load.boundary_elements, load.stages - 1

    async def work(place: Place) -> None:
        servers = [[place.machine(f"s{k}.{r}") for r in range(load.replicas)] for k in range(load.stages)]
        devices = {peer: Device(load.microbatch_s / 3) for stage in servers for peer in stage}
        trainers = [place.machine(f"t{number}") for number in range(load.stages * load.replicas)]

        async def microbatch(index: int) -> None:
            trainer = trainers[index % len(trainers)]
            way = [stage[index % load.replicas] for stage in servers]
            for k, server in enumerate(way):
                await place.send(trainer, server, crossing if k else 0)
                await devices[server].run(load.microbatch_s / 3, JobTurn(0, JobKind.FORWARD, -k, index))
                await place.send(server, trainer, crossing if k < last else 0)
            for k, server in reversed(list(enumerate(way))):
                await place.send(trainer, server, crossing * ((k > 0) + (k < last)))
                await devices[server].run(2 * load.microbatch_s / 3, JobTurn(0, JobKind.BACKWARD, -k, index))
                await place.send(server, trainer, crossing if k else 0)

        await asyncio.gather(*map(microbatch, range(load.microbatches)))

    return seconds_of(work, site) + load.update_s


def one_f_one_b(load: Load, site: Site, *, element_bytes: float = 2.0) -> float:
    """A step's microbatches."""
    crossing, stages, share = element_bytes * load.boundary_elements, load.stages, load.microbatches // load.replicas

    async def work(place: Place) -> None:
        peers = [place.machine(f"s{k}") for k in range(stages)]
        there = [[asyncio.Event() for _ in range(share)] for _ in range(stages)]
        back = [[asyncio.Event() for _ in range(share)] for _ in range(stages)]
        for event in (*there[0], *back[-1]):
            event.set()

        async def bring(k: int, other: int, arrived: asyncio.Event) -> None:
            await place.send(peers[k], peers[other], crossing)
            arrived.set()

        async def stage(k: int) -> None:
            device, warm, sends = Device(load.microbatch_s / 3), min(stages - 1 - k, share), []
            order = [(True, at) for at in range(warm)]
            for at in range(share - warm):
                order += [(True, warm + at), (False, at)]
            order += [(False, at) for at in range(share - warm, share)]
            for number, (forward, at) in enumerate(order):
                await (there if forward else back)[k][at].wait()
                seconds = load.microbatch_s / 3 * (1 if forward else 2)
                await device.run(seconds, JobTurn(0, JobKind.FORWARD, 0, number))
                other = k + 1 if forward else k - 1
                if 0 <= other < stages:
                    arrived = (there if forward else back)[other][at]
                    sends.append(asyncio.ensure_future(bring(k, other, arrived)))
            await asyncio.gather(*sends)

        await asyncio.gather(*map(stage, range(stages)))

    return seconds_of(work, site) + load.update_s
