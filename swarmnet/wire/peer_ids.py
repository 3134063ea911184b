"""libp2p's peer ids: base58 text that embeds an Ed25519 public key."""

from __future__ import annotations

import functools

import base58

from swarmnet.ids import PeerId

PEER_ID_CHARS = 52

# Identity multihash of 36 bytes: protobuf PublicKey { Ed25519, 32 bytes }.
_PREFIX = bytes((0x00, 0x24, 0x08, 0x01, 0x12, 0x20))


_REMEMBERED = 1 << 14
"""Ids of more peers than a run has, so that their base58 is computed once: some 3 MB."""


@functools.lru_cache(maxsize=_REMEMBERED)
def peer_id_from_public_bytes(raw: bytes) -> PeerId:
    """The peer id that embeds a 32-byte Ed25519 public key."""
    assert len(raw) == 32, "an Ed25519 public key has 32 bytes"
    return PeerId(base58.b58encode(_PREFIX + raw).decode("ascii"))


@functools.lru_cache(maxsize=_REMEMBERED)
def public_bytes_of(peer: PeerId) -> bytes:
    """The 32 bytes of the Ed25519 public key that a peer id embeds. Raises ValueError."""
    # The length first: base58 of a long text takes time that grows with its square.
    if len(peer) != PEER_ID_CHARS or not peer.isascii():
        raise ValueError("not an Ed25519 peer id")
    raw = base58.b58decode(peer)
    # libp2p also knows ids of RSA keys, and hashes of long keys; a run's peers have Ed25519 keys.
    if len(raw) != len(_PREFIX) + 32 or not raw.startswith(_PREFIX):
        raise ValueError("not an Ed25519 peer id")
    return raw[len(_PREFIX) :]


def is_peer_id(text: str) -> bool:
    """Whether `text` is the base58 peer id of an Ed25519 key."""
    try:
        public_bytes_of(PeerId(text))
    except ValueError:
        return False
    return True
