"""How `swarmnet plan` says what came of it: a table with advice, or JSON. Knows no machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from swarmnet.peer.fitting import with_slots
from swarmnet.peer.planning import Verdict, verdict
from swarmnet.stage.budget import groups, shown
from swarmnet.stage.plan import Setup

_HEAD = ("stage", "ranks", "weights", "grads", "sums", "optimizer", "each", "flying", "temporary", "peak", "host")


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """Lines of at most 100 columns: a line per stage and kind of rank, then what it means."""
    rows = [_HEAD]
    for found in verdicts:
        plan = found.plan
        for number, (ranks, rank) in enumerate(groups(plan.ranks)):
            passing = rank.passing
            rows.append((
                "" if number else str(plan.stage), ranks, shown(rank.parameters), shown(rank.gradients),
                shown(rank.sums), "host" if rank.offloaded else shown(rank.optimizer), shown(passing.held),
                str(plan.in_flight), shown(rank.peak(plan.in_flight) - rank.state - passing.held * plan.in_flight),
                shown(rank.peak(plan.in_flight)), "" if number else shown(plan.host.total),
            ))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for found in verdicts:
        lines += ["", *found.lines()]
    return lines


def record(found: Verdict) -> dict[str, Any]:
    """As JSON; sizes in bytes."""
    plan = found.plan
    return {
        "stage": plan.stage, "layers": [plan.layers.start, plan.layers.stop], "in_flight": plan.in_flight,
        "fits": found.fits, "need": found.need, "room": found.room,
        "ranks": [{**asdict(rank), "state": rank.state, "peak": rank.peak(plan.in_flight)} for rank in plan.ranks],
        "host": {**asdict(plan.host), "total": plan.host.total},
        "advice": [
            {"need": advice.need, "change": [option.words for option in advice.options],
             "new_manifest": any(option.of_run for option in advice.options)} for advice in found.advice
        ],
        "hint": "" if found.fits or found.advice else found.hint,
    }


def run_plan(setup: Setup, stages: Sequence[int], room: int | None, *, as_json: bool) -> int:
    """Print the plan. 0: all stages fit, or nobody said in what; 1: one does not. Raises UsageError."""
    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    verdicts = [verdict(with_slots(setup, stage, room), stage, room, tell) for stage in stages]
    text = json.dumps([record(each) for each in verdicts], indent=2) if as_json else "\n".join(table(verdicts))
    print(text)
    if setup.memory.compile and not as_json:
        print("\nplanned as if layers were not compiled: what the compiler takes and saves is not modelled")
    return int(not all(each.fits for each in verdicts))
