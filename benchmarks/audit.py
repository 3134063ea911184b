"""Whether liars are named, and what audits cost: every lie about work, told to a simulated swarm. Production classes.

    python benchmarks/audit.py [--json FILE] [--quick] [--rows NAME,...] [--parts rows,sentinel,btard]
                               [--seeds N] [--processes N] [--real]
    python benchmarks/audit.py --list

Two stages of five on virtual time learn a linear regression in integers (`audit_model`): 100 steps of 100
microbatches, 10 000 in all, unless SHAPES has another shape. One of the ten lies from the first step on (of `pair` two
of a stage, whom two operators run; of `kin` two, whom one runs). A row says after how many of its own microbatches the
last liar was named by an honest peer, whether that is within ln 100 / (q f) of them (q: the share that is audited, f:
the share that is false), how many honest peers were named, the held-out loss over that of honest peers (which the
reference has, to the bit), and which share of all compute went into audits.

What finds a lie (`found_by`) is one of five, and q is the rate of that one:

    microbatch    an audit of an index: its output, input gradient and loss are computed again
    contribution  an audit of a member's whole contribution to a step's sum, for who lies in weight gradients alone:
                  they are in no digest of an index. One audit covers a step, so the bound is met in own microbatches
                  only where a member counts one a step: that row has 460 steps of five microbatches. With n a step
                  the bound is n times as many
    sent          what a receiver shows to its sender's mates, beside what the sender has counted
    sum           the linear check of every sum, at once: counted are false parts, not microbatches
    jury          whoever says wrong of right work is outvoted when it is drawn to look: f = 1

Audits of the kind that a row is about have the rate RATE, those of the other kind half of it: an audit costs as much
as the microbatches that it computes again (INDEX_COST), so both take 1.5 % of compute, and cases take the rest.
`chance`: how likely a liar is named within the bound by `chance_named`, accomplices and all.

The parts `sentinel` and `btard` tell the same lies to what others do (`audit_baselines`): statistics of activations and
gradients; and CenteredClip with random validators, in floats. `--real` measures `swarmnet local`, and nothing
else: 3 stages of 4 processes of which one flips signs, one reduces falsely and one is lazy, 60 steps, q = 20 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from audit_baselines import ATTACKS, DETECTORS, Found
from audit_lies import LIES, FalseWork
from audit_model import Regression, held_out_loss
from harness import Benchmark, listed, write

from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Audits
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Broken, VirtualSwarm

STAGES, REPLICAS, MICROBATCHES, STEPS = 2, 5, 100, 100
QUICK_MICROBATCHES, QUICK_STEPS = 10, 6
FORWARD_S = 0.04

SHAPES = {"tenth": (100, 230), "weights": (5, 460)}
"""(microbatches, steps) where the bound takes more steps than STEPS, or is in another unit."""

RATE = 0.01

LATER = 20.0
"""A run that takes so many times what its compute takes will not end."""

INDEX_COST = 1.0
"""Of a microbatch, as the simulated engine charges it, though no weight gradient is of interest."""

PARTS = ("rows", "sentinel", "btard")


@dataclass
class Row:
    """What came of one lie. microbatches_until: None: some liar was never named; false parts where the sum finds it."""

    attack: str
    lie: str
    found_by: str
    seed: int
    liars: int
    microbatches: int
    """Of each step."""
    q: float
    f: float
    bound: int
    kin: int = 1
    """Liars that one operator runs."""
    chance: float = 1.0
    caught: bool = False
    microbatches_until: int | None = None
    own: int = 0
    """What the liar that was named last, or never, has counted in all."""
    lies: int = 0
    """False microbatches that all liars have counted; of a reducer, false parts."""
    false_bans: int = 0
    accused: int = 0
    loss_ratio: float = math.nan
    overhead: float = 0.0
    steps: int = 0
    broken: str = ""
    named_for: list[str] = field(default_factory=list)


def rates(row: Row) -> Audits:
    """What is computed again in the run of that row."""
    half = row.q / 2
    if row.found_by == "contribution":
        return Audits(microbatches=half, contributions=row.q)
    return Audits(microbatches=row.q, contributions=half)


class Trial:
    """One run, with liars or without."""

    def __init__(self, kind: type[FalseWork], row: Row, stage: int, *, microbatches: int, steps: int) -> None:
        self.row, number = row, row.liars
        served = tuple((of,) for of in range(STAGES) for _ in range(REPLICAS - number * (of == stage)))
        self.plan = Plan(
            stages=STAGES, served=served, microbatches=microbatches, steps=steps, forward_s=FORWARD_S, audit=rates(row)
        )
        self.swarm = VirtualSwarm(self.plan, row.seed, Regression)
        self.swarm.exact, self.swarm.detailed = False, False  # what liars do to the weights is counted
        self.swarm.hooks.append(self._on)
        names = [PeerId(f"liar.{each}") for each in range(number)]
        self.lies = [kind(self.swarm, name, stage) for name in names]
        if kind.one_operator:
            self.swarm.operators |= dict.fromkeys(names, 0)
        for lie in self.lies:
            lie.friends = frozenset(names) - {lie.me}
        self.own = dict.fromkeys(names, 0)
        self.named: dict[PeerId, int] = {}
        self.wronged: set[PeerId] = set()
        self._counted: set[tuple[int, int]] = set()
        self._audits: set[tuple[object, ...]] = set()

    def run(self) -> None:
        """Live through it, and fill in the row."""

        async def script(swarm: VirtualSwarm) -> None:
            for lie in self.lies:
                lie.begin()
                swarm.loop.start(lie._process, lie.live(0.0))

        compute_s = 3 * FORWARD_S * self.plan.microbatches * self.plan.steps / REPLICAS
        try:
            self.swarm.run(until_s=LATER * (compute_s + self.plan.steps), script=script)
        except Broken as broken:
            self.row.broken = str(broken).splitlines()[0]
        except Exception as error:  # an honest peer has ended: that is what the row says
            self.row.broken = f"{type(error).__name__}: {error}"
        self._judge()

    def _on(self, peer: PeerId, event: str, fields: dict[str, Any]) -> None:
        """An honest peer says something."""
        match event:
            case "committed" if (sum_of := (fields["stage"], fields["step"])) not in self._counted:
                self._counted.add(sum_of)
                for contributor, indexes in fields["contributions"]:
                    if contributor in self.own:
                        self.own[contributor] += len(indexes)
            case "audited":
                self._audits.add((peer, fields["step"], fields["index"], fields["peer"]))
            case "rechecked" if fields["peer"] not in self.own:
                self.row.accused += 1
            case "convicted" | "reducer_lied" | "pledge_lied" if (named := fields["peer"]) not in self.own:
                self.wronged.add(named)
            case "convicted" | "reducer_lied" | "pledge_lied" if named not in self.named:
                parts = sum(lie.lies_told for lie in self.lies if lie.me == named)
                self.named[named] = parts if self.row.found_by == "sum" else self.own[named]
                self.row.named_for.append(f"{event}: {fields.get('reason', fields.get('why', ''))}"[:120])

    def _judge(self) -> None:
        row, plan = self.row, self.plan
        last = max(self.own, key=lambda liar: self.named.get(liar, math.inf), default=None)
        if last is not None:
            row.own, row.microbatches_until = self.own[last], self.named.get(last)
            row.caught = row.microbatches_until is not None and row.microbatches_until <= row.bound
        row.lies = sum(lie.lies_told for lie in self.lies)
        row.false_bans = len(self.wronged)
        row.steps = sum(stage == STAGES - 1 for stage, _ in self._counted)
        share = plan.microbatches / REPLICAS
        audits = sum(share if index == -1 else INDEX_COST for _, _, index, _ in self._audits)
        row.overhead = audits / max(len(self._counted) * plan.microbatches, 1)
        # Weights of one version: that of the one who is last.
        at = [
            min((node.engines[stage] for node in self.swarm.honest if stage in node.stages), key=lambda e: e.version)
            for stage in range(STAGES)
        ]
        honest = self.swarm.reference.history[min(engine.version for engine in at)]
        row.loss_ratio = held_out_loss([engine.weights for engine in at]) / held_out_loss(honest)


def measure(
    attack: str, *, seed: int = 1, q: float = RATE, microbatches: int = MICROBATCHES, steps: int = STEPS
) -> Row:
    """Tell one lie; that of no name is to be honest."""
    kind = ({"": FalseWork} | LIES)[attack]
    f = kind.share or 1.0
    bound = math.ceil(math.log(100) / (q * f))
    row = Row(
        attack or "honest", kind.words, kind.found_by, seed, kind.together if attack else 0, microbatches, q, f, bound
    )
    row.kin = kind.together if kind.one_operator else 1
    if kind.found_by != "sum":
        row.chance = round(chance(row, bound), 4)
    # Liars of the first stage have no answers to lie in: only what they hand on, and what they sum.
    trial = Trial(kind, row, 0 if attack == "random" else STAGES - 1, microbatches=microbatches, steps=steps)
    trial.run()
    gc.collect()
    return row


def chance(row: Row, own: float) -> float:
    """How likely a liar of that row is named by the time that it has counted so many."""
    audit, finds = rates(row), row.found_by
    return chance_named(
        own,
        false=row.f,
        per_step=row.microbatches / REPLICAS,
        microbatches=0.0 if finds == "contribution" else audit.microbatches,
        contributions=audit.contributions,
        members=REPLICAS,
        liars=max(row.liars, 1),
        kin=row.kin,
    )


def chance_named(
    own: float,
    *,
    false: float,
    per_step: float,
    microbatches: float,
    contributions: float,
    members: int,
    liars: int,
    kin: int = 1,
) -> float:
    """How likely is a liar named by the time that it has counted `own` microbatches? docs/trust.md derives it.

    Args:
        false: share of them that are false.
        per_step: how many it counts in a step.
        microbatches, contributions: shares that are drawn, as in the manifest.
        members: contributors of its stage.
        liars: those of them that cover for each other, itself among them.
        kin: those liars whom its operator runs, itself among them; nobody honest is there.
    """
    # Half of the verifiers are Byzantine: a case is not decided.
    if 2 * liars >= members or members < 3:
        return 0.0
    # Each whom another runs draws alike, and tells if it is honest.
    honest = (members - liars) / (members - kin)
    unseen: float = (1.0 - microbatches) ** (honest * false * own)
    share_is_false = 1.0 - (1.0 - false) ** per_step
    drawn = 1.0 - (1.0 - contributions) ** honest
    no_share: float = (1.0 - drawn * share_is_false) ** (own / per_step)
    return 1.0 - unseen * no_share


# ---------------------------------------------------------------- real processes


def real(directory: Path, *, steps: int = 60) -> list[dict[str, Any]]:
    """`swarmnet local` with three liars among twelve: a row for each."""
    words = ["--stages", "3", "--replicas", "4", "--steps", str(steps), "--out", str(directory / "run")]
    words += ["--liars", "sign-flip:1,reducer:1,lazy:1"]
    words += ["--set", "audit.microbatches=0.2", "--set", "audit.contributions=0.2"]
    ran = subprocess.run([sys.executable, "-m", "swarmnet", "local", *words], capture_output=True, text=True)
    try:
        found = json.loads((directory / "run" / "summary.json").read_text("utf-8"))
    except OSError:
        raise SystemExit(f"swarmnet local wrote no summary:\n{ran.stdout}\n{ran.stderr}") from None
    audited = _audits_of(directory / "run" / "events.jsonl")
    rows = []
    for name, liar in found["liars"].items():
        rows.append(
            {
                "attack": liar["kind"],
                "peer": name,
                "named_at": liar["named_at"],
                "lies": liar["lies"],
                "caught": liar["named_at"] is not None,
                "false_bans": len(found["false_bans"]),
                "audits": audited,
                "oracle_max_difference": found.get("reference_max_difference"),
                "problem": found["problem"],
            }
        )
    return rows


def _audits_of(path: Path) -> int:
    with path.open(encoding="utf-8") as lines:
        return sum(json.loads(line).get("event") == "audited" for line in lines)


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Task:
    """One run of the table."""

    part: str
    attack: str
    seed: int
    microbatches: int
    steps: int


def _run(task: Task) -> Row | Found:
    logging.disable(logging.CRITICAL)
    gc.set_threshold(100_000, 50, 1000)  # a simulation makes little that is not freed by itself
    if task.part == "rows":
        return measure(task.attack, seed=task.seed, microbatches=task.microbatches, steps=task.steps)
    return DETECTORS[task.part](task.attack, seed=task.seed, microbatches=task.microbatches, steps=task.steps)


def print_row(part: str, row: Row | Found) -> None:
    """One line of the table."""
    until = "never" if row.microbatches_until is None else str(row.microbatches_until)
    print(
        f"{part:9} {row.attack:12} {row.found_by if isinstance(row, Row) else '':12} "
        f"caught: {'yes' if row.caught else 'no':4} after {until:>6} (bound {row.bound:5})  "
        f"false bans {row.false_bans:2}  loss {row.loss_ratio:8.3f}  audits {row.overhead:6.2%}"
        + (f"  [{row.broken[:80]}]" if isinstance(row, Row) and row.broken else ""),
        flush=True,
    )


def _wrong(typed: argparse.Namespace) -> str:
    """What is wrong with the flags, in one line."""
    if unknown := [name for name in typed.rows or () if name and name not in LIES]:
        return f"no such lie: {unknown[0]}; --list names them"
    if not set(typed.parts) <= set(PARTS):
        return f"--parts takes {','.join(PARTS)}"
    return "" if typed.seeds > 0 and typed.processes > 0 else "--seeds and --processes must be at least 1"


def main() -> None:
    parser = Benchmark(__doc__, quick=f"{QUICK_STEPS} steps of {QUICK_MICROBATCHES} microbatches")
    parser.add_argument("--rows", type=listed(str), metavar="NAME,...", help="only these lies (see --list)")
    parser.add_argument("--parts", type=listed(str), default=",".join(PARTS), help="of the table: %(default)s")
    parser.add_argument("--real", action="store_true", help="real processes instead: some minutes")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each lie (%(default)d)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="rows at a time (%(default)d)")
    parser.add_argument("--list", action="store_true", help="name the lies, and what each does")
    options = parser.asked(_wrong)
    if options.list:
        for name, kind in LIES.items():
            print(f"{name:12} {kind.words}")
        return
    if options.real:
        print_real(options.json)
        return
    names, parts = options.rows or ["", *LIES], options.parts
    size = (QUICK_MICROBATCHES, QUICK_STEPS) if options.quick else (MICROBATCHES, STEPS)
    tasks = [
        Task(part, name, seed, *(size if options.quick or part != "rows" else SHAPES.get(name, size)))
        for part in parts
        for name in names
        if part == "rows" or name in ATTACKS
        for seed in range(1, options.seeds + 1)
    ]
    told: dict[str, list[dict[str, Any]]] = {part: [] for part in parts}
    with multiprocessing.get_context("spawn").Pool(min(options.processes, len(tasks))) as pool:
        for number, (task, row) in enumerate(zip(tasks, pool.imap(_run, tasks), strict=True), 1):
            print_row(task.part, row)
            told[task.part].append({**asdict(row), "loss_ratio": _finite(row.loss_ratio)})
            print(f"{number} of {len(tasks)} runs", file=sys.stderr, flush=True)
            write(options.json, told)
    rows = told.get("rows", [])
    if lied := [row for row in rows if row["liars"]]:
        print(
            f"{sum(row['caught'] for row in lied)} of {len(lied)} lies are named within their bound, "
            f"{sum(row['false_bans'] for row in rows)} honest peers were"
        )


def print_real(file: Path | None) -> None:
    """The liars of a real swarm, one a line."""
    with tempfile.TemporaryDirectory() as directory:
        rows = real(Path(directory))
    for row in rows:
        print(
            f"real      {row['attack']:12} {row['peer']:12} named in step {row['named_at']} after {row['lies']} lies  "
            f"false bans {row['false_bans']}  audits {row['audits']}  loss off {row['oracle_max_difference']}"
            + (f"  [{row['problem']}]" if row["problem"] else "")
        )
    write(file, {"rows": rows})


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


if __name__ == "__main__":
    main()
