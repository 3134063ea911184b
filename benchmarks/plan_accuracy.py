"""How near `swarmnet plan`'s seconds a step are to what whole peers take on virtual time: twelve fleets.

    python benchmarks/plan_accuracy.py [--json FILE] [--quick]

Each fleet is priced by the formulas (`swarmnet/plan/cost.py`) and run with production peers, trainers and drivers at
these speeds (`swarmnet/simulate`): abstract compute, lines that are shared by all transfers, jitter. Bytes and bytes
per second are a hundredth of the real ones: no second changes, and no vector of that size is made. `ratio` is seconds
said over seconds simulated, in steady state; `bubble` the share of a step in which devices wait, simulated, beside
(P - 1) / (M + P - 1), the rule for P stages and M microbatches a replica where forward and backward alone fill the
pipeline (arXiv:2104.04473); ours moves weight passes into the gaps. `--json` writes `rows` and `worst`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness import Benchmark, write

from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Audits
from swarmnet.plan.cost import Load, Site, Way, averaging_round, cost
from swarmnet.testing.links import Links
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm

SMALLER = 100
FAST, HOME, FAR = Site(1e9, 30e12, 0.001), Site(25e6, 30e12, 0.05), Site(62.5e6, 30e12, 0.2)


@dataclass(frozen=True, slots=True)
class Fleet:
    """A run and its members. speeds: of a stage's replicas, beside the fastest; empty: all alike."""

    name: str
    load: Load
    site: Site
    way: Way
    speeds: tuple[float, ...] = ()


def fleet(
    name: str,
    site: Site,
    stages: int,
    replicas: int,
    microbatches: int,
    *,
    parameters: float = 3e8,
    microbatch_s: float = 0.6,
    tokens: int = 1 << 11,
    sync: str = "exact",
    codec: str = "",
    boundary: str = "int8",
    slots: int = 0,
    speeds: tuple[float, ...] = (),
    stages_per_peer: int = 1,
) -> Fleet:
    """microbatch_s: of the fastest. slots: 0 for as many as the formulas say; 2048 elements cross a boundary for each
    token."""
    pace_s = microbatch_s * (len(speeds) / sum(speeds) if speeds else 1.0)
    load = Load(
        stages,
        replicas,
        microbatches,
        pace_s,
        tokens << 11,
        int(parameters),
        pace_s / 3,
        slowest_s=microbatch_s / min(speeds, default=1.0),
        stages_per_peer=stages_per_peer,
    )
    sums = codec or ("int8" if sync == "local" else "small")
    way = Way(boundary, boundary, sums, sync, slots, 10**9 if sync == "local" else 1)
    fed = replace(way, slots=slots or cost(load, site, replace(way, slots=1)).slots)
    return Fleet(name, load, site, fed, speeds)


FLEETS = (
    fleet("one stage, one room", FAST, 1, 3, 24, codec="int64"),
    fleet("deep pipeline", FAST, 8, 1, 32, sync="local", boundary="fp32"),
    fleet("four slots in eight stages", FAST, 8, 1, 32, sync="local", slots=4),
    fleet("two stages a peer", FAST, 4, 2, 32, stages_per_peer=2),
    fleet("home lines", HOME, 3, 2, 12),
    fleet("home lines, overlapped", HOME, 3, 2, 12, sync="overlap"),
    fleet("home lines, wide boundary", HOME, 2, 2, 16, tokens=1 << 13, parameters=5e7, boundary="bf16"),
    fleet("home lines, speeds 4:2:1", HOME, 2, 3, 48, sync="local", speeds=(1.0, 0.5, 0.25)),
    fleet("one of three 8 times slower", FAST, 2, 3, 32, speeds=(1.0, 1.0, 0.125), codec="int8"),
    fleet("far apart", FAR, 4, 2, 64, boundary="nf4"),
    fleet("far apart, overlapped, 3:1", FAR, 4, 2, 32, sync="overlap", speeds=(1.0, 0.33)),
    fleet("large stage, slow line", HOME, 2, 4, 16, parameters=5e8, codec="int8"),
)
QUICK = FLEETS[1:2]


