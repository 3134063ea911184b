"""Do the stages of a peer fit in the memory there is, and if not, what to change: plans of `plan.plan`, and a search.

What may be changed, and how little one would want to, is listed here; `plan.advice` tries it. A size is given as
`room`: what this machine has is `peer.fitting`'s to find out. Measures nothing and prints nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Cut, Manifest
from swarmnet.plan.advice import Advice, Option, advise
from swarmnet.plan.budget import GIB, MIB, StagePlan, shown, together
from swarmnet.plan.plan import Setup, least, plan_stage, rehearsals
from swarmnet.ranks.layout import MeshLayout, MeshSplit

RESERVE = {"cuda": GIB, "cpu": 256 * MIB}
"""What is kept free beside each process that computes: for torch itself, kernels, communication, and gaps in memory."""

MOST_REHEARSALS = 80
"""A search for changes ends after so many, about half a minute."""

_SMALL_MEMO = 64 * MIB


@dataclass(frozen=True, slots=True)
class PlanFit:
    """Whether one peer's stages fit. need: of one device, of the machine if ranks compute on the CPU. room: what it
    has, None if nobody said. hint: what to say if nothing is advised; "" if nothing was looked for."""

    plans: tuple[StagePlan, ...]
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
        who = _who([plan.stage for plan in self.plans])
        where = "the machine" if self.plans[0].on_host else "each device"
        if self.room is None:
            yield f"{who} needs {shown(self.need)} of {where}; --memory says what there is"
            return
        if self.fits:
            yield f"{who} fits: {shown(self.need)} of {where}'s {shown(self.room)}"
            return
        yield f"{who} does not fit: it needs {shown(self.need)} of {where}, which has {shown(self.room)}"
        if self.advice:
            yield "it fits with"
        elif self.hint:
            yield self.hint
        for advice in self.advice:
            of_run = any(option.of_run for option in advice.options)
            yield f"  {shown(advice.need):>9}  {advice.words}{'  (a new manifest)' if of_run else ''}"


def _who(stages: Sequence[int]) -> str:
    return f"stage {stages[0]}" if len(stages) == 1 else f"one peer with stages {listed(stages)}"


def listed(stages: Sequence[int]) -> str:
    """As `--stage` takes them."""
    return ",".join(map(str, stages))


def judge(setup: Setup, stages: Sequence[int], room: int | None) -> PlanFit:
    """Plan the stages of one peer, and look for nothing. Raises UsageError: they cannot be split."""
    plans = tuple(plan_stage(setup, stage) for stage in stages)
    return PlanFit(plans, needed(plans, setup.layout), room)


def verdict(
    setup: Setup, stages: Sequence[int], room: int | None, tell: Callable[[str], None] = lambda line: None
) -> PlanFit:
    """As `judge`, and look for changes if the stages do not fit in `room` bytes.

    tell: is told before a search, which may take half a minute.
    """
    found = judge(setup, stages, room)
    if found.fits or room is None:
        return found
    if _beside(setup) > room:
        return replace(found, hint=_too_little(setup, room))
    tell(f"{_who(stages)} does not fit as it is: trying what would make it fit")
    before = rehearsals()
    peer = _Peer(setup, (tuple(stages),))

    def need(options: tuple[Option, ...]) -> int | None:
        changed = peer.changed(options)
        if changed is None:
            return None
        at_least = changed.least()
        if at_least > room:
            return at_least
        if rehearsals() - before >= MOST_REHEARSALS:
            return None
        return changed.need()

    advice = advise(_options(peer, room), need, room=room)
    tried = "nothing tried makes it fit"
    if rehearsals() - before < MOST_REHEARSALS:
        tried += ", three changes at once included"
    best = sorted((_with_most_slots(peer, each, room) for each in advice), key=lambda each: each.cost)
    return replace(found, advice=tuple(best), hint=tried + _last_resort(setup, room))


def needed(plans: Sequence[StagePlan], layout: MeshLayout) -> int:
    """What has to be there for one peer with these stages: the plans' peak together, and a reserve."""
    return together(plans) + _reserve(layout, len(plans))


