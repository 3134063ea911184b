"""gRPC's errors in our words, in one place, and how the death of a process is told from a broken connection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, RejectCode, SwarmError
from swarmnet.ids import PeerId
from swarmnet.net.address import Address

SERVICE_FAILED = "the service failed; its log says why"
"""Details of the INTERNAL status that answers a call our own bug has ended."""

_PROBES = 3
_PROBE_EVERY_S = 0.04
_PROBE_TIMEOUT_S = 0.3


def translate(error: grpc.aio.AioRpcError, peer: PeerId, *, definite: bool = False) -> SwarmError:
    """What a failed call means. `definite`: what `nobody_listens` found out about a broken connection."""
    details = (error.details() or "")[:300]
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return PeerTimeout("no answer in time", peer=peer)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return BadMessage(RejectCode.TOO_LARGE, "message is too long", peer=peer, details=details)
        case grpc.StatusCode.UNIMPLEMENTED:
            return BadMessage(RejectCode.WRONG_VERSION, "the peer does not know this call", peer=peer, details=details)
    return PeerGone("connection broke", definite=definite, peer=peer, status=error.code().name, details=details)


def is_break(error: grpc.aio.AioRpcError) -> bool:
    """Whether the connection failed, and not only the call."""
    match error.code():
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return True
        case grpc.StatusCode.INTERNAL:  # a reset stream, unless the callee confessed
            return bool(error.details() != SERVICE_FAILED)
    return False


async def nobody_listens(addresses: Sequence[Address]) -> bool:
    """Dial a peer that just broke off. True proves its process gone: every address refuses the connection.

    A killed process's port may outlive its connections by an instant, so an open port is dialled again.
    """
    for attempt in range(_PROBES):
        if attempt:
            await asyncio.sleep(_PROBE_EVERY_S)
        if all([await refuses(address) for address in addresses]):
            return True
    return False


async def refuses(address: Address) -> bool:
    """Dial an address once: does nobody listen there?"""
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except ConnectionRefusedError:
        return True
    except OSError:  # unreachable, reset, TimeoutError: proves nothing
        return False
    writer.close()
    return False
