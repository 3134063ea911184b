"""Does a stage fit in the memory there is, and if not, what to change: plans of `stage.plan`, and a search among them.

What may be changed, and how little one would want to, is listed here; `stage.advice` tries it. A size is given as
`room`: what this machine has is `peer.fitting`'s to find out. Measures nothing and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Cut
from swarmnet.mesh.layout import MeshLayout
from swarmnet.model.blocks import MeshSplit
from swarmnet.stage.advice import Advice, Option, advise
from swarmnet.stage.budget import GIB, MIB, StagePlan, shown
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

    def lines(self) -> Iterator[str]:
        """What to tell whoever asked."""
        stage, where = self.plan.stage, "the machine" if self.plan.on_host else "each device"
        if self.room is None:
            yield f"stage {stage} needs {shown(self.need)} of {where}; --memory says what there is"
            return
        if self.fits:
            yield f"stage {stage} fits: {shown(self.need)} of {where}'s {shown(self.room)}"
            return
        yield f"stage {stage} does not fit: it needs {shown(self.need)} of {where}, which has {shown(self.room)}"
        if not self.advice:
            yield self.hint
            return
        yield "it fits with"
        for advice in self.advice:
            of_run = any(option.of_run for option in advice.options)
            yield f"  {shown(advice.need):>9}  {advice.words}{'  (a new manifest)' if of_run else ''}"


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
