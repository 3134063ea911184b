"""Does anything grow in a swarm that is never left alone? Real processes, faults without end.

    python benchmarks/soak.py [--minutes N] [--json FILE] [--out DIR] [--quick]

2 stages x 2 replicas and a trainer on loopback (`swarmnet local`), a tiny model, log level info. About every ten
seconds one thing happens: a kill with a restart, a hang, a cut, a slow link, a farewell and return, a newcomer with an
identity of its own that leaves for good later. Kills and farewells spare the first replica of each stage, and the
trainer, so that these live for the whole time; hangs, cuts and slow links do not.

Every five seconds from the first step on, of every process below this one and of this one: resident memory, descriptors
and threads (/proc); tasks and allocated blocks of Python (a child says them itself); files in the peer's directory but
for orders. Of those that lived through the last two thirds (the first is the warm-up):

    ratio      median of the last third over median of the middle third: 1 is flat
    per hour   slope of a line through both, least squares

The worst of each kind is shown; this process is not among them, as it holds the curve and the audit of all steps.
And lines of log per second at level info, of the event that a process tells most often; steps done, and the rate of the
last third over the middle third's. The goal: ratios of at most 1.05 for memory and 1.1 for what is counted in tens; no
line more than once a second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from swarmnet.local import LocalOptions, run_local
from swarmnet.local.supervisor import Kit
from swarmnet.telemetry.events import EventReader

STAGES, REPLICAS = 2, 2
SETTINGS = (
    "training.sequence_length=32",
    "training.microbatch_size=2",
    "training.microbatches=4",
    "training.eval_every=50",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.head_dim=16",
    "model.num_heads=2",
)
MOST_STEPS_PER_S = 40
"""So many are ordered: the end is a matter of time."""
SAMPLE_S, FAULT_S, STAY_S = 5.0, 10.0, 45.0
"""Between two samples; between two faults, on average; how long a newcomer stays."""
WEIGHTS = {"kill": 35, "stop": 20, "partition": 12, "slow": 12, "drain": 8, "join": 13}
PHASES = ("", "forward", "backward", "averaging", "apply")
KINDS = ("memory_mib", "descriptors", "threads", "tasks", "blocks", "files")
OURS = "supervisor"
PAGE = os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------- faults


def schedule(seconds: float, seed: int) -> str:
    """A chaos file with faults for so long."""
    rng = random.Random(f"{seed}/soak")
    everybody = [f"s{stage}-r{number}" for stage in range(STAGES) for number in range(REPLICAS)]
    newcomers = [REPLICAS] * STAGES
    lines, at = [f"seed = {seed}"], 0.0

    def entry(kind: str, **fields: object) -> None:
        lines.append(f"[[{kind}]]")
        lines.extend(f"{key} = {json.dumps(value)}" for key, value in fields.items())

    while (at := at + rng.uniform(0.5, 1.5) * FAULT_S) < seconds:
        (kind,) = rng.choices([*WEIGHTS], [*WEIGHTS.values()])
        stage, now = rng.randrange(STAGES), round(at, 1)
        mortal = f"s{stage}-r{rng.randrange(1, REPLICAS)}"
        match kind:
            case "kill":
                phase = rng.choice(PHASES)
                within = {"phase": phase} if phase else {}
                entry(kind, peer=mortal, at_s=now, back_s=round(rng.uniform(0.3, 3.0), 1), **within)
            case "stop":
                entry(kind, peer=rng.choice(everybody), at_s=now, for_s=round(rng.uniform(0.5, 6.0), 1))
            case "partition":
                rng.shuffle(everybody)
                here = rng.randrange(1, len(everybody))
                groups = [everybody[:here], everybody[here:]]
                entry(kind, at_s=now, for_s=round(rng.uniform(0.5, 4.0), 1), between=groups)
            case "slow":
                slowed, for_s = [rng.choice([*everybody, "trainer-0"])], round(rng.uniform(1.0, 5.0), 1)
                entry(kind, at_s=now, for_s=for_s, peers=slowed, bytes_per_s=1e6, latency_s=0.05)
            case "drain":
                entry(kind, peer=mortal, at_s=now, back_s=round(rng.uniform(1.0, 3.0), 1))
            case "join":
                entry(kind, stage=stage, at_s=now)
                entry("drain", peer=f"s{stage}-r{newcomers[stage]}", at_s=now + STAY_S)
                newcomers[stage] += 1
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- arithmetic

Sample = tuple[float, float]
"""(Seconds since the beginning, value.)"""


@dataclass(frozen=True, slots=True)
class Trend:
    """Of one figure of one process. middle, last: medians of those thirds."""

    middle: float
    last: float
    per_hour: float

    @property
    def ratio(self) -> float:
        """1.0: flat, or nothing there."""
        return self.last / self.middle if self.middle else 1.0 if not self.last else float("inf")


def trend(samples: Sequence[Sample], seconds: float) -> Trend | None:
    """None of a process that did not live through the last two thirds of `seconds`."""
    late = [(at, value) for at, value in samples if at >= seconds / 3]
    middle = [value for at, value in late if at < 2 * seconds / 3]
    last = [value for at, value in late if at >= 2 * seconds / 3]
    whole = bool(samples) and samples[0][0] <= 0.4 * seconds and samples[-1][0] >= 0.9 * seconds
    if not (whole and len(middle) > 1 and len(last) > 1):
        return None
    slope, _ = statistics.linear_regression(*zip(*late, strict=True))
    return Trend(statistics.median(middle), statistics.median(last), 3600 * slope)


def third_rates(at: Sequence[float], seconds: float) -> float:
    """Of moments: how many are in the last third, over those in the middle third."""
    middle = sum(seconds / 3 <= each < 2 * seconds / 3 for each in at)
    return sum(2 * seconds / 3 <= each <= seconds for each in at) / middle if middle else float("nan")


def told(text: str) -> Counter[str]:
    """Lines of a log by what they say: the event's name."""
    return Counter(match[1] for match in re.finditer(r"^\d\d:\d\d:\d\d (?:[WEDC] )?(\S+)", text, re.MULTILINE))


