"""What the lanes of one replica have in common: engine, neighbours, limits, and whether anything new is begun."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from swarmnet.errors import RejectCode
from swarmnet.messages import Answer, Busy, Packed, Rejected
from swarmnet.pipeline.caller import Caller
from swarmnet.pipeline.relay import Spawn
from swarmnet.pipeline.sources import Sources
from swarmnet.stage.engine import Engine, Stash

_AFTER_LEAVING_S = 1.0
"""When to ask a replica again that is about to leave: it may be the last one then, and serve on."""


class Claims(Protocol):
    """What the step machine does for the pipeline."""

    def claim(self, step: int, index: int) -> None:
        """Ask to count (step, index); the word comes back through `Execution.granted` or `Execution.owned`."""
        ...

    def withdraw(self, step: int, index: int) -> None:
        """The work on (step, index) was dropped."""
        ...

    def added(self, stash: Stash) -> None:
        """The weight gradient of this microbatch was added under `stash.voids`."""
        ...

    def non_finite(self, step: int, index: int) -> None:
        """(step, index) gave a non-finite value here or further on, from finite input."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """slots: microbatches in flight, of each open step. running_s: pause between signs of life to callers, and how long
    a call that is ahead of us may wait. wait_s: how long finished work waits for the keeper's word before its stash is
    dropped. memo_bytes: of each open step."""

    slots: int
    running_s: float
    wait_s: float
    memo_bytes: int

    @property
    def door_s(self) -> float:
        """How long a call waits for a slot before it is told to come back: longer, and callers leave a replica that
        is stuck behind a hung neighbour too late."""
        return self.wait_s / 4


@dataclass(slots=True, eq=False)
class Floor:
    """What the lanes of one replica share. version: of its weights, -1: none. executions: forwards run for training.

    leaving: nothing new is begun for callers; what is at work here is finished.
    """

    stage: int
    num_stages: int
    engine: Engine
    claims: Claims
    caller: Caller | None
    sources: Sources
    check: Callable[[tuple[Packed, ...]], None]
    limits: Limits
    spawn: Spawn
    version: int = -1
    leaving: bool = False
    executions: int = 0

    def wrong_step(self, step: int) -> Answer:
        """What a call gets whose step is not open here."""
        if 0 <= step < self.version:
            return Rejected(RejectCode.STALE, f"step {step} is applied", self.version)
        return self.busy()

    def busy(self) -> Busy:
        """Come back later."""
        if self.leaving:
            return Busy(_AFTER_LEAVING_S, self.version)
        return Busy(0.05 if self.version >= 0 else 0.1, self.version)
