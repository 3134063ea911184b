"""How long compute waits for averaging, step by step ("exact") and where steps overlap, on virtual time.

    python benchmarks/overlap.py [--averaging SECONDS]... [--microbatches N] [--stages N] [--replicas N] [--png FILE]

Production peers over emulated compute and a network in memory (`swarmnet.simulate`): a forward takes 20 ms, a backward
and a weight pass as long; a round takes SECONDS beyond its messages and keeps no device busy. Printed per duration and
mode, in steady state: seconds per step, and the seconds a step in which a device has nothing to do while some call
waits for the next version of the weights, the mean of all devices and the longest. The picture shows two steps of both
modes: one row per device, a colour per step, rounds as lines below.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from timeline import Bar, Timeline, seconds_of

from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm

STEPS, FIRST, LAST = 9, 3, 8
"""Steps run, and the versions between which is measured."""

COLOURS = ("#4878a8", "#e49444", "#6a9f58", "#d1615d", "#85b6b2")


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. stalls_s: per device and step. bars: of the steady state, from `begin` on."""

    step_s: float
    stalls_s: list[float]
    begin: float
    bars: list[Bar]


def measure(plan: Plan) -> Measured:
    swarm = VirtualSwarm(plan, seed=1)
    timeline = Timeline(swarm)
    swarm.run(until_s=1000.0)
    begin, end = timeline.applied_at(FIRST), timeline.applied_at(LAST)
    steps = LAST - FIRST
    stalls = [seconds_of(timeline.stalls(node.peer_id, begin, end)) / steps for node in swarm.nodes]
    return Measured((end - begin) / steps, stalls, begin, [bar for bar in timeline.bars() if bar.stop > begin])


def draw(found: dict[str, Measured], path: Path) -> None:
    """Two steps of every mode."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    window_s = 2 * max(measured.step_s for measured in found.values())
    figure, panels = pyplot.subplots(len(found), 1, figsize=(12, 2.4 * len(found)), sharex=True, layout="constrained")
    for panel, (mode, measured) in zip(panels, found.items(), strict=True):
        peers = sorted({bar.peer for bar in measured.bars})
        for bar in measured.bars:
            start, stop = max(bar.start - measured.begin, 0.0), min(bar.stop - measured.begin, window_s)
            if start >= stop or bar.what == "held":
                continue
            row = peers.index(bar.peer)
            place = (row + 0.28, 0.12) if bar.what == "averaging" else (row - 0.3, 0.5)
            panel.broken_barh(
                [(start, stop - start)],
                place,
                facecolor=COLOURS[bar.step % len(COLOURS)],
                alpha={"forward": 0.6, "backward": 0.8}.get(bar.what, 1.0),
                linewidth=0,
            )
        waits = 1e3 * sum(measured.stalls_s) / len(measured.stalls_s)
        panel.set_title(f"{mode}: {measured.step_s:.2f} s a step, a device waits {waits:.0f} ms of it", loc="left")
        panel.set_yticks(range(len(peers)), peers)
        panel.invert_yaxis()
        panel.set_xlim(0.0, window_s)
    panels[-1].set_xlabel("seconds; a colour is a step, the thin lines are its rounds")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--averaging", type=float, action="append", metavar="SECONDS")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    durations = args.averaging or [0.1, 0.2, 0.4, 0.8, 1.6]
    compute_s = 3 * 0.02 * args.microbatches / args.replicas
    print(
        f"{args.stages} stages of {args.replicas}, {args.microbatches} microbatches: a device computes "
        f"{compute_s:.2f} s a step"
    )
    print(f"{'round':>7}  {'mode':<8} {'s/step':>7} {'stall mean':>11} {'stall max':>10}")
    for averaging_s in durations:
        found: dict[str, Measured] = {}
        for mode in ("exact", "overlap"):
            measured = found[mode] = measure(
                Plan(
                    stages=args.stages,
                    replicas=args.replicas,
                    microbatches=args.microbatches,
                    steps=STEPS,
                    averaging_s=averaging_s,
                    sync=mode,
                )
            )
            stalls = measured.stalls_s
            print(
                f"{averaging_s:6.2f}s  {mode:<8} {measured.step_s:7.3f} {sum(stalls) / len(stalls):10.3f}s "
                f"{max(stalls):9.3f}s",
                flush=True,
            )
        if args.png is not None and averaging_s == durations[len(durations) // 2]:
            draw(found, args.png)


if __name__ == "__main__":
    main()
