"""What fleet `swarmnet simulate` runs: its file, its machines drawn from it, and what happens to them.

Text in, `Fleet` out: a `Plan` for the swarm, the machine under each name ("s1-r0"), the matrix of latencies, and the
faults of docs/testing.md. Pure but for reading the file. Everything is drawn from the fleet's seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from swarmnet.config.check import SettingsLayer, check
from swarmnet.config.fleet import TFLOPS, DrawnMachine, FleetRegions, MachineKind, Members, read_fleet
from swarmnet.config.table import CliOption, Count, Positive, Table, says
from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Protocol
from swarmnet.peer.rebalance import Rules
from swarmnet.testing import fault
from swarmnet.testing.fault import Fault, Kill, KillRank, Slow
from swarmnet.testing.links import Links
from swarmnet.testing.plan import Plan

ABSTRACT_ABOVE = 600
"""Peers of a fleet above which rounds and directory are modelled, by default."""

MOST_PEERS, MOST_STAGES = 100_000, 1000

Amount = Annotated[float, Field(ge=0, le=1e15)]
WIDTH = 64
"""Elements that stand for what crosses a boundary. Bytes and bytes per second are all divided alike, so that they do:
no second changes, and no vector of the real size is made."""


class FleetRun(Table):
    """What is trained."""

    stages: Annotated[int, CliOption("N"), Field(ge=1, le=MOST_STAGES)] = says(4, "stages the model is cut into")
    microbatches: Annotated[int, CliOption("M"), Field(ge=1, le=16384)] = says(48, "of a step")
    steps: Annotated[Positive, CliOption("N")] = says(6, "of the run, if there is time")
    seconds: Annotated[float, CliOption("S"), Field(gt=0, le=1e7)] = says(600.0, "virtual seconds, at most")
    seed: Annotated[Count, CliOption("N")] = says(1, "draws machines, latencies, faults and jitter")
    sync: Annotated[Literal["exact", "overlap"], CliOption()] = says(
        "exact", 'wait for each sum ("exact"), or let steps overlap'
    )
    microbatch_s: Annotated[float, Field(gt=0, le=3600)] = says(
        0.6, "forward, backward and weight pass of a microbatch in one stage, at speed 1"
    )
    averaging_s: Amount = says(0.05, "codec and digest of a stage's sum")
    activation_bytes: Annotated[float, Field(ge=4, le=1e12)] = says(1e6, "across a boundary, each way, a microbatch")
    parameter_bytes: Amount = says(1e7, "of a stage's sum, as it travels")
    state_bytes: Amount = says(4e7, "of a stage's state, as a joiner fetches it")
    slots: Count = says(0, "microbatches in flight of a peer; 0: as many as it finds enough (docs/routing.md)")
    trainers: Positive = says(1, "who feed the run")
    routing: str = says("least_time", "the rule by which a replica is called")
    rebalance: bool = says(True, "peers move to the stage that needs them more")
    abstract: Annotated[Literal["auto", "on", "off"], CliOption()] = says(
        "auto", f"cheaper models of what many peers take too long for; auto: above {ABSTRACT_ABOVE} peers"
    )


class FleetChurn(Table):
    """Who comes and goes. A stage's last replica is never taken."""

    kill_every: Annotated[Amount, CliOption("S", default="20, without a file")] = says(
        0.0, "a replica is killed every so many virtual seconds; 0: none"
    )
    life_s: Annotated[Amount, CliOption("S", name="life")] = says(
        0.0, "seconds that a peer lives on average, exponentially; 0: for ever"
    )
    back_s: Annotated[float, Field(gt=0, le=3600)] = says(20.0, "after how long who was killed returns, on average")
    chaos: Annotated[Path | None, CliOption("FILE")] = says(
        None, "a trace: faults as in docs/testing.md, by at_s or step"
    )


class FleetFile(Table):
    """A fleet file; docs/simulate.md. `swarmnet plan` and `init` read its machines and regions."""

    run: FleetRun = FleetRun()
    peers: Annotated[int, CliOption("N"), Field(ge=1, le=MOST_PEERS)] = says(16, "peers in all, spread over the stages")
    machine: DrawnMachine = DrawnMachine()
    machines: tuple[MachineKind, ...] = ()
    regions: FleetRegions = FleetRegions()
    churn: FleetChurn = FleetChurn()
    timers: Protocol = Protocol()

    def drawn(self, here: str) -> int:
        """How many machines are not described: all of `peers` but `[[machines]]`. Raises UsageError."""
        described = sum(kind.count for kind in self.machines)
        if "peers" not in self.model_fields_set and described:
            return 0
        if described > self.peers:
            raise UsageError(f"{here}: peers = {self.peers}: [[machines]] are {described} already")
        return self.peers - described

    def members(self, here: str) -> Members:
        """All machines, those that are drawn as one kind. Raises UsageError."""
        drawn = self.drawn(here) if self.model_fields_set & {"peers", "machine", "machines"} else 0
        kinds = [*self.machines, *([self.machine.typical(drawn)] if drawn else [])]
        machines = [kind.model_dump() for kind in kinds]
        return check(Members, {"machines": machines, "regions": self.regions.model_dump()}, origin=lambda _: here)


