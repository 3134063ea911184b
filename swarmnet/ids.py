"""The identifiers everything else is written in. Standard library only.

A *generation* fences a replica's accumulator (docs/protocol.md, rule 11), a *ballot* fences a leader (rule 13), a
*round id* names one attempt to sum a stage's accumulators.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Annotated, NewType, Protocol

from swarmnet.bounds import Between

PeerId = NewType("PeerId", str)
"""libp2p peer id in base58 (`12D3Koo...`); it embeds the peer's Ed25519 public key."""


@functools.lru_cache(maxsize=1 << 14)
def mark_of(peer: PeerId) -> int:
    """Where a peer stands among the others of its stage: 64 bits of a hash of its id."""
    return int.from_bytes(hashlib.sha256(peer.encode()).digest()[:8])


RunId = NewType("RunId", str)
"""SHA-256 of the canonical manifest, 64 hex digits."""


Chain = NewType("Chain", str)
"""Hash of the commits one stage has applied so far, 64 hex digits. Equal chains mean equal sums, and so
equal weights but for rounding (docs/trust.md)."""


Number = Annotated[int, Between(0, 1 << 53)]
"""A number that only grows, as ballots and steps do."""

Incarnation = Annotated[int, Between(0, (1 << 64) - 1)]
"""A random number per start of a process."""

NO_CHAIN: Chain = Chain("")
"""The chain of a replica that has no state yet."""


class Signer(Protocol):
    """Signs for one peer and checks what others signed; a peer id stands for its key."""

    def sign(self, data: bytes) -> bytes:
        """My signature of these bytes."""
        ...

    def verify(self, peer: PeerId, data: bytes, signature: bytes) -> bool:
        """Did `peer` sign these bytes?"""
        ...


@dataclass(frozen=True, slots=True, order=True)
class Ballot:
    """A replica's claim to lead: the higher one wins, compared by number, then by peer id."""

    number: Number
    peer: PeerId


@dataclass(frozen=True, slots=True, order=True)
class RoundId:
    """One attempt to sum a stage's accumulators. A leader opens it under one ballot and never uses a number twice.

    A process numbers its rounds in ascending order.
    """

    ballot: Ballot
    number: Number


@dataclass(frozen=True, slots=True, order=True)
class Restart:
    """The run-wide decision to go on from `version`, which every stage has (`state.rollback`). The highest one wins."""

    number: Number
    version: Number


NO_RESTART: Restart = Restart(0, 0)
"""The run began at its seed."""


@dataclass(frozen=True, slots=True, order=True)
class OnDisk:
    """A checkpoint of `version` that descends from `restart`: a later restart may have given it up."""

    version: Number
    restart: Restart = NO_RESTART


@dataclass(frozen=True, slots=True, order=True)
class Generation:
    """Which accumulator of which process start: `incarnation` is random per start, `number` only grows within it."""

    incarnation: Incarnation
    number: Number

    def next(self) -> Generation:
        """The generation after an eviction."""
        return Generation(self.incarnation, self.number + 1)


def first_chain(run: RunId, stage: int) -> Chain:
    """The chain of a stage that has applied nothing yet."""
    return Chain(hashlib.sha256(f"{run}/{stage}".encode()).hexdigest())


def next_chain(chain: Chain, evidence: bytes) -> Chain:
    """The chain after one more step; its commits hash to `evidence`."""
    return Chain(hashlib.sha256(chain.encode() + evidence).hexdigest())
