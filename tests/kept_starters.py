"""Groups of ranks that fork from one process, which would otherwise import torch for each."""

from __future__ import annotations

from collections.abc import Sequence

from swarmnet.ranks.starter import ForkStarter


class _Kept(ForkStarter):
    """Outlives the groups that start ranks with it."""

    def close(self) -> None:
        if self.lost():
            super().close()


class KeptStarters:
    """In the place of `ranks.group.ForkStarter`: of the same modules one starter."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], _Kept] = {}

    def __call__(self, modules: Sequence[str]) -> ForkStarter:
        found = self._kept.get(tuple(modules))
        if found is None or found.lost():
            found = self._kept[tuple(modules)] = _Kept(modules)
        return found

    def close(self) -> None:
        for each in self._kept.values():
            ForkStarter.close(each)
