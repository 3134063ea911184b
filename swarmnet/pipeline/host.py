"""What the pipeline of one replica asks of others: of the step machine, and of the replica itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from swarmnet.errors import BadMessage
from swarmnet.ids import PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.messages import Packed, Process
from swarmnet.pipeline.inputs import TurnedAway
from swarmnet.stage.interfaces import SavedActivations

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Starts a task that its owner ends."""


class Claims(Protocol):
    """What the step machine does for the pipeline."""

    def claim(self, step: int, index: int) -> None:
        """Ask to contribute (step, index). `StepTasks.granted` or `StepTasks.owned_elsewhere` has the answer."""

    def withdraw(self, step: int, index: int) -> None:
        """The work on (step, index) was dropped."""

    def added(self, stash: SavedActivations) -> None:
        """The weight gradient of this microbatch was added under `stash.discards`."""

    def non_finite(self, step: int, index: int) -> None:
        """(step, index) gave a non-finite value here or further on, from finite input."""


class PipelineHost(Protocol):
    """What the replica does for its pipeline."""

    timers: Timers

    def spawn(self, work: Coroutine[Any, Any, None], /) -> asyncio.Task[None]:
        """Start a task that the peer owns."""
        ...

    def may_feed(self, caller: PeerId, request: Process) -> TurnedAway | None:
        """Why the caller may not feed this stage; None: it may."""

    def bad_input(self, peer: PeerId, step: int, index: int, error: BadMessage) -> None:
        """That peer has sent an input that cannot be used."""

    def device_full(self, slots: int, reason: str) -> None:
        """The device had no memory for a microbatch; so many slots are left."""

    def share(self) -> float:
        """How many of a step's microbatches come to this replica, about."""
        ...

    def live(self, stage: int) -> Sequence[PeerId]:
        """Live replicas of that stage; of stage -1 the peers that may have tokens."""
        ...

    def may_live(self, peer: PeerId) -> bool:
        """May a replica that owns a microbatch still answer?"""
        ...

    def tokens(self, step: int, index: int, /) -> tuple[Packed, ...] | None:
        """Tokens of a microbatch from this peer's own data; None: it has none."""