# ---------------------------------------------------------------- looking


@dataclass(slots=True)
class Seen:
    """What was sampled: by process, by kind. A process is its name, program and number: one of a restart is another."""

    seconds: float = 0.0
    samples: defaultdict[str, dict[str, list[Sample]]] = field(
        default_factory=lambda: defaultdict(lambda: {kind: [] for kind in KINDS})
    )
    steps: dict[int, float] = field(default_factory=dict)
    """When each was first applied."""
    names: dict[int, str] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)

    def add(self, process: str, kind: str, at: float, value: float) -> None:
        """One figure of one moment."""
        self.samples[process][kind].append((at, value))

    def hear(self, event: Mapping[str, Any], at: float) -> None:
        """One line of the swarm's events.jsonl."""
        name = event["name"]
        self.events[event["event"]] += 1
        match event:
            case {"event": "started", "child": child, "pid": pid}:
                self.names[pid] = child
            case {"event": "applied", "step": step}:
                self.steps.setdefault(step, at)
            case {"event": "holding", "tasks": tasks, "blocks": blocks}:
                pids = [pid for pid, known in self.names.items() if known == name]
                self.add(f"{name}:{pids[-1]}", "tasks", at, tasks)
                self.add(f"{name}:{pids[-1]}", "blocks", at, blocks)


