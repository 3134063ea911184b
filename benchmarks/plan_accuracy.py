"""How near `swarmnet plan`'s seconds a step are to what whole peers take on virtual time: twelve fleets.

    python benchmarks/plan_accuracy.py [--json FILE] [--quick] [--real]

Each fleet is priced by the formulas (`swarmnet/plan/cost.py`) and run with production peers, trainers and drivers at
these speeds (`swarmnet/simulate`): abstract compute, lines that are shared by all transfers, jitter. Bytes and bytes
per second are a hundredth of the real ones: no second changes, and no vector of that size is made. `ratio` is seconds
said over seconds simulated, in steady state; `bubble` the share of a step in which devices wait, simulated, beside
(P - 1) / (M + P - 1), the rule for P stages and M microbatches a replica where forward and backward alone fill the
pipeline (arXiv:2104.04473); ours moves weight passes into the gaps. `--json` writes `rows` and `worst`.

`--real`: `swarmnet local` of a small model instead, priced by layer times that are measured just before. Its processes
share the cores of this machine with whatever else runs: what as many busy processes get of them is measured before and
after each run, and is what the formulas are told.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from timeline import Timeline

from swarmnet.config.fleet import Members
from swarmnet.ids import PeerId
from swarmnet.local.prepare import with_data
from swarmnet.manifest.file import to_toml
from swarmnet.manifest.schema import Audits, Averaging, Cut, Data, Manifest, Model, Numerics, Training
from swarmnet.plan.cost import Load, Site, Way, averaging_round, cost
from swarmnet.plan.measure import measure as measure_layers
from swarmnet.plan.members import situated
from swarmnet.stage.passes import MemoryPolicy
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
    timeline = Timeline(swarm)

    async def narrow(swarm: VirtualSwarm) -> None:
        for node in swarm.nodes:
            swarm.limit(node, up_bytes_per_s=site.bytes_per_s / SMALLER, down_bytes_per_s=site.bytes_per_s / SMALLER)

    swarm.run(until_s=10_000.0, script=narrow)
    seconds = (timeline.applied_at(steps) - timeline.applied_at(first)) / (steps - first)
    return seconds, 1 - found.compute_s / seconds


REAL = ((1, 1, 8), (1, 2, 8), (2, 1, 8), (2, 2, 8), (3, 1, 12))
"""(stages, replicas, microbatches) of real processes."""

SKIPPED, STEPS, SPIN_S = 3, 9, 1.0


def spin(seconds: float, began: Any) -> float:
    """Compute for so long once all have started; what of it this process had of a core."""
    began.wait()
    begin, mine = time.perf_counter(), time.process_time()
    while time.perf_counter() < begin + seconds:
        pass
    return (time.process_time() - mine) / (time.perf_counter() - begin)


def cores_of(processes: int) -> float:
    """What so many busy processes get of this machine's cores together."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(processes) as pool:
        barrier = manager.Barrier(processes)
        return sum(pool.starmap(spin, [(SPIN_S, barrier)] * processes, chunksize=1))


def real(stages: int, replicas: int, microbatches: int) -> dict[str, object]:
    """One row: what is said for this machine, and what a local swarm takes there."""
    model = Model(
        vocab_size=256, hidden_size=256, intermediate_size=704, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=64
    )
    training = Training(
        total_steps=STEPS, microbatches=microbatches, microbatch_size=4, sequence_length=128, eval_every=0
    )
    asked = Manifest(
        name="benchmark",
        model=model,
        cut=Cut(stages=stages),
        data=Data(source="corpus:small"),
        training=training,
        numerics=Numerics(mode="deterministic"),
        averaging=Averaging(codec="small"),
    )
    manifest = with_data(asked, base=Path())
    torch.set_num_threads(1)
    spec, peers = manifest.of_stage(0), stages * replicas
    times = measure_layers(spec, device="cpu", memory=MemoryPolicy(), progress=lambda words: None)
    before = cores_of(1), cores_of(peers)
    with tempfile.TemporaryDirectory() as directory:
        file, out = Path(directory) / "run.toml", Path(directory) / "out"
        file.write_text(to_toml(manifest), encoding="utf-8")
        line = ["local", "--manifest", str(file), "--replicas", str(replicas), "--out", str(out)]
        subprocess.run([sys.executable, "-m", "swarmnet", *line], check=True, stdout=subprocess.DEVNULL)
        with (out / "loss.csv").open(encoding="utf-8") as rows:
            ends = [float(row["seconds"]) for row in csv.DictReader(rows)]
    one, all_of_them = (
        (first + second) / 2 for first, second in zip(before, (cores_of(1), cores_of(peers)), strict=True)
    )
    took_s = (ends[-1] - ends[SKIPPED]) / (len(ends) - 1 - SKIPPED)
    way = Way(manifest.wire.activations, manifest.wire.gradients, "small", "exact", 4)
    members = Members.alike(1, mbit=8000, tflops=times.flops_per_s * one / 1e12, round_trip_s=1e-3, device="cpu")
    found = situated(spec, members, way, times=times, counts=((replicas,),) * stages)
    assert found is not None
    said = cost(replace(found.load, crowd=peers * one / all_of_them), found.site, way)
    return {
        "fleet": f"real: {stages} stages, {replicas} replicas, {microbatches} microbatches",
        "said_s": said.step_s,
        "took_s": took_s,
        "ratio": said.step_s / took_s,
        "cores": all_of_them,
        "core": one,
        "times": asdict(times),
        "load": asdict(found.load),
    }


def main_real() -> list[dict[str, object]]:
    """Print a row for each local swarm."""
    print(f"{'local swarm':<44} {'said s':>8} {'took s':>8} {'ratio':>6} {'cores':>6}")
    rows = []
    for shape in REAL:
        row = real(*shape)
        rows.append(row)
        print(
            f"{row['fleet']:<44} {row['said_s']:>8.2f} {row['took_s']:>8.2f} {row['ratio']:>6.2f} {row['cores']:>6.2f}",
            flush=True,
        )
    return rows


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--quick", action="store_true", help="one fleet")
    parser.add_argument("--real", action="store_true", help="local swarms of real processes instead")
    typed = parser.parse_args()
    if typed.real:
        report(main_real(), typed.json)
        return
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
    if file:
        file.write_text(json.dumps({"rows": rows, "worst": worst}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
