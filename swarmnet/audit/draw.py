"""Whose work is looked at again, and by whom. Pure.

Drawn from the stage's chain two versions later: it hashes the commits of the audited step and of the one after it. So
the draw is known to nobody who can still change what it pledged, and then to everybody at once.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable

from swarmnet.ids import Chain, PeerId
from swarmnet.messages import Case

_SEED = b"swarmnet draw 1\0"


def seed_of(step: int, stage: int, later: Chain) -> bytes:
    """The seed of the draws among the works of a step. later: the stage's chain at version step + 2."""
    return hashlib.sha256(_SEED + struct.pack("<qq", step, stage) + later.encode()).digest()


def index_drawn(seed: bytes, index: int, rate: float) -> bool:
    """Is the work of that microbatch looked at again? rate: share of those that are."""
    return _number(seed, b"index", struct.pack("<q", index)) < rate


def share_drawn(seed: bytes, peer: PeerId, rate: float) -> bool:
    """Is the whole contribution of that peer looked at again?"""
    return _number(seed, b"share", peer.encode()) < rate


def auditors(seed: bytes, case: Case, candidates: Iterable[PeerId], operator: Callable[[PeerId], str]) -> list[PeerId]:
    """Who is to audit that case, the first one first; never the accused, of its own operator only if there is no other.

    operator: who stands behind a peer, as far as can be seen: those of one key may be accomplices.
    """
    mine, about = operator(case.accused), struct.pack("<q", case.index) + case.accused.encode()

    def key(peer: PeerId) -> tuple[bool, float, PeerId]:
        return operator(peer) == mine, _number(seed, b"auditor", about + peer.encode()), peer

    return sorted((peer for peer in candidates if peer != case.accused), key=key)


def _number(seed: bytes, kind: bytes, about: bytes) -> float:
    """In [0, 1)."""
    return int.from_bytes(hashlib.sha256(seed + kind + b"\0" + about).digest()[:6]) / 2.0**48


def chance_named(
    own: float, *, false: float, per_step: float, microbatches: float, contributions: float, members: int, liars: int
) -> float:
    """How likely is a liar named by the time that it has counted `own` microbatches? docs/trust.md derives it.

    Args:
        false: share of them that are false.
        per_step: how many it counts in a step.
        microbatches, contributions: shares that are drawn, as in the manifest.
        members: contributors of its stage.
        liars: those of them that cover for each other, itself among them; one of its operator, alone: 1.
    """
    # Half of the jury lies: a trial names nobody.
    if 2 * liars >= members or members < 3:
        return 0.0
    # Its auditor is any of the others alike, and tells if it is honest.
    honest = (members - liars) / (members - 1)
    unseen: float = (1.0 - microbatches * honest) ** (false * own)
    share_is_false = 1.0 - (1.0 - false) ** per_step
    no_share: float = (1.0 - contributions * honest * share_is_false) ** (own / per_step)
    return 1.0 - unseen * no_share