def most_slots(need: Callable[[int], int], room: int, *, most: int) -> int:
    """How many slots, of 1 to `most`, need no more than `room` bytes; 0 if none."""
    return bisect.bisect_right(range(1, most + 1), room, key=need)


def _reserve(layout: MeshLayout, stages: int = 1) -> int:
    processes = layout.ranks if layout.kind == "cpu" else 1  # beside each other in one memory
    return RESERVE[layout.kind] * processes * (stages if layout.ranks > 1 else 1)


# ------------------------------------------------------------ a peer with other settings


@dataclass(frozen=True, slots=True)
class _Peer:
    """How a peer serves stages, and which: any of `sets`, so that the one that needs most counts."""

    setup: Setup
    sets: tuple[tuple[int, ...], ...]

    def but(self, **fields: Any) -> _Peer:
        """With another setup."""
        return replace(self, setup=replace(self.setup, **fields))

    def cut(self, stages: int) -> _Peer:
        """In a run of so many stages, with as many of them as before."""
        manifest = self.setup.manifest.model_copy(update={"cut": Cut(stages=stages)})
        return replace(self.but(manifest=manifest), sets=_anywhere(stages, len(self.sets[0])))

    def changed(self, options: Sequence[Option]) -> _Peer | None:
        """With these options, None if its ranks cannot share its stages then."""
        changed = self
        try:
            for option in options:
                changed = option.change(changed)
            MeshSplit.of(changed.setup.manifest, changed.setup.layout)
        except UsageError:
            return None
        return changed

    def need(self) -> int:
        """What has to be there."""
        return max(needed([plan_stage(self.setup, stage) for stage in each], self.setup.layout) for each in self.sets)

    def least(self) -> int:
        """No more than `need`, in no time."""
        held = max(sum(least(self.setup, stage) for stage in each) for each in self.sets)
        return held + _reserve(self.setup.layout, len(self.sets[0]))


