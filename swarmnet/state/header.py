"""Where a replica stands, and a copy of its state that was taken while it stood there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from swarmnet.ids import NO_RESTART, Chain, Restart
from swarmnet.manifest.extension import Extension
from swarmnet.manifest.schema import Delay
from swarmnet.messages import Snapshot, Stamp
from swarmnet.stage.seams import Compute

_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class StateHeader:
    """Version, chains and restart of a state, without its bytes."""

    version: int
    chain: Chain
    before: Chain
    """The chain of one version earlier; of version 0, its own."""
    term_chain: Chain
    """The chain at the start of the keepers' term."""
    restart: Restart = NO_RESTART
    extensions: tuple[Extension, ...] = ()
    """The notices in force at this version."""

    @classmethod
    def of(cls, snapshot: Snapshot, restart: Restart | None = None) -> StateHeader:
        """What a described copy says, whose notices were checked; under `restart` if the run has gone on from it."""
        return cls(
            snapshot.version,
            snapshot.chain,
            snapshot.before,
            snapshot.term_chain,
            restart or snapshot.restart,
            tuple(map(Extension.parse, snapshot.notices)),
        )

    def oldest(self, stage: int, delay: Delay) -> Stamp:
        """The stamp of the step that is applied next: it carries the chain of the weights it is computed on."""
        return Stamp(self.version, stage, self.before if delay.behind(self.version) else self.chain, self.restart)


def loop_time() -> float:
    """The event loop's clock, seconds: in the simulator it jumps."""
    return asyncio.get_running_loop().time()


async def consistent_copy(
    engine: Compute, where: Callable[[], StateHeader | None], *, attempts: int = _ATTEMPTS
) -> tuple[StateHeader, bytes | memoryview] | None:
    """The state and where it stands; None while `where()` is None, or if it moved during every attempt."""
    for _ in range(attempts):
        before = where()
        # It has no state of its own, or is about to apply.
        if before is None:
            return None
        data = await engine.snapshot()
        # The optimizer may step while the copy is awaited: only a state that has not moved is one state.
        if where() == before:
            return before, data
    return None
