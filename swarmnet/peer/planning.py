"""Do the stages of a peer fit in the memory there is? Plans of `plan.plan`, added up.

A size is given as `room`: what this machine has is `peer.fitting`'s to find out. Measures nothing and prints nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from swarmnet.plan.budget import GIB, MIB, StagePlan, shown, together
from swarmnet.plan.plan import Setup, plan_stage
from swarmnet.ranks.layout import MeshLayout

RESERVE = {"cuda": GIB, "cpu": 256 * MIB}
"""What is kept free beside each process that computes: for torch itself, kernels, communication, and gaps in memory."""

_LEVERS = {
    "cuda": "fewer --slots or --stage, --activations selective, recompute or offload, memory.offload_optimizer, more "
    '--gpus; for the run, numerics.compute = "bf16", optimizer.state = "8bit", more cut.stages',
    "cpu": "fewer --slots or --stage, --activations selective or recompute, a smaller caps.memo_bytes; for the run, "
    'numerics.compute = "bf16", optimizer.state = "8bit", more cut.stages',
}
"""What takes less memory, by the kind of device."""


@dataclass(frozen=True, slots=True)
class PlanFit:
    """Whether one peer's stages fit."""

    plans: tuple[StagePlan, ...]
    need: int
    """Bytes of one device, of the machine if ranks compute on the CPU."""
    room: int | None
    """Bytes that it has; None if nobody said."""

    @property
    def missing(self) -> int:
        """Bytes that the stages need beyond `room`; 0 if they fit, and where nobody said how much there is."""
        return 0 if self.room is None else max(self.need - self.room, 0)

    @property
    def fits(self) -> bool:
        """Do they? Also where nobody said how much there is."""
        return not self.missing

    def lines(self) -> Iterator[str]:
        """What to tell whoever asked."""
        stages, on_host = [plan.stage for plan in self.plans], self.plans[0].on_host
        who = f"stage {stages[0]}" if len(stages) == 1 else f"one peer with stages {listed(stages)}"
        where = "the machine" if on_host else "each device"
        if self.room is None:
            yield f"{who} needs {shown(self.need)} of {where}; --memory says what there is"
        elif self.fits:
            yield f"{who} fits: {shown(self.need)} of {where}'s {shown(self.room)}"
        else:
            yield (
                f"{who} does not fit: it needs {shown(self.need)} of {where}, which has {shown(self.room)}: "
                f"{shown(self.missing)} are missing"
            )
            yield f"what takes less: {_LEVERS['cpu' if on_host else 'cuda']}"


def listed(stages: Sequence[int]) -> str:
    """As `--stage` takes them."""
    return ",".join(map(str, stages))


def judge(setup: Setup, stages: Sequence[int], room: int | None) -> PlanFit:
    """Plan the stages of one peer. Raises UsageError: they cannot be split."""
    plans = tuple(plan_stage(setup, stage) for stage in stages)
    return PlanFit(plans, needed(plans, setup.layout), room)


def needed(plans: Sequence[StagePlan], layout: MeshLayout) -> int:
    """What has to be there for one peer with these stages: the plans' peak together, and a reserve."""
    processes = layout.ranks if layout.kind == "cpu" else 1  # beside each other in one memory
    if layout.ranks > 1:
        processes *= len(plans)  # ranks of several are processes of each stage
    return together(plans) + RESERVE[layout.kind] * processes


def most_slots(need: Callable[[int], int], room: int, *, most: int) -> int:
    """How many slots, of 1 to `most`, need no more than `room` bytes; 0 if none."""
    return bisect.bisect_right(range(1, most + 1), room, key=need)