def _anywhere(stages: int, count: int) -> tuple[tuple[int, ...], ...]:
    """`count` neighbours at the start of a run, in its middle, at its end: those that need most are among them, or
    nearly."""
    return tuple(
        tuple(range(first, first + count)) for first in sorted({0, min(stages // 2, stages - count), stages - count})
    )


def _with_most_slots(peer: _Peer, advice: Advice, room: int) -> Advice:
    """As many slots as fit with the rest of it, where it takes some away."""
    others = tuple(option for option in advice.options if option.kind != "slots")
    changed = peer.changed(others)
    if changed is None or len(others) == len(advice.options):
        return advice
    before = peer.setup.slots
    slots = most_slots(lambda slots: changed.but(slots=slots).need(), room, most=before - 1)
    fewer = _slots(slots, cost=1 if 2 * slots >= before else 3)
    options = tuple(fewer if option.kind == "slots" else option for option in advice.options)
    return Advice(options, changed.but(slots=slots).need())


def _slots(slots: int, *, cost: int) -> Option:
    return Option("slots", f"--slots {slots}", cost, False, lambda p: p.but(slots=slots))


def _beside(setup: Setup) -> int:
    """What no advice takes away, however small a stage is."""
    return _reserve(setup.layout) + (min(setup.memo_bytes, _SMALL_MEMO) if setup.layout.kind == "cpu" else 0)


def _too_little(setup: Setup, room: int) -> str:
    reserve = _reserve(setup.layout)
    if reserve > room:
        return f"no change makes it fit: the reserve for torch itself, {shown(reserve)}, alone is more than there is"
    return (
        f"no change makes it fit: the reserve for torch itself, {shown(reserve)}, and a memo of "
        f"{shown(_beside(setup) - reserve)} (caps.memo_bytes) are more than there is"
    )


def _last_resort(setup: Setup, room: int) -> str:
    """More stages, unless stages of one layer have too much state, too."""
    finest = setup.manifest.model.num_layers
    if setup.manifest.cut.stages < finest and _Peer(setup, ((0,),)).cut(finest).least() <= room:
        return ": cut the run into more stages"
    return ": it takes a machine with more memory"


# ------------------------------------------------------------ what may be changed


def _options(peer: _Peer, room: int) -> list[Option]:
    return [*_of_peer(peer, room), *_of_mesh(peer.setup.layout), *_of_run(peer.setup.manifest)]


def _of_peer(peer: _Peer, room: int) -> Iterator[Option]:
    setup, (stages,) = peer.setup, peer.sets
    on_gpu = setup.layout.kind == "cuda"
    if not on_gpu and setup.memo_bytes > _SMALL_MEMO:
        yield Option("memo", f"--set caps.memo_bytes={_SMALL_MEMO}", 3, False, lambda p: p.but(memo_bytes=_SMALL_MEMO))
    if setup.slots > 1:
        yield _slots(1, cost=1)  # or more, in the end: see `_with_most_slots`
    if len(stages) > 1:
        kept = _lighter(peer, stages, room)
        yield Option("fewer", f"--stage {listed(kept)}", 3, False, lambda p: replace(p, sets=(kept,)))
    for policy, cost in (("selective", 2), ("recompute_layers", 2), ("recompute", 4), ("offload", 4)):
        if policy != setup.memory.activations and (on_gpu or policy != "offload"):
            yield Option(
                "activations",
                f"--activations {policy}",
                cost,
                False,
                lambda p, a=policy: p.but(memory=replace(p.setup.memory, activations=a)),
            )
    if on_gpu and not setup.memory.offload_optimizer:
        yield Option(
            "optimizer",
            "--set memory.offload_optimizer=true",
            5,
            False,
            lambda p: p.but(memory=replace(p.setup.memory, offload_optimizer=True)),
        )


def _lighter(peer: _Peer, stages: Sequence[int], room: int) -> tuple[int, ...]:
    """As many of `stages` as fit, those that need least; one, if none does."""
    lightest = sorted(stages, key=lambda stage: replace(peer, sets=((stage,),)).need())
    kept = tuple(lightest[:1])
    for count in range(2, len(stages)):
        more = tuple(sorted(lightest[:count], key=stages.index))
        if replace(peer, sets=(more,)).need() > room:
            break
        kept = more
    return kept


def _of_mesh(layout: MeshLayout) -> Iterator[Option]:
    if layout.kind != "cuda":  # more ranks of one machine take more of its memory
        return
    for ranks in (2, 4, 8):
        if ranks <= layout.ranks:
            continue
        tensor = MeshLayout(ranks, 1, "none", layout.sequence_parallel, ("cuda:0",) * ranks)
        yield Option("mesh", f"--gpus {ranks}", 5 + ranks, False, lambda p, m=tensor: p.but(layout=m))
        for shard in ("zero2", "zero3"):
            data = MeshLayout(1, ranks, shard, False, ("cuda:0",) * ranks)
            yield Option("mesh", f"--gpus {ranks} --shard {shard}", 5 + ranks, False, lambda p, m=data: p.but(layout=m))


def _of_run(manifest: Manifest) -> Iterator[Option]:
    def change(peer: _Peer, table: str, **fields: object) -> _Peer:
        manifest = peer.setup.manifest
        changed = getattr(manifest, table).model_copy(update=fields)
        return peer.but(manifest=manifest.model_copy(update={table: changed}))

    if manifest.numerics.compute == "fp32":
        yield Option("compute", 'numerics.compute = "bf16"', 20, True, lambda p: change(p, "numerics", compute="bf16"))
    if manifest.numerics.mode == "deterministic":
        yield Option(
            "sums",
            'numerics.mode = "fp32"',
            21,
            True,
            lambda p: change(change(p, "numerics", mode="fp32"), "averaging", codec="fp32"),
        )
    if manifest.optimizer.state == "fp32":
        yield Option("state", 'optimizer.state = "8bit"', 20, True, lambda p: change(p, "optimizer", state="8bit"))
    for factor in (2, 4, 8):
        stages = factor * manifest.cut.stages
        if stages <= manifest.model.num_layers:
            yield Option("stages", f"cut.stages = {stages}", 22 + factor, True, lambda p, n=stages: p.cut(n))