@dataclass(frozen=True, slots=True)
class Machine:
    """One peer's."""

    speed: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    slots: int
    region: int
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet, drawn. Bytes are divided by `scale`."""

    plan: Plan
    machines: dict[str, Machine]
    """By name, such as "s1-r0"."""
    spare: tuple[Machine, ...]
    """Of those that join, in turn."""
    regions: tuple[str, ...]
    latencies_s: tuple[tuple[float, ...], ...]
    """One way, without jitter; by region."""
    faults: tuple[Fault, ...]
    seconds: float
    seed: int
    scale: float

    @property
    def sent(self) -> dict[str, int]:
        """How many machines each region has."""
        counts = dict.fromkeys(self.regions, 0)
        for machine in self.machines.values():
            counts[self.regions[machine.region]] += 1
        return counts


def read(path: Path | None, layers: Sequence[SettingsLayer] = ()) -> Fleet:
    """The fleet of a file and of what is said over it. Raises UsageError, one line."""
    # A fleet without a description is to show something.
    unsaid = [] if path is not None else [SettingsLayer("default", {"churn": {"kill_every": 20.0}})]
    return drawn(read_fleet(path, FleetFile, [*unsaid, *layers]), str(path) if path is not None else "this fleet")


def drawn(said: FleetFile, here: str) -> Fleet:
    """Draw machines, latencies and churn by the seed. Raises UsageError for a fleet that cannot run."""
    run, names = said.run, said.regions.all_names
    kinds = [kind for kind in said.machines for _ in range(kind.count)]
    peers = len(kinds) + said.drawn(here)
    if peers < run.stages:
        raise UsageError(f"{here}: {peers} peers cannot serve {run.stages} stages: one each, at least")
    for region in (said.machine.region, *(kind.region for kind in kinds)):
        if region and region not in names:
            raise UsageError(f"{here}: region {region!r} is none of {', '.join(names)}")
    rng = random.Random(f"{run.seed}/machines")
    all_kinds: list[DrawnMachine | MachineKind] = [*kinds, *[said.machine] * (peers - len(kinds))]
    machines = [_machine(said, kind, rng, here) for kind in all_kinds]
    spare = tuple(_machine(said, rng.choice(all_kinds), rng, here) for _ in range(max(peers // 4, 16)))
    placed = _placed(machines, run.stages)
    scale = max(run.activation_bytes / (4 * WIDTH), 1.0)
    faults = tuple(_scaled(each, scale) for each in _faults(said, placed, here))
    abstract = run.abstract == "on" or (run.abstract == "auto" and peers > ABSTRACT_ABOVE)
    plan = Plan(
        stages=run.stages,
        between_reads_s=2.0,
        microbatches=run.microbatches,
        steps=run.steps,
        trainers=run.trainers,
        sync=run.sync,
        slots=run.slots,
        output_cache_bytes=round(512e6 / scale) + (1 << 16),
        forward_s=run.microbatch_s / 3,
        averaging_s=max(run.averaging_s, 0.001),
        padding=max(round(run.parameter_bytes / scale / 8), 0),
        boundary_elements=max(round(run.activation_bytes / scale / 4), 1),
        state_bytes=round(run.state_bytes / scale),
        piece_bytes=max(round(run.state_bytes / scale / 16), 64),
        # Between peers with regions the latency is the regions'.
        links=Links(latency_s=said.regions.near_ms / 3000),
        protocol=said.timers,
        routing=run.routing,
        # A peer that reads only of its neighbour stages knows no better stage.
        rebalance=Rules() if run.rebalance and not abstract else None,
        abstract=abstract,
        served=tuple((fault.stage_of(name) or 0,) for name in placed),
    )
    return Fleet(
        plan,
        placed,
        spare,
        names,
        _latencies(said.regions, random.Random(f"{run.seed}/regions")),
        faults,
        run.seconds,
        run.seed,
        scale,
    )


def _between(rng: random.Random, span: Sequence[float]) -> float:
    return math.exp(rng.uniform(math.log(span[0]), math.log(span[-1])))


def _machine(said: FleetFile, kind: DrawnMachine | MachineKind, rng: random.Random, here: str) -> Machine:
    run, regions = said.run, said.regions.all_names
    if isinstance(kind, MachineKind):
        speed, up = kind.flops_per_s / (1e12 * TFLOPS["cuda"]), kind.bytes_per_s
        down, memory = up, float((kind.device_bytes or math.inf) * (kind.gpus if kind.device == "cuda" else 1))
    else:
        memory, speed = 1e9 * _between(rng, kind.memory_gb), _between(rng, kind.speed)
        up, down = (1e6 / 8 * _between(rng, span) for span in (kind.up_mbit, kind.down_mbit))
    left = memory - run.state_bytes - 2 * run.parameter_bytes
    if left < run.activation_bytes:
        raise UsageError(
            f"{here}: a machine of {memory / 1e9:.3g} GB holds no stage: state and sums take "
            f"{(run.state_bytes + 2 * run.parameter_bytes) / 1e9:.3g} GB, a microbatch {run.activation_bytes / 1e9:.3g}"
        )
    slots = int(min(run.slots or run.microbatches, left / run.activation_bytes))
    region = regions.index(kind.region) if kind.region else rng.randrange(len(regions))
    return Machine(speed, up, down, slots, region, memory)


def _placed(machines: Sequence[Machine], stages: int) -> dict[str, Machine]:
    """Each machine, the fastest first, in the stage with the least speed: as even as newcomers would choose."""
    rates, counts, found = [0.0] * stages, [0] * stages, {}
    for machine in sorted(machines, key=lambda machine: -machine.speed):
        # A stage without replicas first, however little the others have.
        stage = min(range(stages), key=lambda stage: (counts[stage] > 0, rates[stage]))
        found[f"s{stage}-r{counts[stage]}"] = machine
        rates[stage] += machine.speed
        counts[stage] += 1
    return dict(sorted(found.items(), key=lambda item: (fault.stage_of(item[0]), len(item[0]), item[0])))


def _latencies(regions: FleetRegions, rng: random.Random) -> tuple[tuple[float, ...], ...]:
    """One way, without jitter, by which an average message takes half as long again."""
    size = len(regions.all_names)
    rtt = [list(row) for row in regions.rtt_ms] or [[regions.near_ms] * size for _ in range(size)]
    if not regions.rtt_ms:
        for one in range(size):
            for other in range(one):
                rtt[one][other] = rtt[other][one] = _between(rng, regions.far_ms)
    return tuple(tuple(each / 3000 for each in row) for row in rtt)


def _faults(said: FleetFile, placed: dict[str, Machine], here: str) -> tuple[Fault, ...]:
    """The trace's, kills every so often, and kills by the peers' lives."""
    run, churn = said.run, said.churn
    found: list[Fault] = []
    if churn.chaos is not None:
        each = max(sum(fault.names(f"s{stage}", name) for name in placed) for stage in range(run.stages))
        found += fault.load(str(churn.chaos), stages=run.stages, replicas=each, steps=run.steps)
    for number, one in enumerate(found, 1):
        if one.phase is not None or isinstance(one, KillRank):
            what = "a phase" if one.phase is not None else "a rank"
            raise UsageError(f"{churn.chaos}: fault number {number} ({one}): {what} needs `swarmnet local --chaos`")
    found += fault.kill_every(churn.kill_every, churn.back_s)
    rng = random.Random(f"{run.seed}/churn")
    for name in placed if churn.life_s else ():
        at = rng.expovariate(1 / churn.life_s)
        while at < run.seconds:
            back = min(max(rng.expovariate(1 / churn.back_s), 0.1), 3600.0)
            found.append(Kill(peer=name, at_s=at, back_s=back))
            at += back + rng.expovariate(1 / churn.life_s)
    return tuple(found)


def _scaled(one: Fault, scale: float) -> Fault:
    return one.model_copy(update={"bytes_per_s": one.bytes_per_s / scale}) if isinstance(one, Slow) else one


def shape(fleet: Fleet) -> dict[str, Any]:
    """What it is, for a person and for JSON."""
    machines = fleet.machines.values()
    return {
        "peers": len(fleet.machines),
        "stages": fleet.plan.stages,
        "regions": fleet.sent,
        "microbatches": fleet.plan.microbatches,
        "steps": fleet.plan.steps,
        "speed": sum(machine.speed for machine in machines),
        "slots": fleet.plan.slots,
        "abstract": fleet.plan.abstract,
        "seed": fleet.seed,
    }


def calm(fleet: Fleet) -> Fleet:
    """The same fleet without its faults."""
    return replace(fleet, faults=())
