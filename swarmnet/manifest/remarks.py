"""What a manifest's author may not have meant: nothing is wrong with the manifest, yet people are told. Pure."""

from __future__ import annotations

from swarmnet.manifest.schema import Manifest


def remarks(manifest: Manifest) -> list[str]:
    """A line each, for people; none if there is nothing to say."""
    averaging, steps = manifest.averaging, manifest.training.total_steps
    warmup = averaging.outer_warmup_steps
    if averaging.sync != "local" or averaging.outer_momentum == 0 or steps > 2 * warmup:
        return []
    last = steps - 1
    when = "never sets in" if last <= warmup else f"sets in only after step {warmup} of {steps}"
    return [f"note: outer momentum {when}: training.total_steps = {steps}, averaging.outer_warmup_steps = {warmup}; "
            "train longer, or choose a shorter warm-up with --set"]
