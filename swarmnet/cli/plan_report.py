"""How `swarmnet plan` says what came of it: a table, or JSON. Knows no machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from swarmnet.cli.line import MemberLine
from swarmnet.cli.plan_time import StepTime
from swarmnet.peer.memory_fit import PlanFit, judge, leaves_half, listed, room_of, with_slots
from swarmnet.plan.budget import StagePlan, groups, shown
from swarmnet.plan.plan import Setup

_HEAD = ("stage", "ranks", "weights", "grads", "sums", "optimizer", "each", "flying", "temporary", "peak", "host")


def table(plans: Sequence[StagePlan]) -> list[str]:
    """Lines of at most 100 columns, one per stage and kind of rank."""
    rows = [_HEAD]
    for plan in plans:
        for number, (ranks, rank) in enumerate(groups(plan.ranks)):
            rows.append(
                (
                    # A stage's later lines are of other ranks of it.
                    "" if number else str(plan.stage),
                    ranks,
                    shown(rank.parameters),
                    shown(rank.gradients),
                    shown(rank.sums),
                    "host" if rank.offloaded else shown(rank.optimizer),
                    shown(rank.passing.held),
                    str(plan.in_flight),
                    shown(rank.temporary(plan.in_flight)),
                    shown(rank.peak(plan.in_flight)),
                    "" if number else shown(plan.host.total),
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def record(plan: StagePlan, found: PlanFit) -> dict[str, Any]:
    """A stage as JSON, with what it means for a peer that serves it alone; sizes in bytes."""
    return {
        "stage": plan.stage,
        "layers": [plan.layers.start, plan.layers.stop],
        "in_flight": plan.in_flight,
        **_meaning(found),
        "ranks": [{**asdict(rank), "state": rank.state, "peak": rank.peak(plan.in_flight)} for rank in plan.ranks],
        "host": {**asdict(plan.host), "total": plan.host.total},
    }


def _meaning(found: PlanFit) -> dict[str, Any]:
    return {"fits": found.fits, "need": found.need, "room": found.room, "missing": found.missing}


def run_plan(
    setup: Setup, stages: Sequence[int], room: int | None, line: MemberLine | None = None, *, as_json: bool
) -> int:
    """Print the plan of one peer with `stages`; without any, of each stage of the run for a peer of its own.

    line: what members have, to say what a step takes, too.

    0: all fit, or nobody said in what; 1: something does not. Raises UsageError.
    """
    half, room, remarks = leaves_half(setup), room_of(setup, room), []
    peer: PlanFit | None = None
    if len(stages) > 1:
        # Stages of one peer share its slots, so they are chosen once.
        sized = with_slots(setup, stages, room)
        alone = [judge(sized, [stage], room) for stage in stages]
        peer = judge(sized, stages, room)
    else:
        every = stages or range(len(setup.specs))
        alone = [judge(with_slots(setup, [stage], room), [stage], room) for stage in every]
        if len(alone) > 1:
            remarks.append(f"each is for a peer of its own: --stage {listed(every[:2])} plans one peer with both")
    verdicts = alone if peer is None else [*alone, peer]
    if half and room is not None:
        remarks.append("a peer that chooses its slots leaves half of the machine's free memory to others")
    if setup.memory.compile:
        remarks.append("planned as if layers were not compiled: what the compiler takes and saves is not modelled")
    step = None if line is None else StepTime.of(setup.specs[0], setup.wire, line, slots=setup.slots)
    if as_json:
        records = [record(found.plans[0], found) for found in alone]
        together = None if peer is None else {"stages": list(stages), **_meaning(peer)}
        # Bytes, so that programs need not read units.
        print(json.dumps({"stages": records, "peer": together, "time": step and step.record()}, indent=2))
    else:
        paragraphs = [
            table([found.plans[0] for found in alone]),
            *(list(found.lines()) for found in verdicts),
            *([remark] for remark in remarks),
            *([] if step is None else [step.lines()]),
        ]
        print("\n\n".join("\n".join(lines) for lines in paragraphs))
    return int(not all(found.fits for found in verdicts))
