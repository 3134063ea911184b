"""How tensors cross a stream of messages: a header declares them, raw chunks carry them, an End closes them.

    header (protobuf)   chunk*   End { num_bytes }          no chunks and no End if the header declares no tensor

Chunks are bare bytes, 1 MiB each but the last of a tensor; no tensor shares a chunk with the next. The declared length
must be what codec and shape require, and the sum within the limit, before memory is taken; the chunks must then fill it
exactly. The end of a stream proves nothing (a dying sender looks the same), only End does. TLS authenticates every
byte, so End carries a count and no hash.

Knows neither gRPC nor what the tensors mean: it is given a way to read the next message of a stream.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence

import numpy as np

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.messages import Packed
from swarmnet.wire.codecs import encoded_bytes
from swarmnet.wire.convert import read_end, write_end
from swarmnet.wire.convert_calls import TensorHeader

CHUNK_BYTES = 1 << 20

ReadMessage = Callable[[], Awaitable[bytes]]
"""The next message of a stream. It raises (PeerGone) when there is none: an end in the middle is never clean."""


def check_declared(declared: Sequence[TensorHeader], *, max_bytes: int) -> int:
    """Total bytes of a declared payload. Raises BadMessage: TOO_LARGE, BAD_SHAPE, MALFORMED. Takes no memory."""
    for tensor in declared:
        if tensor.length != encoded_bytes(tensor.codec, tensor.shape):
            raise BadMessage(
                RejectCode.BAD_SHAPE, "length does not fit codec and shape",
                codec=tensor.codec, shape=tensor.shape, length=tensor.length,
            )
    total = sum(tensor.length for tensor in declared)
    if total > max_bytes:
        raise BadMessage(RejectCode.TOO_LARGE, "payload is too large", num_bytes=total, max_bytes=max_bytes)
    return total


def payload_messages(payload: Sequence[Packed]) -> Iterator[bytes]:
    """The messages that follow the header: every tensor in chunks, then End. Copies one chunk at a time, lazily."""
    if not payload:
        return
    for tensor in payload:
        view = memoryview(tensor.data).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            yield bytes(view[start : start + CHUNK_BYTES])
    yield write_end(sum(tensor.num_bytes for tensor in payload))


async def read_payload(read: ReadMessage, declared: Sequence[TensorHeader], *, max_bytes: int) -> tuple[Packed, ...]:
    """Receive a declared payload, each tensor into one buffer. Raises BadMessage, and what `read` raises."""
    if not declared:
        return ()
    total = check_declared(declared, max_bytes=max_bytes)
    payload = []
    for tensor in declared:
        data = await _read_tensor(read, tensor.length)
        payload.append(Packed(tensor.codec, tensor.shape, data))
    if (told := read_end(await read())) != total:
        raise BadMessage(RejectCode.MALFORMED, "the end message counts other bytes", told=told, received=total)
    return tuple(payload)


async def _read_tensor(read: ReadMessage, length: int) -> memoryview:
    data = np.empty(length, dtype=np.uint8).data        # not a bytearray: that would first write every byte as zero
    filled = 0
    while filled < length:
        chunk = await read()
        if len(chunk) != min(CHUNK_BYTES, length - filled):
            raise BadMessage(RejectCode.MALFORMED, "chunk does not fit", num_bytes=len(chunk), left=length - filled)
        data[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    return data