def simulated(of: Fleet, *, steps: int = 4, first: int = 1) -> tuple[float, float]:
    """(seconds a step in steady state, share of them in which devices do nothing)."""
    load, site, way = of.load, of.site, of.way
    found = cost(load, site, way)
    held, share = load.stages_per_peer, load.microbatches / load.replicas
    crossing = found.boundary_bytes / share / held / min(2, max(load.stages - 1, 1))
    averaged = load.replicas > 1 and way.sync != "local"
    sent, round_s = averaging_round(load, site, way)
    vector = sent / 2 / ((load.replicas - 1) / load.replicas) / held if averaged else 0.0
    coding_s = round_s - sent / site.bytes_per_s
    peers = load.stages // held
    served = tuple(tuple(range(at, load.stages, peers)) for at in range(peers) for _ in range(load.replicas))
    fastest_s = load.microbatch_s * (sum(of.speeds) / len(of.speeds) if of.speeds else 1.0)
    plan = Plan(
        stages=load.stages,
        replicas=load.replicas,
        microbatches=load.microbatches,
        steps=steps,
        sync="overlap" if way.sync == "overlap" else "exact",
        slots=way.slots,
        forward_s=fastest_s / 3,
        averaging_s=max(coding_s, 0.001) if averaged else 0.001,
        boundary_elements=max(round(crossing / SMALLER / 4), 1),
        padding=round(vector / SMALLER / 8),
        # With jitter an average message takes half as long again.
        links=Links(latency_s=site.round_trip_s / 3),
        served=served,
        # What audits say is not smaller here, as payloads are.
        audit=Audits(microbatches=0.0, contributions=0.0),
    )
    swarm = VirtualSwarm(plan, seed=1)
    for number, stages in enumerate(served if of.speeds else ()):
        name = PeerId(f"s{'-'.join(map(str, stages))}.{number}")
        swarm.slowdown[name] = 1.0 / of.speeds[number % load.replicas]

    async def narrow(swarm: VirtualSwarm) -> None:
        for node in swarm.nodes:
            swarm.limit(node, up_bytes_per_s=site.bytes_per_s / SMALLER, down_bytes_per_s=site.bytes_per_s / SMALLER)

    swarm.run(until_s=10_000.0, script=narrow)
    seconds = (swarm.applied_at[steps] - swarm.applied_at[first]) / (steps - first)
    return seconds, 1 - found.compute_s / seconds


def measure(of: Fleet) -> dict[str, object]:
    """One row."""
    seconds, bubble = simulated(of)
    said, load = cost(of.load, of.site, of.way), of.load
    share = load.microbatches / load.replicas
    return {
        "fleet": of.name,
        "said_s": said.step_s,
        "simulated_s": seconds,
        "ratio": said.step_s / seconds,
        "bubble": bubble,
        "said_bubble": 1 - said.utilisation,
        "rule": (load.stages - 1) / (share + load.stages - 1),
        "load": asdict(load),
        "way": asdict(of.way),
    }


def main() -> None:
    """Print a row per fleet, and the worst ratio."""
    parser = Benchmark(__doc__, quick="one fleet")
    typed = parser.asked()
    fleets: Sequence[Fleet] = QUICK if typed.quick else FLEETS
    rows = []
    print(f"{'fleet':<28} {'said s':>8} {'took s':>8} {'ratio':>6} {'idle':>6} {'said':>6} {'rule':>6}")
    for each in fleets:
        row = measure(each)
        rows.append(row)
        print(
            f"{each.name:<28} {row['said_s']:>8.2f} {row['simulated_s']:>8.2f} {row['ratio']:>6.2f} "
            f"{row['bubble']:>6.1%} {row['said_bubble']:>6.1%} {row['rule']:>6.1%}",
            flush=True,
        )
    report(rows, typed.json)


def report(rows: Sequence[dict[str, object]], file: Path | None) -> None:
    """The worst ratio; all to `file`."""
    worst = max((row["ratio"] for row in rows), key=lambda ratio: max(ratio, 1 / ratio))  # type: ignore[type-var, operator]
    print(f"worst: {worst:.2f} of what it took")
    write(file, {"rows": rows, "worst": worst})


if __name__ == "__main__":
    main()
