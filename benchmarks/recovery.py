"""How soon a swarm has made good what a crashed or hung replica had, and what that costs. Real processes.

    python benchmarks/recovery.py [--json FILE] [--crashes N] [--hangs N] [--quick]

3 stages x 3 replicas and a trainer on loopback, default timers. Replicas of the middle stage are struck in the middle
of a step, in forward and backward by turns: by SIGKILL, or by SIGSTOP for ten seconds. What the struck replica had of
that step, begun or summed, is lost with its accumulator.

    finished elsewhere   from the signal until another replica has summed that microbatch's gradient
    executions again     finished training forwards beyond the first of the lost microbatches: in the struck stage, and
                         in others

The goals: a crash within 1 s, a hang within 5 s (medians), and executions again in the struck stage alone. The whole
machine is busy with ten processes; the load average is printed beside the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from swarmnet.local import LocalOptions, run_local
from swarmnet.local.supervisor import Kit

STAGES, REPLICAS, STRUCK = 3, 3, 1
HANG_S = 10.0
SETTINGS = ("training.sequence_length=64", "training.microbatch_size=2", "training.eval_every=0")


@dataclass(frozen=True)
class Strike:
    """One signal and what came of it. finished_s: of each lost microbatch that another replica summed."""

    kind: str
    step: int
    lost: int
    finished_s: tuple[float, ...]
    again_here: int
    again_elsewhere: int


def chaos(crashes: int, hangs: int, gap: int) -> tuple[str, int]:
    """A chaos file that strikes every `gap` steps, and the steps it needs."""
    lines = ["seed = 1"]
    step = 3
    for number in range(crashes + hangs):
        kind = "kill" if number < crashes else "stop"
        lines += [
            f"[[{kind}]]",
            f"stage = {STRUCK}",
            f"step = {step}",
            f'phase = "{("forward", "backward")[number % 2]}"',
            'moment = "end"',
        ]
        if kind == "stop":
            lines.append(f"for_s = {HANG_S}")
        step += gap
    return "\n".join(lines) + "\n", step + gap


def strikes(records: list[dict[str, Any]]) -> Iterator[Strike]:
    """What the events say about each signal."""
    stage_of = {r["name"]: int(r["name"][1]) for r in records if r["name"].startswith("s")}
    worked = [r for r in records if r["event"] == "worked"]
    reached = {r["hold"]: r for r in records if r["event"] == "reached"}
    for signal in (r for r in records if r["event"] in ("killed", "stop") and r["name"] == "local"):
        victim = signal["child"]
        (held,) = [r for r in reached.values() if r["name"] == victim and 0 <= signal["t"] - r["t"] < 1.0]
        step, at = held["step"], signal["t"]
        lost = {r["index"] for r in worked if r["name"] == victim and r["step"] == step and r["t"] <= at}
        finished = {}
        for r in worked:
            if (
                r["phase"] == "counted"
                and r["step"] == step
                and r["index"] in lost
                and r["name"] != victim
                and stage_of[r["name"]] == STRUCK
                and r["t"] > at
            ):
                finished.setdefault(r["index"], r["t"] - at)
        forwards = Counter(
            (stage_of[r["name"]], r["index"])
            for r in worked
            if r["phase"] == "forward" and r["step"] == step and r["index"] in lost
        )
        again = Counter({stage: sum(forwards[stage, index] - 1 for index in lost) for stage in range(STAGES)})
        yield Strike(
            "crash" if signal["event"] == "killed" else "hang",
            step,
            len(lost),
            tuple(finished.values()),
            again[STRUCK],
            sum(count for stage, count in again.items() if stage != STRUCK),
        )


def summary(found: list[Strike], kind: str) -> dict[str, Any]:
    """The figures of one kind."""
    mine = [strike for strike in found if strike.kind == kind]
    times = sorted(seconds for strike in mine for seconds in strike.finished_s)
    return {
        "strikes": len(mine),
        "lost": sum(strike.lost for strike in mine),
        "finished_elsewhere": len(times),
        "median_s": round(statistics.median(times), 3) if times else None,
        "slowest_s": round(times[-1], 3) if times else None,
        "again_in_the_struck_stage": sum(strike.again_here for strike in mine),
        "again_in_other_stages": sum(strike.again_elsewhere for strike in mine),
    }


def main() -> int:
    """Run, print, and write JSON if asked. 1 if the swarm itself failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--crashes", type=int, default=10)
    parser.add_argument("--hangs", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="two of each")
    arguments = parser.parse_args()
    crashes, hangs = (2, 2) if arguments.quick else (arguments.crashes, arguments.hangs)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out"
        text, steps = chaos(crashes, hangs, gap=12)
        (Path(directory) / "chaos.toml").write_text(text)
        options = LocalOptions(
            stages=STAGES,
            replicas=REPLICAS,
            steps=steps,
            out=out,
            data="corpus:small",
            set=SETTINGS,
            chaos=f"{directory}/chaos.toml",
        )
        code = run_local(options, Kit(console=Console(stderr=True, force_terminal=False), trace=True))
        records = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    found = list(strikes(records))
    figures = {
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        "ok": code == 0,
        "crash": summary(found, "crash"),
        "hang": summary(found, "hang"),
    }
    print(f"load average {figures['load'][0]} before, {figures['load'][1]} after")
    for kind, goal in (("crash", 1.0), ("hang", 5.0)):
        row = summary(found, kind)
        print(
            f"{kind}: {row['strikes']} strikes lost {row['lost']} microbatches; finished elsewhere after "
            f"{row['median_s']} s (median; goal {goal:g} s), {row['slowest_s']} s (slowest); executions again: "
            f"{row['again_in_the_struck_stage']} in the struck stage, {row['again_in_other_stages']} in others"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures | {"strikes": [asdict(strike) for strike in found]}, indent=2))
    return code


if __name__ == "__main__":
    sys.exit(main())
