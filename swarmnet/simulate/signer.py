"""Signatures without keys, for simulated peers: a hash of who signs and what."""

from __future__ import annotations

import hashlib

from swarmnet.ids import PeerId


class SimulatedSigner:
    """A `Signer`."""

    def __init__(self, me: PeerId) -> None:
        self._me = me

    def sign(self, data: bytes) -> bytes:
        return _signature(self._me, data)

    def verify(self, peer: PeerId, data: bytes, signature: bytes) -> bool:
        return signature == _signature(peer, data)


def _signature(peer: PeerId, data: bytes) -> bytes:
    return hashlib.sha256(peer.encode() + b"\0" + data).digest()
