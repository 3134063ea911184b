"""How tensors cross a stream of messages: a header declares them, raw chunks carry them, an End closes them.

    header (protobuf)   chunk*   End { num_bytes }          no chunks and no End if the header declares no tensor

Chunks are bare bytes, 1 MiB each but the last of a tensor; no tensor shares a chunk with the next. The declared length
must be one that codec and shape allow, and the sum within the limit, before memory is taken; the chunks must then fill
it exactly. The end of a stream proves nothing (a dying sender looks the same), only End does. TLS authenticates every
byte, so End carries a count and no hash.

Knows neither gRPC nor what the tensors mean: it is given a way to read the next message of a stream.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence

import numpy as np

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.messages import Packed
from swarmnet.wire.codecs import encoded_sizes
from swarmnet.wire.convert import read_end, write_end
from swarmnet.wire.convert_calls import TensorHeader

CHUNK_BYTES = 1 << 20

ReadMessage = Callable[[], Awaitable[bytes]]
"""The next message of a stream. It raises (PeerGone) when there is none: an end in the middle is never clean."""


def check_declared(declared: Sequence[TensorHeader], *, max_bytes: int) -> int:
    """Total bytes of a declared payload. Raises BadMessage: TOO_LARGE, BAD_SHAPE, MALFORMED. Takes no memory."""
    for tensor in declared:
        shortest, longest = encoded_sizes(tensor.codec, tensor.shape)
        if not shortest <= tensor.length <= longest:
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


class Assembly:
    """A declared payload on its way in, each tensor into one buffer. Raises BadMessage if it is too large."""

    def __init__(self, declared: Sequence[TensorHeader], *, max_bytes: int) -> None:
        self._declared, self._total = declared, check_declared(declared, max_bytes=max_bytes)
        self._tensors: list[memoryview] = []
        self._filled = 0
        self.whole = not declared
        """Has the End message come?"""

    @property
    def payload(self) -> tuple[Packed, ...]:
        """The tensors; it must be whole."""
        assert self.whole
        pairs = zip(self._declared, self._tensors, strict=True)
        return tuple(Packed(tensor.codec, tensor.shape, data) for tensor, data in pairs)

    def take(self, message: bytes) -> None:
        """The next message. Raises BadMessage if it does not fit."""
        data = self._tensor()
        if data is None:
            if (told := read_end(message)) != self._total:
                raise BadMessage(
                    RejectCode.MALFORMED, "the end message counts other bytes", told=told, received=self._total
                )
            self.whole = True
            return
        left = len(data) - self._filled
        if len(message) != min(CHUNK_BYTES, left):
            raise BadMessage(RejectCode.MALFORMED, "chunk does not fit", num_bytes=len(message), left=left)
        data[self._filled : self._filled + len(message)] = message
        self._filled += len(message)

    def _tensor(self) -> memoryview | None:
        """The one that the next chunk belongs to; memory is taken when its turn comes. None after the last one."""
        while not self._tensors or self._filled == len(self._tensors[-1]):
            if len(self._tensors) == len(self._declared):
                return None
            length = self._declared[len(self._tensors)].length
            # Not a bytearray: that would first write every byte as zero.
            self._tensors.append(np.empty(length, dtype=np.uint8).data)
            self._filled = 0
        return self._tensors[-1]


async def read_payload(read: ReadMessage, declared: Sequence[TensorHeader], *, max_bytes: int) -> tuple[Packed, ...]:
    """Receive a declared payload. Raises BadMessage, and what `read` raises."""
    assembly = Assembly(declared, max_bytes=max_bytes)
    while not assembly.whole:
        assembly.take(await read())
    return assembly.payload
