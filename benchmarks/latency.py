"""How busy devices are on lines of 500 Mbit/s, near and far: the layers of SWARM's Table 1, beside a relay that waits.

    python benchmarks/latency.py [--json FILE] [--quick]

SWARM Parallelism (ICML 2023, arXiv:2301.11913, Table 1) measured how busy a V100 is when a server receives a microbatch
of 1 x 512 tokens, computes forward or backward, and sends the result, one after the other. Its layers: `base` (d 768),
`xxlarge` (d 4096), `GPT-3` (d 12288), and `Ours`: three xxlarge layers a stage, with boundaries of 8 bits (16 else).
Seconds of a layer are its FLOPs at the rate for which `reference` gives the paper's figure at 0 ms.

    reference   trainer and server over the same network: a call for the forward, a call for the backward, no overlap
    ours        whole swarms on virtual time (`swarmnet/simulate`): four stages of two replicas, 100 microbatches a
                replica and step, automatic slots; fill, drain, optimizer and barrier count, bytes of sums do not (as
                there), from the second version on. `slots`: of the first stage
    bound       a line on which activation and gradient go each way lets a device do no more
    barrier     the part of a step between the last sum to be whole anywhere and the last optimizer step to begin

Then `Ours` with the bytes of its sums (`small`) where a step waits for them and where steps overlap; and, for 2 to 32
stages of two, round trips of the barrier and of the exchange of sums before it, from the last weight pass anywhere on.
Messages take 0.67 to 1.33 of half a round trip, and the last of many counts. Microbatches of layers but Ours: 40 a
replica. Bytes and bytes per second are a hundredth of the real ones: no second changes.
`--json` writes `rows`, `sums` and `depths`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from harness import Benchmark, write

from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Gradient, Packed, Process, Request
from swarmnet.plan.cost import Load, Site, Way, averaging_round
from swarmnet.testing.clock import SimulatedProcess, VirtualLoop
from swarmnet.testing.doubles import FakeService
from swarmnet.testing.links import Links
from swarmnet.testing.network import MemoryNetwork
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_device import Device, JobKind, JobTurn
from swarmnet.testing.virtual_swarm import VirtualSwarm
from swarmnet.transport import ReadPayload

TOKENS, LINE = 512, 500e6 / 8
ROUND_TRIPS_MS = (0, 10, 50, 100, 200)
STAGES, REPLICAS, SHARE, OTHERS_SHARE = 4, 2, 100, 40
SMALLER = 100
DEPTHS, DEPTH_ROUND_TRIPS_MS = (2, 4, 8, 16, 32), (10, 50, 200)


@dataclass(frozen=True, slots=True)
class LayerType:
    """A stage of SWARM's Table 1. published: device utilisation at `ROUND_TRIPS_MS`."""

    name: str
    width: int
    layers: int
    element_bytes: int
    published: tuple[float, ...]

    @property
    def crossing_bytes(self) -> int:
        """Of an activation, or of its gradient."""
        return TOKENS * self.width * self.element_bytes

    @property
    def flops(self) -> float:
        """Of a microbatch's forward and backward: 12 d^2 parameters a layer, and the scores."""
        return self.layers * 3 * (2 * 12 * self.width**2 * TOKENS + 4 * TOKENS**2 * self.width)

    @property
    def parameters(self) -> int:
        return self.layers * 12 * self.width**2

    @property
    def flops_per_s(self) -> float:
        """At which the reference is as busy at 0 ms as was published: it receives twice, and sends twice."""
        return self.flops / (4 * self.crossing_bytes / LINE * self.published[0] / (1 - self.published[0]))

    @property
    def seconds(self) -> float:
        return self.flops / self.flops_per_s

    @property
    def bound(self) -> float:
        """Utilisation at most: both payloads of a microbatch cross each direction of a line."""
        return min(self.seconds / (2 * self.crossing_bytes / LINE), 1.0)


LAYERS = (
    LayerType("base", 768, 1, 2, (0.180, 0.118, 0.0488, 0.0278, 0.0153)),
    LayerType("xxlarge", 4096, 1, 2, (0.321, 0.289, 0.201, 0.149, 0.101)),
    LayerType("GPT-3", 12288, 1, 2, (0.821, 0.793, 0.703, 0.602, 0.485)),
    LayerType("Ours", 4096, 3, 1, (0.895, 0.872, 0.795, 0.715, 0.592)),
)


def links_of(round_trip_ms: float) -> Links:
    """With jitter an average message takes half as long again."""
    return Links(latency_s=max(round_trip_ms, 0.1) / 3000)


