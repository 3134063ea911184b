"""Which of the checkpoints on the peers' disks are of one lineage. Pure.

A run that goes back leaves checkpoints of later versions behind, on disks of peers that do not know of it. Put
together with those of the steps that were done again, they would make a model whose stages have seen different
histories. So every checkpoint is announced with the restart that it descends from, and a restart that one peer names
tells all peers which checkpoints were given up. Knows no disk and no network.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from swarmnet.ids import NO_RESTART, OnDisk, Restart
from swarmnet.state.rollback import Holding, Rollbacks

Announced = tuple[Holding, tuple[OnDisk, ...]]
"""What a peer has of a stage, and every checkpoint it announces of it."""


def of_one_lineage(announced: Sequence[Announced], rules: Rollbacks) -> list[Holding]:
    """The holdings, with the versions on disk that may be put together.

    While a peer serves under the current restart, no later restart of another gives anything up. While none does,
    the latest that any disk remembers counts; if it leaves nothing to go on from (see `Rollbacks.common`), it was known
    to too few, and the one before it counts. The seed is nothing to go on from while any disk has more.
    """
    current = rules.current
    furthest = max((kept.version for _, disk in announced for kept in disk), default=0)
    known = sorted({current, NO_RESTART, *(kept.restart for _, disk in announced for kept in disk)}, reverse=True)
    # A peer goes on under the current restart: a later one was never decided here.
    if any(held.version is not None and held.restart == current for held, _ in announced):
        return _filtered(announced, [restart for restart in known if restart <= current], current)
    for latest in (restart for restart in known if restart >= current):
        found = _filtered(announced, [restart for restart in known if restart <= latest], current, latest=latest)
        version = rules.common(found)
        if version or (version == 0 and (latest.number or furthest <= rules.seed_until)):
            return found
    return _filtered(announced, known, current)


def abandoned(version: int, under: Restart, restarts: Collection[Restart]) -> bool:
    """Has the run gone back to before `version`, a state of restart `under`, at one of these restarts?"""
    return any(restart.number > under.number and restart.version < version for restart in restarts)


def _filtered(
    announced: Sequence[Announced], restarts: Collection[Restart], current: Restart, *, latest: Restart | None = None
) -> list[Holding]:
    def sound(kept: OnDisk) -> bool:
        return (latest is None or kept.restart <= latest) and not _given_up(kept, restarts)

    decided = {
        held.stage for held, disk in announced for kept in disk if kept.version == current.version and sound(kept)
    }

    def usable(stage: int, kept: OnDisk) -> bool:
        # Where a stage has the version of `current` from another lineage only, the run has decided to go on from that.
        return sound(kept) or bool(current.number and kept.version == current.version and stage not in decided)

    return [
        replace(held, disk=tuple(kept.version for kept in disk if usable(held.stage, kept))) if disk else held
        for held, disk in announced
    ]


def _given_up(kept: OnDisk, restarts: Collection[Restart]) -> bool:
    # Of two restarts of one number the higher one has won.
    mine, won = kept.restart, {restart.number: restart for restart in sorted(restarts)}
    # Two sides that were cut apart may each have decided a restart of one number: the lower one's steps are given up.
    lost = won.get(mine.number, mine) != mine
    return abandoned(kept.version, mine, won.values()) or (lost and kept.version > mine.version)
