"""Groups of ranks that fork from one process, which would otherwise import torch for each."""

from __future__ import annotations

from collections.abc import Sequence

from swarmnet.ranks.launcher import Launcher


class _Kept(Launcher):
    """Outlives the groups that start ranks with it."""

    def close(self) -> None:
        if self.lost():
            super().close()


class KeptLaunchers:
    """In the place of `ranks.supervisor.Launcher`: of the same modules one launcher."""

    def __init__(self) -> None:
        self._launchers: dict[tuple[str, ...], _Kept] = {}

    def __call__(self, modules: Sequence[str]) -> Launcher:
        found = self._launchers.get(tuple(modules))
        if found is None or found.lost():
            found = self._launchers[tuple(modules)] = _Kept(modules)
        return found

    def close(self) -> None:
        for each in self._launchers.values():
            Launcher.close(each)
