"""`swarmnet plan`: what a peer's memory would hold, whether it fits, and if not what to change. Composes and prints."""

from __future__ import annotations

import bisect
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Cut
from swarmnet.mesh.layout import MeshLayout
from swarmnet.model.blocks import MeshSplit
from swarmnet.model.cut import cut_layers
from swarmnet.stage.advice import Advice, Option, advise
from swarmnet.stage.budget import GIB, MIB, StagePlan, groups, shown
from swarmnet.stage.canonical import Canonical
from swarmnet.stage.plan import Setup, least, plan_stage, rehearsals

RESERVE = {"cuda": GIB, "cpu": 256 * MIB}
"""What is kept free of each rank's memory: for torch itself, kernels, communication, and gaps between tensors."""

MOST_REHEARSALS = 80
"""A search for changes ends after so many, about half a minute."""

_SMALL_MEMO = 64 * MIB


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a stage fits. need: of one device, of the machine if ranks compute on the CPU. room: what it has, None if
    nobody said. hint: what to say if nothing is advised."""

    plan: StagePlan
    need: int
    room: int | None
    advice: tuple[Advice, ...] = ()
    hint: str = ""

    @property
    def fits(self) -> bool:
        """Does it? Also where nobody said how much there is."""
        return self.room is None or self.need <= self.room


def verdict(setup: Setup, stage: int, room: int | None, tell: Callable[[str], None] = lambda line: None) -> Verdict:
    """Plan a stage, and look for changes if it does not fit in `room` bytes. Raises UsageError: it cannot be split.

    tell: is told before a search, which may take half a minute.
    """
    plan = plan_stage(setup, stage)
    found = Verdict(plan, needed(plan, setup.layout), room)
    if found.fits or room is None:
        return found
    if _beside(setup) > room:
        return replace(found, hint=_too_little(setup, room))
    tell(f"stage {stage} does not fit as it is: trying what would make it fit")
    before = rehearsals()

    def need(options: tuple[Option, ...]) -> int | None:
        changed = setup
        try:
            for option in options:
                changed = option.change(changed)
            MeshSplit.of(changed.manifest, changed.layout)
        except UsageError:
            return None
        asked = [stage] if changed.manifest.cut == setup.manifest.cut else _some(changed.manifest.cut.stages)
        at_least = max(least(changed, each) for each in asked) + _reserve(changed.layout)
        if at_least > room:
            return at_least
        if rehearsals() - before >= MOST_REHEARSALS:
            return None
        return max(needed(plan_stage(changed, each), changed.layout) for each in asked)

    advice = tuple(advise(_options(setup), need, room=room))
    tried = "nothing tried makes it fit"
    if rehearsals() - before < MOST_REHEARSALS:
        tried += ", three changes at once included"
    return replace(found, advice=advice, hint=tried + _last_resort(setup, room))


def needed(plan: StagePlan, layout: MeshLayout) -> int:
    """What has to be there: the plan's peak, and a reserve."""
    return plan.device_peak + _reserve(layout)


def _reserve(layout: MeshLayout) -> int:
    return RESERVE[layout.kind] * (layout.ranks if layout.kind == "cpu" else 1)


def _beside(setup: Setup) -> int:
    """What no advice takes away, however small a stage is."""
    return _reserve(setup.layout) + (min(setup.memo_bytes, _SMALL_MEMO) if setup.layout.kind == "cpu" else 0)


def _too_little(setup: Setup, room: int) -> str:
    reserve = _reserve(setup.layout)
    if reserve > room:
        return f"no change makes it fit: the reserve for torch itself, {shown(reserve)}, alone is more than there is"
    return (f"no change makes it fit: the reserve for torch itself, {shown(reserve)}, and a memo of "
            f"{shown(_beside(setup) - reserve)} (caps.memo_bytes) are more than there is")


def _last_resort(setup: Setup, room: int) -> str:
    """More stages, unless stages of one layer have too much state, too."""
    finest = setup.manifest.model.num_layers
    if setup.manifest.cut.stages < finest:
        cut = replace(setup, manifest=setup.manifest.model_copy(update={"cut": Cut(stages=finest)}))
        if max(least(cut, stage) for stage in _some(finest)) + _reserve(setup.layout) <= room:
            return ": cut the run into more stages"
    return ": it takes a machine with more memory"