def below(root: int) -> dict[int, tuple[int, str]]:
    """`root` and the processes below it: (parent, program) by number."""
    found: dict[int, tuple[int, str]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                head, _, rest = (path / "stat").read_text().rpartition(")")
            except OSError:  # it has ended meanwhile
                continue
            found[int(path.name)] = int(rest.split()[1]), head.partition("(")[2]
    inside, more = {root}, True
    while more:
        fresh = {pid for pid, (parent, _) in found.items() if parent in inside} - inside
        inside, more = inside | fresh, bool(fresh)
    return {pid: found[pid] for pid in inside if pid in found}


def look(seen: Seen, at: float, peers: Path) -> None:
    """One sample of everything that is there."""
    processes = below(os.getpid())
    for pid, (parent, program) in processes.items():
        if pid == os.getpid():
            name = OURS
        elif pid in seen.names:
            name = seen.names[pid]
        else:
            name = f"{seen.names[parent]}/{program}" if parent in seen.names else "forker"
        key, place = f"{name}:{pid}", Path("/proc") / str(pid)
        try:
            resident = int((place / "statm").read_text().split()[1]) * PAGE
            descriptors, threads = len(os.listdir(place / "fd")), len(os.listdir(place / "task"))
        except OSError:  # it has ended meanwhile
            continue
        seen.add(key, "memory_mib", at, resident / 2**20)
        seen.add(key, "descriptors", at, descriptors)
        seen.add(key, "threads", at, threads)
        if pid in seen.names:
            held = [path for path in (peers / name).rglob("*") if "orders" not in path.parts]
            seen.add(key, "files", at, len(held))


class Watch(threading.Thread):
    """Samples until `seconds` have passed since the first step, then ends the run as Ctrl+C would."""

    def __init__(self, out: Path, seconds: float) -> None:
        super().__init__(name="watch", daemon=True)
        self.seen, self.ended = Seen(), False
        self._out, self._seconds, self._over = out, seconds, threading.Event()

    def run(self) -> None:
        began, reader = None, EventReader(self._out / "events.jsonl")
        while not self._over.wait(SAMPLE_S):
            at = time.monotonic()
            now = 0.0 if began is None else at - began
            for event in reader.read():
                self.seen.hear(event, now)
            if began is None:
                began = at if self.seen.steps else None
                continue
            self.seen.seconds = now
            look(self.seen, now, self._out / "peers")
            (self._out / "samples.json").write_text(json.dumps(self.seen.samples), encoding="utf-8")
            if now >= self._seconds:
                self.ended = True
                os.kill(os.getpid(), signal.SIGINT)
                return

    def stop(self) -> None:
        """The swarm has ended."""
        self._over.set()
        self.join()


# ---------------------------------------------------------------- what comes of it


def logs(peers: Path, seconds: float) -> dict[str, dict[str, Any]]:
    """Of each process: lines, and which it told most often, per second of the run. A restart writes on in its log."""
    found = {}
    for path in sorted(peers.glob("*/log.txt")):
        text = path.read_text(encoding="utf-8", errors="replace")
        most = told(text).most_common(1) or [("", 0)]
        found[path.parent.name] = {
            "lines_per_s": text.count("\n") / seconds,
            "bytes_per_hour": 3600 * path.stat().st_size / seconds,
            "most_told": most[0][0],
            "most_told_per_s": most[0][1] / seconds,
        }
    return found


def figures(seen: Seen, out: Path) -> dict[str, Any]:
    """Everything that the book and the terminal are told."""
    rows: list[dict[str, Any]] = []
    for process, kinds in sorted(seen.samples.items()):
        for kind, samples in kinds.items():
            if (found := trend(samples, seen.seconds)) is not None:
                values = {"middle": found.middle, "last": found.last, "ratio": found.ratio, "per_hour": found.per_hour}
                rows.append({"process": process.partition(":")[0], "kind": kind, **values})
    worst = {
        kind: max((row for row in rows if row["kind"] == kind and row["process"] != OURS), key=lambda row: row["ratio"])
        for kind in KINDS
        if any(row["kind"] == kind for row in rows)
    }
    told_most = logs(out / "peers", seen.seconds)
    loudest = max(told_most.items(), key=lambda pair: pair[1]["most_told_per_s"], default=("", {}))
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return {
        "minutes": seen.seconds / 60,
        "steps": len(seen.steps),
        "steps_per_s": len(seen.steps) / seen.seconds,
        "steps_ratio": third_rates([*seen.steps.values()], seen.seconds),
        "starts": len(seen.names),
        "faults": summary["faults"],
        "lost": summary["lost"],
        "doubled": summary["doubled"],
        "conflicts": len(summary["digest_conflicts"]),
        "crashes": summary["crashes"],
        "worst": worst,
        "loudest": {"process": loudest[0], **loudest[1]},
        "events_bytes_per_step": (out / "events.jsonl").stat().st_size / max(len(seen.steps), 1),
        "rows": rows,
    }


def show(found: Mapping[str, Any]) -> None:
    """The figures as a table."""
    print(
        f"{found['minutes']:.1f} min, {found['steps']} steps ({found['steps_per_s']:.2f} a second; last third "
        f"{found['steps_ratio']:.2f} of the middle third), {found['starts']} starts of processes, faults: "
        + ", ".join(f"{kind} {count}" for kind, count in found["faults"].items())
    )
    print(
        f"lost {found['lost']}, doubled {found['doubled']}, conflicts {found['conflicts']}, "
        f"crashes {len(found['crashes'])}"
    )
    print(f"{'process':24} {'kind':12} {'middle':>12} {'last':>12} {'ratio':>7} {'per hour':>12}")
    for row in found["rows"]:
        print(
            f"{row['process']:24} {row['kind']:12} {row['middle']:12.1f} {row['last']:12.1f} {row['ratio']:7.3f} "
            f"{row['per_hour']:+12.1f}"
        )
    for kind, row in found["worst"].items():
        print(f"worst {kind}: {row['ratio']:.3f} ({row['process']})")
    loudest = found["loudest"]
    print(
        f"told most often: {loudest['most_told']} of {loudest['process']}, {loudest['most_told_per_s']:.2f} a second; "
        f"{loudest['lines_per_s']:.2f} lines a second there"
    )


def main() -> int:
    """Run, print, write JSON if asked. 1 if the swarm itself failed, 130 after Ctrl+C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="how long (8; the book's figure is of 60)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the run's files there, and all samples")
    parser.add_argument("--quick", action="store_true", help="one minute")
    parser.add_argument("--seed", type=int, default=1, help="of the faults (1)")
    arguments = parser.parse_args()
    seconds = 60.0 * (1.0 if arguments.quick else arguments.minutes)
    if seconds <= 0:
        parser.error(f"--minutes must be more than 0, got {arguments.minutes:g}")
    with tempfile.TemporaryDirectory() as directory:
        out, chaos = arguments.out or Path(directory) / "out", Path(directory) / "chaos.toml"
        chaos.write_text(schedule(seconds, arguments.seed), encoding="utf-8")
        options = LocalOptions(
            stages=STAGES,
            replicas=REPLICAS,
            steps=int(seconds * MOST_STEPS_PER_S),
            out=out,
            data="corpus:small",
            set=SETTINGS,
            chaos=str(chaos),
            log_level="info",
        )
        watch = Watch(out, seconds)
        watch.start()
        try:
            code = run_local(options, Kit(console=Console(stderr=True, force_terminal=False)))
        finally:
            watch.stop()
        if not watch.ended:
            return code or 1
        found = figures(watch.seen, out)
    show(found)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(bool(found["lost"] or found["doubled"] or found["conflicts"] or found["crashes"]))


if __name__ == "__main__":
    sys.exit(main())
