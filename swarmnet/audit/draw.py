"""Whose work a member looks at again. Pure.

Each member draws for itself, with a secret of its own beside the stage's chain two versions later. The chain hashes the
sums of the audited step and of the one after it, so nobody who can still change what it pledged knows the draw; and
nobody else ever knows it before the auditor asks, so nobody can choose a sum that spares it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Set

from swarmnet.ids import Chain, PeerId

_SEED = b"swarmnet draw 2\0"


def seed_of(step: int, stage: int, later: Chain, secret: bytes) -> bytes:
    """The seed of one member's draws among the works of a step. later: the stage's chain at version step + 2."""
    return hashlib.sha256(_SEED + struct.pack("<qq", step, stage) + later.encode() + secret).digest()


def part_of(me: PeerId, weights: Mapping[PeerId, int], kin: Set[PeerId]) -> float:
    """My part of the looks at one member's works. Of those whom others run than that member the parts are 1 together:
    its own operator's may cover for it.

    Those look all the same, as if each were run by somebody else. For a member chooses where it is, and what it says of
    that to whom, and so could choose who does not look at it: whatever I believe, my part is never smaller than that.
    Nor is it more than twice that, lest one stranger look at all that a large operator does; twice is enough if others
    do half of the work.

    Args:
        weights: what each who may look has computed, that member left out: whoever computes a tenth of what another
            does looks at a tenth of what the other looks at.
        kin: those of its operator.
    """
    usual = weights[me] / sum(weights.values())
    if me in kin:
        return usual
    return min(weights[me] / sum(weight for peer, weight in weights.items() if peer not in kin), 2 * usual)


def own_rate(rate: float, part: float) -> float:
    """The share that one member draws, so that a share `rate` is drawn by somebody of those whose parts are 1."""
    unseen: float = (1.0 - rate) ** part
    return 1.0 - unseen


def is_drawn(seed: bytes, peer: PeerId, index: int, rate: float) -> bool:
    """Is that work of that peer looked at again? index: -1 of its whole contribution."""
    return _number(seed, struct.pack("<q", index) + peer.encode()) < rate


def _number(seed: bytes, about: bytes) -> float:
    """In [0, 1)."""
    return int.from_bytes(hashlib.sha256(seed + about).digest()[:6]) / 2.0**48
