"""Which stages of a run nobody serves, and what to do about it: peers and trainers say it in the same words."""

from __future__ import annotations

from collections.abc import Iterable

from swarmnet.directory import Record


def unserved(records: Iterable[Record], *, num_stages: int, mine: Iterable[int] = ()) -> tuple[int, ...]:
    """Stages of which there is no replica among `records`. mine: those that are served here."""
    served = {status.stage for record in records for status in record.stages}
    return tuple(sorted(set(range(num_stages)) - served - set(mine)))


def nobody_serves(stages: tuple[int, ...]) -> dict[str, object]:
    """Fields of the event `waiting`."""
    return {
        "reason": f"nobody serves stage {', '.join(map(str, stages))} yet",
        "advice": f"start a peer with --stage {','.join(map(str, stages))} and --bootstrap with an address of this one",
    }
