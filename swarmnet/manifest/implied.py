"""What a choice in a new manifest brings along, unless something else is said, and what its author may not have meant.

Every field of a manifest has one default, whatever the others are. Whoever writes a *new* one (`swarmnet init`,
`swarmnet local`) lays these under what was said. The reducer is why: a swarm that anybody may join, or whose replicas
bring together what they have learned on their own, should not let one of them drag the others anywhere, so sums that
are not bound to be exact are clipped. Where gradients come late (`overlap`) the first moment is carried on, and the
first steps, in which weights change fastest, are exact. And exact sums are small, so that they fit a home line. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarmnet.manifest.schema import Manifest

CLIPPING = "norm_clip"
"""The reducer of open runs with float sums, and of local training."""

PARTNERS_MOMENTUM, PARTNERS_WARMUP_STEPS = 0.6, 150
"""Of pairs and groups: what a few have learned is less to go on than what all have; docs/local-sync.md has figures."""

PARTNERS = 4
"""In a group, where an outer step's mean is a group's."""

FEW_BITS = {"averaging.inner_steps": 24, "averaging.fragments": 4}
"""Of outer steps in 4 bits: the fewest bytes at which all replicas keep within 1.03 of exact training's loss."""

LEAD, OVERLAP_AFTER = 2.5, 100
"""Where gradients come one step late: docs/numerics.md has what was measured."""


def implied(said: Mapping[str, object], *, opened: bool, anew: bool = True) -> dict[str, object]:
    """Fields and values that follow from `said`, both by dotted names; never one that is in `said`.

    opened: anybody may join the run. anew: no manifest that `said` goes over has a codec for that `numerics.mode`.
    """
    follows: dict[str, object] = {}
    local = said.get("averaging.sync") == "local"
    mode = said.get("numerics.mode", "fp32" if local else "deterministic")
    partners = said.get("averaging.partners")
    # Weights that drift apart between outer steps have no exact sum to lose.
    if local and mode == "fp32":
        follows |= {"numerics.mode": mode, "averaging.codec": "int8"}
    elif anew and not local:
        follows |= {"averaging.codec": "small" if mode == "deterministic" else "fp32"}
    if local and partners in ("pairs", "groups"):
        follows |= {
            "averaging.outer_momentum": PARTNERS_MOMENTUM,
            "averaging.outer_warmup_steps": PARTNERS_WARMUP_STEPS,
        }
    if local and partners in (None, "all") and said.get("averaging.codec") == "nf4":
        follows |= FEW_BITS
    if local and partners == "groups":
        follows |= {"averaging.group_size": PARTNERS}
    if said.get("averaging.sync") == "overlap":
        follows |= {"averaging.overlap_after": OVERLAP_AFTER}
        # Without a first moment there is nothing to carry on.
        if said.get("optimizer.beta1") != 0:
            follows |= {"optimizer.lead": LEAD}
    summed = str(said.get("averaging.codec", "")).startswith("powersgd")  # its factors can only be summed
    if (local or opened) and mode == "fp32" and not summed:
        follows |= {"averaging.reducer": CLIPPING}
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