def _some(stages: int) -> list[int]:
    """The first, the last and one between: the largest of a cut is among them, or nearly."""
    return sorted({0, stages // 2, stages - 1})


def _options(setup: Setup) -> list[Option]:
    return [*_of_peer(setup), *_of_mesh(setup), *_of_run(setup)]


def _of_peer(setup: Setup) -> Iterator[Option]:
    on_gpu = setup.layout.kind == "cuda"
    if not on_gpu and setup.memo_bytes > _SMALL_MEMO:
        yield Option("memo", f"--set caps.memo_bytes={_SMALL_MEMO}", 3, False,
                     lambda s: replace(s, memo_bytes=_SMALL_MEMO))
    for slots, cost in ((setup.slots // 2, 1), (1, 3)):
        if 0 < slots < setup.slots:
            yield Option("slots", f"--slots {slots}", cost, False, lambda s, n=slots: replace(s, slots=n))
    for policy, cost in (("selective", 2), ("recompute_layers", 2), ("recompute", 4), ("offload", 4)):
        if policy != setup.memory.activations and (on_gpu or policy != "offload"):
            yield Option("activations", f"--activations {policy}", cost, False, lambda s, p=policy: replace(
                s, memory=replace(s.memory, activations=p)))
    if on_gpu and not setup.memory.offload_optimizer:
        yield Option("optimizer", "--set memory.offload_optimizer=true", 5, False,
                     lambda s: replace(s, memory=replace(s.memory, offload_optimizer=True)))


def _of_mesh(setup: Setup) -> Iterator[Option]:
    layout = setup.layout
    if layout.kind != "cuda":                            # more ranks of one machine take more of its memory
        return
    for ranks in (2, 4, 8):
        if ranks <= layout.ranks:
            continue
        tensor = MeshLayout(ranks, 1, "none", layout.sequence_parallel, ("cuda:0",) * ranks)
        yield Option("mesh", f"--gpus {ranks}", 5 + ranks, False, lambda s, m=tensor: replace(s, layout=m))
        for shard in ("zero2", "zero3"):
            data = MeshLayout(1, ranks, shard, False, ("cuda:0",) * ranks)
            yield Option("mesh", f"--gpus {ranks} --shard {shard}", 5 + ranks, False,
                         lambda s, m=data: replace(s, layout=m))


def _of_run(setup: Setup) -> Iterator[Option]:
    manifest = setup.manifest

    def change(setup: Setup, table: str, **fields: object) -> Setup:
        changed = getattr(setup.manifest, table).model_copy(update=fields)
        return replace(setup, manifest=setup.manifest.model_copy(update={table: changed}))

    if manifest.numerics.compute == "fp32":
        yield Option("compute", 'numerics.compute = "bf16"', 20, True, lambda s: change(s, "numerics", compute="bf16"))
    if manifest.numerics.mode == "deterministic":
        yield Option("sums", 'numerics.mode = "fp32"', 21, True, lambda s: change(
            change(s, "numerics", mode="fp32"), "averaging", codec="fp32"))
    if manifest.optimizer.state == "fp32":
        yield Option("state", 'optimizer.state = "8bit"', 20, True, lambda s: change(s, "optimizer", state="8bit"))
    for factor in (2, 4, 8):
        stages = factor * manifest.cut.stages
        if stages <= manifest.model.num_layers:
            yield Option("stages", f"cut.stages = {stages}", 22 + factor, True, lambda s, n=stages: replace(
                s, manifest=s.manifest.model_copy(update={"cut": Cut(stages=n)})))


# ------------------------------------------------------------ what there is

def room_here(layout: MeshLayout) -> int | None:
    """Bytes free on the fullest device of `layout` here; of CPU memory what is available. None: nobody knows."""
    if layout.kind == "cpu":
        return available()
    import torch

    if not torch.cuda.is_available():
        return None
    return min(torch.cuda.mem_get_info(torch.device(device))[0] for device in layout.devices)


def available() -> int | None:
    """Bytes of this machine's memory that are free or can be freed."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        except (OSError, ValueError):
            return None


# ------------------------------------------------------------ printing

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
        lines += ["", *_words(found)]
    return lines


def _words(found: Verdict) -> Iterator[str]:
    stage, where = found.plan.stage, "the machine" if found.plan.on_host else "each device"
    if found.room is None:
        yield f"stage {stage} needs {shown(found.need)} of {where}; --memory says what there is"
        return
    if found.fits:
        yield f"stage {stage} fits: {shown(found.need)} of {where}'s {shown(found.room)}"
        return
    yield f"stage {stage} does not fit: it needs {shown(found.need)} of {where}, which has {shown(found.room)}"
    if not found.advice:
        yield found.hint
        return
    yield "it fits with"
    for advice in found.advice:
        of_run = any(option.of_run for option in advice.options)
        yield f"  {shown(advice.need):>9}  {advice.words}{'  (a new manifest)' if of_run else ''}"


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

    verdicts = [verdict(_with_slots(setup, stage, room), stage, room, tell) for stage in stages]
    text = json.dumps([record(each) for each in verdicts], indent=2) if as_json else "\n".join(table(verdicts))
    print(text)
    if setup.memory.compile and not as_json:
        print("\nplanned as if layers were not compiled: what the compiler takes and saves is not modelled")
    return int(not all(each.fits for each in verdicts))


def _with_slots(setup: Setup, stage: int, room: int | None) -> Setup:
    """With as many slots as a peer would choose, where it is to choose; one if none fits."""
    if setup.slots:
        return setup
    return replace(setup, slots=1 if room is None else max(_most_slots(setup, [stage], room), 1))


# ------------------------------------------------------------ a peer that starts

MOST_SLOTS = 64
"""More microbatches in flight keep no stage busier."""

_SURELY = 8
"""A stage that takes so many times less than there is, by a rough guess, is not planned before it starts."""


_SHARE = 0.5
"""Of a machine's free memory, for a peer on the CPU that chooses: others are there, too."""


def slots_here(setup: Setup, stages: Sequence[int]) -> int:
    """`setup.slots`, or where that is 0 as many as fit here. Raises UsageError, with advice, if one is too many."""
    room = room_here(setup.layout)
    if setup.slots:
        if room is not None:
            check_fits(setup, stages, room)
        return setup.slots
    if room is None:
        raise UsageError("--slots 0: this machine does not say how much memory is free; say how many, such as 4")
    return slots_that_fit(setup, stages, room if setup.layout.kind == "cuda" else int(_SHARE * room))


def slots_that_fit(setup: Setup, stages: Sequence[int], room: int) -> int:
    """Microbatches in flight, per stage and open step, for which `room` bytes are enough to serve `stages` together.

    At most a step's, and MOST_SLOTS. Raises UsageError, with advice, if one is too many.
    """
    slots = _most_slots(setup, stages, room)
    if slots == 0:
        raise _refused(replace(setup, slots=1), stages, room)
    return slots


def _most_slots(setup: Setup, stages: Sequence[int], room: int) -> int:
    most = min(setup.manifest.training.microbatches, MOST_SLOTS)
    return bisect.bisect_right(
        range(1, most + 1), room,
        key=lambda slots: sum(_needs(replace(setup, slots=slots), stage) for stage in stages),
    )


def check_fits(setup: Setup, stages: Sequence[int], room: int) -> None:
    """Raises UsageError, with advice, if not even one microbatch in flight fits. Costs a moment unless it is close."""
    if _rough(setup, stages) * _SURELY > room:
        one = replace(setup, slots=1)
        if sum(_needs(one, stage) for stage in stages) > room:
            raise _refused(one, stages, room)


def _needs(setup: Setup, stage: int) -> int:
    return needed(plan_stage(setup, stage), setup.layout)


def _refused(one: Setup, stages: Sequence[int], room: int) -> UsageError:
    for stage in stages:
        found = verdict(one, stage, room)
        if not found.fits:
            return UsageError("; ".join(line.strip() for line in _words(found)))
    named = ", ".join(map(str, stages))
    return UsageError(f"stages {named} fit one by one, but not together, in {shown(room)}: serve fewer of them")


def _rough(setup: Setup, stages: Sequence[int]) -> int:
    """Bytes of state and of one microbatch, about: what a decoder keeps without knowing how."""
    manifest, training = setup.manifest, setup.manifest.training
    model, tokens = manifest.model, training.microbatch_size * training.sequence_length
    ranges = cut_layers(model, manifest.cut, training.sequence_length)
    elements = sum(Canonical.of(manifest, stage).num_elements for stage in stages)
    layer = 16 * model.hidden_size + 8 * model.intermediate_size + 8 * model.num_heads * model.head_dim
    scores = 2 * model.num_heads * training.sequence_length
    width = sum(len(ranges[stage]) for stage in stages) * (layer + scores) + 4 * model.vocab_size
    return 32 * elements + 4 * tokens * width + RESERVE[setup.layout.kind]
