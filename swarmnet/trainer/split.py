"""Which trainer feeds which index: rendezvous hashing over the live trainers (Thaler and Ravishankar, 1998). Pure.

Trainers need not agree on who is alive: an index fed twice is counted once, one fed by nobody is executed on the
keeper's order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from swarmnet.ids import PeerId


def feeder(trainers: Iterable[PeerId], step: int, index: int) -> PeerId:
    """The trainer that feeds microbatch (step, index)."""
    return max(trainers, key=lambda peer: hashlib.sha256(f"{peer}/{step}/{index}".encode()).digest())


def my_indexes(me: PeerId, trainers: Iterable[PeerId], step: int, num_microbatches: int) -> list[int]:
    """Indexes that `me` feeds in `step`, lowest first."""
    everybody = sorted({me, *trainers})
    return [index for index in range(num_microbatches) if feeder(everybody, step, index) == me]
