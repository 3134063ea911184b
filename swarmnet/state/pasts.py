"""Which of the checkpoints that lie on the peers' disks are of one past. Pure.

A run that goes back leaves checkpoints of later versions behind, on disks of peers that do not hear of it. Put beside
those of the steps that were done again, they would make a model whose stages have seen different histories. So every
checkpoint is announced with the restart that it descends from, and a restart anybody names tells everybody which
checkpoints are of a past that was given up. Knows no disk and no network.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from swarmnet.ids import NO_RESTART, OnDisk, Restart
from swarmnet.state.restart import Holding
from swarmnet.state.rhythm import abandoned

Announced = tuple[Holding, tuple[OnDisk, ...]]
"""What a peer has of a stage, and every checkpoint it announces of it."""


def of_one_past(
    announced: Sequence[Announced], current: Restart, common: Callable[[Sequence[Holding]], int | None]
) -> list[Holding]:
    """The holdings, with the versions on disk that may be put together.

    While somebody serves under `current`, nobody else's later restart gives anything up. While nobody does, the latest
    that any disk remembers counts; if it leaves nothing to go on from (see `Restarts.common`), it was known to too few,
    and the one before it counts. Where a stage has the very version of `current` from another past only, that is what
    the run has decided to go on from.
    """
    known = sorted({current, NO_RESTART, *(kept.restart for _, disk in announced for kept in disk)}, reverse=True)
    if any(held.version is not None and held.restart == current for held, _ in announced):
        return _filtered(announced, [restart for restart in known if restart <= current], current)
    for latest in (restart for restart in known if restart >= current):
        found = _filtered(announced, [restart for restart in known if restart <= latest], current, latest=latest)
        if common(found) is not None:
            return found
    return _filtered(announced, known, current)


def _filtered(
    announced: Sequence[Announced], restarts: Collection[Restart], current: Restart, *, latest: Restart | None = None
) -> list[Holding]:
    def sound(kept: OnDisk) -> bool:
        if latest is not None and kept.restart > latest:
            return False
        return not _given_up(kept, restarts)

    decided = {
        held.stage for held, disk in announced for kept in disk if kept.version == current.version and sound(kept)
    }
    return [
        replace(
            held,
            disk=tuple(
                kept.version
                for kept in disk
                if sound(kept) or (current.number and kept.version == current.version and held.stage not in decided)
            ),
        )
        for held, disk in announced
    ]


def _given_up(kept: OnDisk, restarts: Collection[Restart]) -> bool:
    """Has the run gone back to before it? Of two restarts of one number, which two sides decided alone, the lower one's
    steps are given up as well."""
    mine, won = kept.restart, {restart.number: restart for restart in sorted(restarts)}
    beside = won.get(mine.number, mine) != mine
    return abandoned(kept.version, mine, won.values()) or (beside and kept.version > mine.version)
