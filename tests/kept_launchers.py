"""Groups of ranks that fork from one process, which would otherwise import torch for each."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from swarmnet.ranks.launcher import ChildCall, ChildProcess, Launcher


class _Kept(Launcher):
    """Outlives the groups that start ranks with it."""

    def __init__(self, modules: Sequence[str]) -> None:
        super().__init__(modules)
        self._children: list[ChildProcess] = []

    def start(self, call: ChildCall, deadline: float) -> ChildProcess:
        self._children.append(super().start(call, deadline))
        return self._children[-1]

    def abort(self) -> None:
        if self._owes or not self._ready:
            super().abort()
        for child in self._children:
            child.send(signal.SIGKILL)

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
