"""One consistent copy of a replica's state: nothing was applied between the question where it stands and the bytes.

The state moves while others await: a copy counts only if the replica stands where it stood before. Knows no steps and
no peers; the step machine says where it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarmnet.ids import NO_RESTART, Chain, Restart
from swarmnet.manifest.schema import Delay
from swarmnet.messages import Stamp
from swarmnet.stage.seams import Compute

_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class StateHeader:
    """Where a replica stands: equal before and after the copy means the copy is consistent.

    before: the chain of one version earlier (of version 0: its own). term_chain: at the start of the keepers' term.
    """

    version: int
    chain: Chain
    before: Chain
    term_chain: Chain
    restart: Restart = NO_RESTART

    def oldest(self, stage: int, delay: Delay) -> Stamp:
        """The stamp of the step that is applied next: it carries the chain of the weights it is computed on."""
        return Stamp(self.version, stage, self.before if delay.behind(self.version) else self.chain, self.restart)


async def consistent_copy(
    engine: Compute, where: Callable[[], StateHeader | None], *, attempts: int = _ATTEMPTS
) -> tuple[StateHeader, bytes | memoryview] | None:
    """The state and where it stands; None while `where()` is None, or if it moved during every attempt."""
    for _ in range(attempts):
        before = where()
        if before is None:
            return None
        data = await engine.snapshot()
        if where() == before:
            return before, data
    return None
