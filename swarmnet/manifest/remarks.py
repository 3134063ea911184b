"""What a manifest's author may not have meant: nothing is wrong with the manifest, yet people are told. Pure."""

from __future__ import annotations

from swarmnet.manifest.schema import Manifest


def remarks(manifest: Manifest) -> list[str]:
    """A line each, for people; none if there is nothing to say."""
    return [*_late_momentum(manifest), *_no_overlap(manifest)]


def _late_momentum(manifest: Manifest) -> list[str]:
    averaging, steps = manifest.averaging, manifest.training.total_steps
    warmup = averaging.outer_warmup_steps
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
    if not delay.most or delay.behind(steps - 1):
        return []
    return [
        f"note: no step overlaps another: training.total_steps = {steps}, averaging.overlap_after = {delay.since}; "
        "train longer, or let steps overlap earlier with --set"
    ]