class RelayedStage:
    """A server that receives, computes and sends, one call after the other."""

    def __init__(self, layer: LayerType) -> None:
        self.device = Device(layer.seconds / 3)
        self._answer = Packed("fp32", (layer.crossing_bytes // SMALLER,), bytes(layer.crossing_bytes // SMALLER))

    async def answer(self, caller: PeerId, request: Request, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
        """Even numbers are forwards, odd ones backwards with the weight gradient."""
        assert isinstance(request, Process)
        await payload()
        kind = JobKind.BACKWARD if request.index % 2 else JobKind.FORWARD
        seconds = self.device.forward_s * (1 + request.index % 2)
        await self.device.run(seconds, JobTurn(0, kind, 0, request.index))
        yield Gradient(0.0, 1, seconds, (self._answer,))


def reference(layer: LayerType, round_trip_ms: float, *, microbatches: int = 40) -> float:
    """Utilisation of a device whose microbatches a trainer relays, one call after the other."""
    loop = VirtualLoop()
    network = MemoryNetwork(loop, links_of(round_trip_ms), 1)
    server, trainer, stage = PeerId("server"), PeerId("trainer"), RelayedStage(layer)
    process = SimulatedProcess(server)
    network.attach(server, process, FakeService(stage.answer))
    network.attach(trainer, SimulatedProcess(trainer), FakeService())
    network.lines.limit(server, LINE / SMALLER, LINE / SMALLER)
    payload = (Packed("fp32", (layer.crossing_bytes // SMALLER,), bytes(layer.crossing_bytes // SMALLER)),)

    async def relay() -> float:
        transport = network.transport(trainer)
        for index in range(2 * microbatches):
            async for _ in transport.call(server, Process(0, 0, index), payload, deadline=1e9):
                pass
        return loop.time()

    asyncio.set_event_loop(loop)
    try:
        seconds = loop.run_until_complete(relay())
        return stage.device.busy_s / seconds
    finally:
        asyncio.set_event_loop(None)
        loop.close()


@dataclass(frozen=True, slots=True)
class Ours:
    """What a swarm did: the share of time in which devices compute, and seconds a step."""

    utilisation: float
    step_s: float
    exchange_s: float
    barrier_s: float
    slots: int


def ours(plan: Plan, *, first: int = 1) -> Ours:
    """Run it on lines of 500 Mbit/s, and measure from version `first` on."""
    swarm = VirtualSwarm(plan, seed=1)

    async def narrow(swarm: VirtualSwarm) -> None:
        for node in swarm.nodes:
            swarm.limit(node, up_bytes_per_s=LINE / SMALLER, down_bytes_per_s=LINE / SMALLER)

    swarm.run(until_s=1e6, script=narrow)
    begin, end = swarm.applied_at[first], swarm.applied_at[plan.steps]
    jobs = [job for node in swarm.nodes for engine in node.engines.values() for job in engine.device.log]
    busy = sum(min(job.stop, end) - max(job.start, begin) for job in jobs if job.stop > begin and job.start < end)
    exchange_s, barrier_s = 0.0, 0.0
    for step in range(first, plan.steps):
        of_step = [job for job in jobs if job.turn.step == step]
        counted = max(job.stop for job in of_step if job.turn.kind is JobKind.WEIGHTS)
        summed = max(at for at, _, event, fields in swarm.events if event == "averaged" and fields["step"] == step)
        exchange_s += summed - counted
        barrier_s += max(job.start for job in of_step if job.turn.kind is JobKind.STATE) - summed
    steps = plan.steps - first
    slots = next(replica.execution.slots for node in swarm.nodes for replica in node.peer.replicas.values())
    utilisation = busy / (end - begin) / len(swarm.nodes)
    return Ours(utilisation, (end - begin) / steps, exchange_s / steps, barrier_s / steps, slots)


def plan_of(layer: LayerType, round_trip_ms: float, *, share: int, sums: str = "") -> Plan:
    """sums: with the bytes of sums, "exact" or "overlap"."""
    padding, averaging_s = 0, 1e-4
    if sums:
        load = Load(
            STAGES, REPLICAS, share * REPLICAS, layer.seconds, TOKENS * layer.width, layer.parameters, layer.seconds / 3
        )
        way = Way("int8", "int8", "small", sums, 1)
        sent, round_s = averaging_round(load, Site(LINE, layer.flops_per_s), way)
        padding = round(sent / 2 / ((REPLICAS - 1) / REPLICAS) / SMALLER / 8)
        averaging_s = max(round_s - sent / LINE, 1e-4)
    return Plan(
        stages=STAGES,
        replicas=REPLICAS,
        microbatches=share * REPLICAS,
        # One step is measured of what is only shown beside Ours: a run takes half a minute.
        steps=4 if sums else 3 if layer.name == "Ours" else 2,
        sync="overlap" if sums == "overlap" else "exact",
        slots=0,
        forward_s=layer.seconds / 3,
        averaging_s=averaging_s,
        padding=padding,
        boundary_elements=layer.crossing_bytes // SMALLER // 4,
        links=links_of(round_trip_ms),
    )


def table(share: int, *, quick: bool) -> list[dict[str, object]]:
    """The layers of Table 1."""
    rows: list[dict[str, object]] = []
    print(f"{STAGES} stages of {REPLICAS}, M microbatches a replica and step, 500 Mbit/s")
    print(
        f"{'layer':<8} {'M':>4} {'rtt ms':>6} {'ours':>6} {'bound':>6} {'reference':>9} {'SWARM':>6} "
        f"{'barrier':>8} {'slots':>6}"
    )
    for layer in LAYERS[-1:] if quick else LAYERS:
        for round_trip_ms, published in zip(ROUND_TRIPS_MS, layer.published, strict=True):
            if quick and round_trip_ms not in (0, 200):
                continue
            each = share if layer.name == "Ours" else min(share, OTHERS_SHARE)
            found, relayed = ours(plan_of(layer, round_trip_ms, share=each)), reference(layer, round_trip_ms)
            barrier = found.barrier_s / found.step_s
            rows.append(
                {
                    "layer": layer.name,
                    "rtt_ms": round_trip_ms,
                    "utilisation": found.utilisation,
                    "reference": relayed,
                    "barrier": barrier,
                    "published": published,
                    "bound": layer.bound,
                    "slots": found.slots,
                    "microbatches": each,
                    "flops_per_s": layer.flops_per_s,
                }
            )
            print(
                f"{layer.name:<8} {each:>4} {round_trip_ms:>6} {found.utilisation:>6.1%} {layer.bound:>6.1%} "
                f"{relayed:>9.1%} {published:>6.1%} {barrier:>8.2%} {found.slots:>6}",
                flush=True,
            )
    return rows


def with_sums(share: int) -> list[dict[str, object]]:
    """Ours, with the bytes of its sums."""
    rows: list[dict[str, object]] = []
    print("\nOurs with the bytes of its sums:")
    for sync in ("exact", "overlap"):
        for round_trip_ms in (10, 200):
            found = ours(plan_of(LAYERS[-1], round_trip_ms, share=share, sums=sync), first=2)
            rows.append({"sync": sync, "rtt_ms": round_trip_ms, "utilisation": found.utilisation})
            print(f"{sync:<8} {round_trip_ms:>6} {found.utilisation:>6.1%}", flush=True)
    return rows


def depths(*, quick: bool) -> list[dict[str, object]]:
    """The barrier by the number of stages."""
    rows: list[dict[str, object]] = []
    print("\nexchange of sums without bytes, and barrier, in round trips (stages of 2, 2 S + 8 microbatches of 0.3 s)")
    print(f"{'stages':>6} {'rtt ms':>6} {'exchange':>8} {'barrier':>8} {'of a step':>9}")
    for stages in DEPTHS[:1] if quick else DEPTHS:
        for round_trip_ms in DEPTH_ROUND_TRIPS_MS:
            plan = Plan(
                stages=stages,
                replicas=2,
                microbatches=2 * stages + 8,
                steps=2,
                slots=0,
                forward_s=0.1,
                averaging_s=1e-4,
                links=links_of(round_trip_ms),
            )
            found = ours(plan)
            exchange, barrier = (1e3 * each / round_trip_ms for each in (found.exchange_s, found.barrier_s))
            share = found.barrier_s / found.step_s
            rows.append(
                {
                    "stages": stages,
                    "rtt_ms": round_trip_ms,
                    "exchange": exchange,
                    "round_trips": barrier,
                    "barrier": share,
                }
            )
            print(f"{stages:>6} {round_trip_ms:>6} {exchange:>8.2f} {barrier:>8.2f} {share:>9.2%}", flush=True)
    return rows


def main() -> None:
    """Print the tables."""
    parser = Benchmark(__doc__, quick="two rows of Ours with few microbatches, two stages")
    typed = parser.asked()
    rows = table(8 if typed.quick else SHARE, quick=typed.quick)
    sums = [] if typed.quick else with_sums(SHARE)
    found = {"rows": rows, "sums": sums, "depths": depths(quick=typed.quick)}
    write(typed.json, found)


if __name__ == "__main__":
    main()
