"""How `swarmnet plan` says what came of it: a table, or JSON. Knows no machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from swarmnet.cli.line import Lent
from swarmnet.cli.plan_time import StepTime
from swarmnet.peer.memory_fit import PlanFit, judge, listed, machine_fit, usable, with_slots
from swarmnet.plan.cost import LayerTimes
from swarmnet.plan.memory import Setup, StageMemory, shown

_HEAD = ("stage", "ranks", "weights", "grads", "sums", "optimizer", "each", "flying", "temporary", "peak", "host")


def table(plans: Sequence[StageMemory]) -> list[str]:
    """Lines of at most 100 columns, one per stage: of its rank that holds the most."""
    rows = [_HEAD]
    for plan in plans:
        rank, in_flight = plan.rank, plan.in_flight
        sizes = [rank.parameters, rank.gradients, rank.sums, rank.optimizer, rank.held]
        most = [rank.temporary(in_flight), rank.peak(in_flight), plan.host.total]
        rows.append((str(plan.stage), str(plan.ranks), *map(shown, sizes), str(in_flight), *map(shown, most)))
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def record(plan: StageMemory, found: PlanFit) -> dict[str, Any]:
    """A stage as JSON, with what it means for a peer that serves it alone; sizes in bytes."""
    return {
        "stage": plan.stage,
        "layers": [plan.layers.start, plan.layers.stop],
        "in_flight": plan.in_flight,
        **_meaning(found),
        "ranks": plan.ranks,
        "rank": {**asdict(plan.rank), "state": plan.rank.state, "peak": plan.rank.peak(plan.in_flight)},
        "host": {**asdict(plan.host), "total": plan.host.total},
    }


def _meaning(found: PlanFit) -> dict[str, Any]:
    return {
        "fits": found.fits,
        "need": found.need,
        "room": found.room,
        "missing": found.missing,
        "host_need": found.host_need,
        "host_room": found.host_room,
        "host_missing": found.host_missing,
    }


def run_plan(
    setup: Setup,
    stages: Sequence[int],
    room: int | None,
    host_room: int | None = None,
    lent: Lent | None = None,
    times: LayerTimes | None = None,
    *,
    as_json: bool,
) -> int:
    """Print the plan of one peer with `stages`; without any, of each stage of the run for a peer of its own.

    host_room: of a machine whose devices are GPUs. lent: what members have, to say what a step takes, too. times:
    measured.

    0: all fit, or nobody said in what; 1: something does not. Raises UsageError.
    """
    there, room, remarks = room, usable(setup, room), []
    peer: PlanFit | None = None
    if len(stages) > 1:
        # Stages of one peer share its slots, so they are chosen once.
        sized = with_slots(setup, stages, room)
        alone = [judge(sized, [stage], room, host_room) for stage in stages]
        peer = judge(sized, stages, room, host_room)
    else:
        every = stages or range(len(setup.specs))
        alone = [judge(with_slots(setup, [stage], room), [stage], room, host_room) for stage in every]
        if len(alone) > 1:
            remarks.append(f"each is for a peer of its own: --stage {listed(every[:2])} plans one peer with both")
    verdicts = alone if peer is None else [*alone, peer]
    if room != there:
        remarks.append("a peer that chooses its slots leaves half of the machine's free memory to others")
    if setup.memory.compile:
        remarks.append("planned as if layers were not compiled: what the compiler takes and saves is not modelled")
    step = None if lent is None else StepTime.of(setup.specs[0], setup.wire, lent, slots=setup.slots, times=times)
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


_FLEET_HEAD = ("stage", "machines", "here", "needs", "has", "beside", "has", "slots", "s/microbatch")


def run_fleet_plan(setup: Setup, lent: Lent, times: LayerTimes | None, *, as_json: bool) -> int:
    """Print which machines of a fleet hold which stages, how many are in each, and what a step takes.

    1: some stage fits no machine. Raises UsageError.
    """
    kinds, places = lent.members.machines, range(len(setup.specs))
    fits = [[machine_fit(setup, [stage], kind) for kind in kinds] for stage in places]
    able = [[bool(fit.slots) for fit in place] for place in fits]
    step = StepTime.of(setup.specs[0], setup.wire, lent, slots=setup.slots, times=times, fits=able)
    if as_json:
        found = [{"stage": stage, "fits": [asdict(fit) for fit in fits[stage]]} for stage in places]
        print(json.dumps({"stages": found, "time": step and step.record()}, indent=2))
        return int(step is None)
    rows = [_FLEET_HEAD]
    for stage in places:
        for number, (kind, fit) in enumerate(zip(kinds, fits[stage], strict=True)):
            mesh = f", {fit.shard if fit.shard != 'none' else 'tensor'}" * (kind.gpus > 1)
            rows.append(
                (
                    "" if number else str(stage),
                    f"{kind.count} x {kind.name}{mesh}",
                    "-" if step is None else str(step.found.counts[stage][number]),
                    shown(fit.need),
                    "" if kind.room is None else shown(kind.room),
                    shown(fit.host_need) if fit.host_need else "",
                    "" if kind.host_room is None else shown(kind.host_room),
                    str(fit.slots or "no"),
                    "" if number or step is None else f"{step.found.place_s[stage]:.3g}",
                )
            )
    lines = aligned(rows)
    if step is None:
        none = next((stage for stage in places if not any(able[stage])), None)
        lines += ["", "too few machines: some stage gets none" if none is None else f"stage {none} fits no machine"]
    else:
        lines += ["", *step.lines()]
    print("\n".join(lines))
    return int(step is None)
