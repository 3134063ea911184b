"""At which versions a replica writes a checkpoint, and which ones it keeps. Pure.

What counts at a restart is the newest version that *every* stage has on some disk. So all stages aim at the same
versions, multiples of `training.checkpoint_every`; a disk too slow for each of them takes every second, fourth, ...,
which are among those of the faster ones; and nobody deletes a version that may still become, or is, the newest common.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from swarmnet.ids import Restart


class Rhythm:
    """When one replica's checkpoints are due. every: steps between them, 0 for none. last: the run's last version."""

    def __init__(self, *, every: int, last: int) -> None:
        self.every, self.last = every, last
        self.stride = 1

    def due(self, version: int) -> bool:
        """Is this version to be written?"""
        if version == self.last:
            return True
        return version > 0 and self.every > 0 and version % (self.every * self.stride) == 0

    def took(self, num_steps: int) -> None:
        """The write that has just ended began so many steps ago: thin out until one is over before the next is due."""
        self.stride = 1
        while 0 < self.every * self.stride < num_steps:
            self.stride *= 2


def roundness(version: int, every: int) -> int:
    """How often a multiple of `every` can be halved and stay one; -1 if it is none."""
    if every <= 0 or version <= 0 or version % every:
        return -1
    multiple = version // every
    return (multiple & -multiple).bit_length() - 1


def retained(versions: Iterable[int], *, keep: int, every: int, common: int | None) -> frozenset[int]:
    """Which of the checkpoints to keep: `keep` of them, the newest first, but never without these three:

    the newest; the newest common one (common: the newest version that every stage is known to have on some disk); and
    of those in between the roundest, which is the one that a slower stage is about to have as well.
    """
    newest_first = sorted(set(versions), reverse=True)
    kept = newest_first[:1]
    if common in newest_first[1:]:
        kept += [version for version in newest_first if version == common]
    between = [version for version in newest_first[1:] if version > (common or 0)]
    if between:
        kept.append(max(between, key=lambda version: (roundness(version, every), version)))
    kept += [version for version in newest_first if version not in kept][: max(keep - len(kept), 0)]
    return frozenset(kept)


def abandoned(version: int, under: Restart, restarts: Collection[Restart]) -> bool:
    """Has the run gone back to before `version`, a state of restart `under`, at one of these restarts?"""
    return any(restart.number > under.number and restart.version < version for restart in restarts)
