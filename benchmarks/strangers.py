"""What lies cost a run: every lie that is known, told to a simulated stage for five minutes. Production classes.

    python benchmarks/strangers.py [--json FILE] [--rows NAME,...] [--parts rows,two,open] [--liars 1,2]
                                   [--seconds N] [--processes N]
    python benchmarks/strangers.py --rows usurps,forged-commit --json strangers.json
    python benchmarks/strangers.py --list

Two stages under the default timers on virtual time: one has three honest members and is joined by the liar (`NAME`) or
by two that collude (`NAME x2`), the other has two. Liars behave for 20 s, then lie for 300. Counted are the
steps that all honest members have applied by then, against those that they make in the same seconds without the
liar; whether each honest member had, at every version, the weights of one process; and the events of honest peers in
which each liar is named. The rows of `two` tell the same lie to a stage of two honest members, where no majority can
outvote a liar, and say what is lost. Those of `open` would be lies that are not withstood.

A lie about work that only audits show (`Lie.audited`) is applied before it is found. Then weights count as equal if
honest members have the same, and each step after the liar is shut out is what one process makes of the weights before;
`tainted` are the steps that are not.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import multiprocessing
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

from harness import Benchmark, listed, write
from strangers_lies import BESIDE, LIES, OPEN, STAGE, Lie

from swarmnet.ids import PeerId, RunId
from swarmnet.manifest.schema import Audits
from swarmnet.testing.plan import RUN, Plan
from swarmnet.testing.virtual_swarm import Broken, VirtualSwarm

LIE_FROM_S, LIE_FOR_S = 20.0, 300.0
LEAST = 0.8
"""Of the undisturbed steps: what three honest members must make."""

FORWARD_S, MICROBATCHES, STEPS_PER_S = 0.04, 4, 4
"""A step takes half a second. STEPS_PER_S: more than any run makes, so that none ends."""

SUMS_ONLY = Audits(microbatches=1e-9, contributions=0.0)
"""Sums are checked, and no work is looked at."""

STORM_PER_S = 3000
"""Messages a second, ten times what these members need: a run that comes to this is ended, for it never would."""

ORDINARY = frozenset({"committed", "ordered", "leader_stopped"})
"""Events that name members whoever they are: what each has contributed, is asked for, and who keeps after whom."""


@dataclass
class Row:
    """What came of one lie. broken: what ended the run early. longest_s: the longest time without a step."""

    name: str
    lie: str
    honest: int
    liars: int
    steps: int = 0
    undisturbed: int = 0
    weights_equal: bool = True
    named: bool = True
    named_in: dict[str, int] = field(default_factory=dict)
    longest_s: float = 0.0
    broken: str = ""
    tainted: int = 0
    wronged: int = 0
    """Honest members that were convicted."""
    blamed: int = 0
    """How often an honest member observed another one to be late."""

    @property
    def ratio(self) -> float:
        """Steps made, of those without the liar."""
        return self.steps / max(self.undisturbed, 1)

    @property
    def holds(self) -> bool:
        """What must hold of three honest members."""
        return self.ratio >= LEAST and self.weights_equal and self.named and not self.broken and not self.wronged

    @property
    def lost(self) -> str:
        """What the liar takes from the run, in words."""
        words = []
        if not self.weights_equal:
            words.append("the weights: they are not those of one process any more")
        if self.broken:
            words.append(f"the run: {self.broken}")
        elif self.steps == 0:
            words.append("every step: the run waits for as long as the lie is told")
        elif self.ratio < LEAST:
            words.append(f"{1 - self.ratio:.0%} of the steps, {self.longest_s:.0f} s without one at the longest")
        if not self.named:
            words.append("its name: no event says who it is")
        return "; ".join(words) or "nothing"


class Over(Exception):
    """The time is up."""


class Trial:
    """One run of honest members, with liars or without."""

    def __init__(
        self,
        honest: int,
        seconds: float,
        seed: int,
        stage: int,
        quiet: float,
        audited: Audits | None = None,
        run: RunId = RUN,
    ) -> None:
        self.seconds, self.quiet = seconds, quiet
        replicas = {BESIDE: 2, STAGE: 2, stage: honest}
        self.swarm = VirtualSwarm(
            Plan(
                stages=2,
                served=tuple((of,) for of in sorted(replicas) for _ in range(replicas[of])),
                microbatches=MICROBATCHES,
                forward_s=FORWARD_S,
                steps=int(STEPS_PER_S * (quiet + seconds)),
                audit=audited or SUMS_ONLY,
                run=run,
            ),
            seed,
        )
        self.swarm.exact = False  # what is held against the reference here is counted, and ends nothing
        self.swarm.hooks.append(self._look)
        self._late = audited is not None
        self.weights_equal = True
        self.wronged: set[PeerId] = set()
        self.blamed = Counter[PeerId]()  # how often honest members have observed these to be late
        self._seen: list[dict[int, int]] = [self._seeds()]  # weights of each stage, by version
        self._shut_out = 0  # the version at which an honest member last said that somebody is convicted
        self.first = self.last = 0
        self.longest_s = self._stepped_at = 0.0
        self.broken = ""

    @property
    def steps(self) -> int:
        """Versions that all honest members have gone through while the lie was told."""
        return max(self.last - self.first, 0)

    def run(self, lies: list[Lie]) -> None:
        """Live through it."""

        async def script(swarm: VirtualSwarm) -> None:
            for lie in lies:
                lie.begin()
                swarm.loop.start(lie._process, lie.live(self.quiet))
            await asyncio.sleep(self.quiet - swarm.loop.time())
            self.first = self.last = self._version()
            self._stepped_at = swarm.loop.time()
            sent = swarm.network.sent.total()
            while swarm.loop.time() < self.quiet + self.seconds:
                await asyncio.sleep(0.25)
                lied_s = swarm.loop.time() - self.quiet
                if (storm := swarm.network.sent.total() - sent) > STORM_PER_S * max(lied_s, 2.0):
                    self.longest_s = max(self.longest_s, swarm.loop.time() - self._stepped_at)
                    self.broken = f"a storm of {storm / lied_s:.0f} messages a second after {lied_s:.0f} s"
                    raise Over
                if self._version() > self.last:
                    self.last, self._stepped_at = self._version(), swarm.loop.time()
                self.longest_s = max(self.longest_s, swarm.loop.time() - self._stepped_at)
            raise Over

        try:
            self.swarm.run(until_s=2 * (self.quiet + self.seconds), script=script)
        except Over:
            pass
        except Broken as broken:
            self.broken = str(broken).splitlines()[0]
        except Exception as error:  # an honest peer has ended: that is what the row says
            self.broken = f"{type(error).__name__}: {error}"

    def named(self, liar: PeerId) -> Counter[str]:
        """Events of honest peers in which that name is."""
        return Counter(
            event for _, _, event, fields in self.swarm.events if event not in ORDINARY and _mentions(fields, liar)
        )

    def _version(self) -> int:
        return min(
            node.peer.replicas[stage].member.version if stage in node.peer.replicas else 0
            for node in self.swarm.honest
            for stage in node.stages
        )

    @property
    def tainted(self) -> list[int]:
        """Steps that one process would not have made of the weights before them."""
        found = list[int]()
        for step, (before, after) in enumerate(pairwise(self._seen)):
            weights = [before.get(stage) for stage in (BESIDE, STAGE)]
            if None in weights:
                continue
            right, _, _ = self.swarm.reference.advance(step, weights, weights)
            if any(right[stage] != value for stage, value in after.items()):
                found.append(step)
        return found

    def judge(self, liars: list[PeerId]) -> list[int]:
        """The tainted steps of a lie that is found late; they are to end when all honest members know the liar."""
        self.wronged -= set(liars)
        tainted = self.tainted if self._late else []
        self.weights_equal &= all(step <= self._shut_out + 1 for step in tainted)
        return tainted

    def _seeds(self) -> dict[int, int]:
        return dict(enumerate(self.swarm.reference.history[0]))

    def _look(self, peer: PeerId, event: str, fields: dict[str, object]) -> None:
        if event == "late" and peer in {node.peer_id for node in self.swarm.honest}:
            self.blamed[PeerId(str(fields["peer"]))] += 1
        if event == "convicted":
            self.wronged.add(fields["peer"])
            self._shut_out = self._version()
        if event not in ("applied", "synced"):
            return
        stage, version = fields["stage"], fields["version"]
        assert isinstance(stage, int) and isinstance(version, int)
        node = next(node for node in self.swarm.nodes if node.up and node.peer_id == peer)
        weights = node.engines[stage].weights
        if not self._late:
            self.weights_equal &= weights == self.swarm.reference.history[version][stage]
            return
        while len(self._seen) <= version:
            self._seen.append({})
        self.weights_equal &= self._seen[version].setdefault(stage, weights) == weights


def _mentions(value: object, name: str) -> bool:
    if isinstance(value, dict):
        return any(_mentions(each, name) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_mentions(each, name) for each in value)
    return name in value if isinstance(value, str) else False


@cache
def undisturbed(honest: int, seconds: float, seed: int, stage: int, quiet: float) -> int:
    """Steps that these members make by themselves."""
    trial = Trial(honest, seconds, seed, stage, quiet)
    trial.run([])
    assert not trial.broken and trial.weights_equal, trial.broken
    return trial.steps


def measure(
    name: str,
    *,
    honest: int = 3,
    liars: int = 1,
    seconds: float = LIE_FOR_S,
    quiet: float = LIE_FROM_S,
    seed: int = 1,
    run: RunId = RUN,
) -> Row:
    """Tell one lie; that of no name is to be honest. quiet: seconds before it. run: it decides who leads when."""
    kind = ({"": Lie} | LIES | OPEN)[name]
    trial = Trial(honest, seconds, seed, kind.stage, quiet, kind.audited, run)
    names = [PeerId(f"liar.{number}") for number in range(liars)]
    lies = [kind(trial.swarm, liar) for liar in names]
    for lie in lies:
        lie.friends = frozenset(names) - {lie.me}
    trial.run(lies)
    tainted = trial.judge(names)
    found = [trial.named(liar) for liar in names]
    row = Row(
        name if liars == 1 else f"{name} x{liars}",
        kind.words,
        honest,
        liars,
        trial.steps,
        undisturbed(honest, seconds, seed, kind.stage, quiet),
        trial.weights_equal,
        all(each["convicted"] for each in found) if kind.audited else all(found),
        dict(sum(found, Counter())),
        round(trial.longest_s, 1),
        trial.broken,
        len(tainted),
        len(trial.wronged),
        sum(count for peer, count in trial.blamed.items() if peer not in names),
    )
    trial.swarm.events.clear()
    gc.collect()
    return row


# ---------------------------------------------------------------- the table

Task = tuple[str, int, int, float]


PARTS = ("rows", "two", "open")


def tasks(names: list[str], seconds: float, liars: list[int]) -> dict[str, list[Task]]:
    """What is run for each part of the JSON: (lie, honest members, liars, seconds)."""
    closed = [name for name in names if name in LIES]
    return {
        "rows": [(name, 3, number, seconds) for number in liars for name in closed],
        "two": [(name, 2, 1, seconds) for name in closed],
        "open": [(name, 3, 1, seconds) for name in names if name in OPEN],
    }


def _run(task: Task) -> Row:
    logging.disable(logging.CRITICAL)
    gc.set_threshold(100_000, 50, 1000)  # a simulation makes little that is not freed by itself
    name, honest, liars, seconds = task
    return measure(name, honest=honest, liars=liars, seconds=seconds)


def as_json(row: Row, part: str) -> dict[str, Any]:
    """One row, as it is written."""
    told = {**asdict(row), "ratio": round(row.ratio, 3)}
    return {**told, "holds": row.holds} if part == "rows" else {**told, "lost": row.lost}


def print_row(row: Row, part: str) -> None:
    """One line of the table."""
    mark = {"rows": "ok  " if row.holds else "FAIL"}.get(part, "    ")
    named = ", ".join(f"{event} {count}" for event, count in sorted(row.named_in.items())) if row.named else "no"
    print(
        f"{mark} {row.name:30} {row.steps:5} /{row.undisturbed:5}  {row.ratio:5.2f}  {row.longest_s:6.1f} s  "
        f"{'equal' if row.weights_equal else 'DIFFER':7} {named[:60]}"
        + (f"  honest blamed {row.blamed}" if row.blamed else "")
        + (f"  [{row.broken[:90]}]" if row.broken else "")
        + (f"\n       lost: {row.lost}" if part != "rows" else ""),
        flush=True,
    )


def _wrong(typed: argparse.Namespace) -> str:
    """What is wrong with the flags, in one line."""
    if unknown := [name for name in typed.rows or () if name not in LIES | OPEN]:
        return f"no such lie: {unknown[0]}; --list names them"
    if not set(typed.parts) <= set(PARTS) or not set(typed.liars) <= {"1", "2"}:
        return f"--parts takes {','.join(PARTS)} and --liars takes 1,2"
    return "" if typed.seconds > 0 and typed.processes > 0 else "--seconds must be above 0 and --processes at least 1"


def main() -> None:
    parser = Benchmark(__doc__)
    parser.add_argument("--rows", type=listed(str), metavar="NAME,...", help="only these lies (see --list)")
    parser.add_argument("--parts", type=listed(str), default=",".join(PARTS), help="of the table: %(default)s")
    parser.add_argument(
        "--liars", type=listed(str), default="1,2", help="in a row of three honest members: %(default)s"
    )
    parser.add_argument("--seconds", type=float, default=LIE_FOR_S, help="of lying, virtual (%(default).0f)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="rows at a time (%(default)d)")
    parser.add_argument("--list", action="store_true", help="name the lies, and what each does")
    options = parser.asked(_wrong)
    if options.list:
        for name, kind in (LIES | OPEN).items():
            print(f"{name:24} {kind.words}{' (open)' if name in OPEN else ''}")
        return
    wanted = options.parts
    parts = tasks(options.rows or list(LIES | OPEN), options.seconds, [int(number) for number in options.liars])
    every_task = [(part, task) for part in wanted for task in parts[part]]
    told: dict[str, list[dict[str, Any]]] = {part: [] for part in parts}
    print(f"     {'lie':30} {'steps':>5} / alone  ratio  longest   weights named in")
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        rows = pool.imap(_run, [task for _, task in every_task])
        last = ""
        for number, ((part, _), row) in enumerate(zip(every_task, rows, strict=True), 1):
            if part != last:
                honest = "two" if part == "two" else "three"
                print(f"{part}: a stage of {honest} honest members")
                last = part
            print_row(row, part)
            told[part].append(as_json(row, part))
            print(f"{number} of {len(every_task)} runs", file=sys.stderr, flush=True)
            write(options.json, told)
    held = sum(row["holds"] for row in told["rows"])
    print(f"{held} of {len(told['rows'])} rows hold: {LEAST} of the undisturbed steps, weights equal, liar named")


if __name__ == "__main__":
    main()
