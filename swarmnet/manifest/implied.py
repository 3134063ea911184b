"""What a choice in a new manifest brings along, unless something else is said, and what its author may not have meant.

Every field of a manifest has one default, whatever the others are. `swarmnet init` and `swarmnet local` lay these
values under what the user said. With `sync = "local"` replicas average float vectors, and `norm_clip` limits how far
one of them can move the others. With `sync = "overlap"` gradients come late: the first moment is carried on, and the
first steps, in which weights change fastest, do not overlap. Integer aggregates are small, so that they fit a home
line. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from swarmnet.manifest.schema import Manifest, Training

CLIPPING = "norm_clip"
"""The reducer of local sync."""

PARTNERS_MOMENTUM, PARTNERS_WARMUP_STEPS = 0.6, 150
"""Of pairs and groups: what a few have learned is less to go on than what all have; docs/local-sync.md has figures."""

PARTNERS = 4
"""In a group, where an outer step's mean is a group's."""

FEW_BITS = {"averaging.inner_steps": 24, "averaging.fragments": 4}
"""Of outer steps in 4 bits: the fewest bytes at which all replicas keep within 1.03 of exact training's loss."""

SPARSE_INNER_STEPS = 8
"""Of sparse outer steps, which send little and so may come often; docs/local-sync.md has figures."""

ADAPTERS: Mapping[str, object] = {
    "optimizer.learning_rate": 2e-4,
    "optimizer.beta2": 0.999,
    "optimizer.weight_decay": 0.0,
}
"""Of a run with adapters: what those who fine-tune begin with (QLoRA, arXiv:2305.14314)."""

WARMUP = 0.03
"""Of such a run's steps."""

LEAD, OVERLAP_AFTER = 2.5, 300
"""Where gradients come one step late: docs/numerics.md has what was measured."""


def implied(said: Mapping[str, object], *, new: bool = True) -> dict[str, object]:
    """Fields and values that follow from `said`, both by dotted names; never one that is in `said`.

    new: no manifest that `said` overrides has a codec.
    """
    follows: dict[str, object] = {}
    local = said.get("averaging.sync") == "local"
    partners = said.get("averaging.partners")
    if local:
        follows |= {"numerics.mode": "fp32", "averaging.codec": "int8", "averaging.reducer": CLIPPING}
    elif new:
        follows |= {"averaging.codec": "small"}
    if said.get("lora.r"):
        steps = said.get("training.total_steps", Training().total_steps)
        follows |= {**ADAPTERS, "optimizer.warmup_steps": math.ceil(WARMUP * steps) if isinstance(steps, int) else 1}
    if local and partners in ("pairs", "groups"):
        follows |= {
            "averaging.outer_momentum": PARTNERS_MOMENTUM,
            "averaging.outer_warmup_steps": PARTNERS_WARMUP_STEPS,
        }
    if local and partners in (None, "all") and said.get("averaging.codec") == "nf4":
        follows |= FEW_BITS
    if local and str(said.get("averaging.codec", "")).startswith("sparse:"):
        follows |= {"averaging.inner_steps": SPARSE_INNER_STEPS}
    if local and partners == "groups":
        follows |= {"averaging.group_size": PARTNERS}
    if said.get("averaging.sync") == "overlap":
        follows |= {"averaging.overlap_after": OVERLAP_AFTER}
        # Without a first moment there is nothing to carry on.
        if said.get("optimizer.beta1") != 0:
            follows |= {"optimizer.lead": LEAD}
    return {name: value for name, value in follows.items() if name not in said}


def remarks(manifest: Manifest) -> list[str]:
    """A line each, for people; none if there is nothing to say."""
    return [*_late_momentum(manifest), *_no_overlap(manifest)]


def _late_momentum(manifest: Manifest) -> list[str]:
    averaging, steps = manifest.averaging, manifest.training.total_steps
    warmup = averaging.outer_warmup_steps
    # Only local training has a warm-up of outer steps.
    if averaging.sync != "local" or averaging.outer_momentum == 0 or steps > 2 * warmup:
        return []
    last = steps - 1
    when = "never sets in" if last <= warmup else f"sets in only after step {warmup} of {steps}"
    return [
        f"note: outer momentum {when}: training.total_steps = {steps}, averaging.outer_warmup_steps = {warmup}; "
        "train longer, or choose a shorter warm-up with --set"
    ]


def _no_overlap(manifest: Manifest) -> list[str]:
    steps, delay = manifest.training.total_steps, manifest.averaging.delay
    # The last step is late, so some are.
    if not delay.most or delay.behind(steps - 1):
        return []
    return [
        f"note: no step overlaps another: training.total_steps = {steps}, averaging.overlap_after = {delay.since}; "
        "train longer, or let steps overlap earlier with --set"
    ]
