"""How tensors cross a stream of messages: a header declares them, raw chunks carry them.

    request    header (protobuf)   chunk*
    answer     header and first chunk in one message   chunk*        the header alone if no tensor is declared

Chunks are bare bytes, `CHUNK_BYTES` each but the last of a tensor; no tensor shares a chunk with the next. A request's
header goes alone, so that a refusal costs nothing; an answer was asked for, and most fit one message. That one begins
with a zero byte, which no protobuf message does, and says where the header ends; the chunk in it begins at a multiple
of 16 bytes, where it can be used without a copy.

The declared length must be one that codec and shape allow, and the sum within the limit, before memory is taken; the
chunks must then fill it exactly. The end of a stream proves nothing (a dying sender looks the same): a payload is whole
when every declared byte has come. TLS authenticates every byte, so there is no hash.

Knows neither gRPC nor what the tensors mean.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.messages import Packed
from swarmnet.wire.codecs import encoded_sizes
from swarmnet.wire.convert import TensorHeader

CHUNK_BYTES = 1 << 21

_LEAD = struct.Struct("<I")  # The header's length times 256: a zero byte, then three of length.

_ALIGNED = 16


def check_declared(declared: Sequence[TensorHeader], *, max_bytes: int) -> int:
    """Total bytes of a declared payload. Raises BadMessage: TOO_LARGE, BAD_SHAPE, MALFORMED. Takes no memory."""
    for tensor in declared:
        shortest, longest = encoded_sizes(tensor.codec, tensor.shape)
        # Before memory is taken: a header of 60 bytes must not reserve a gigabyte.
        if not shortest <= tensor.length <= longest:
            facts = {"codec": tensor.codec, "shape": tensor.shape, "length": tensor.length}
            raise BadMessage(RejectCode.BAD_SHAPE, "length does not fit codec and shape", **facts)
    total = sum(tensor.length for tensor in declared)
    if total > max_bytes:
        raise BadMessage(RejectCode.TOO_LARGE, "payload is too large", num_bytes=total, max_bytes=max_bytes)
    return total


def payload_messages(payload: Sequence[Packed]) -> Iterator[bytes]:
    """The messages that follow a request's header: every tensor in chunks. Copies one chunk at a time, lazily."""
    return map(bytes, pieces(payload, CHUNK_BYTES))


def answer_messages(header: bytes, payload: Sequence[Packed]) -> Iterator[bytes]:
    """An answer's header with its tensors: likewise."""
    chunks = pieces(payload, CHUNK_BYTES)
    first = next(chunks, None)
    if first is None:
        yield header
        return
    begin = _begin(len(header))
    yield b"".join((_LEAD.pack(len(header) << 8), header, bytes(begin - _LEAD.size - len(header)), first))
    yield from map(bytes, chunks)


def split_answer(message: bytes) -> tuple[bytes, memoryview | None]:
    """An answer's header and the chunk that came with it, if one did. Raises BadMessage."""
    # No protobuf message begins with a zero byte.
    if not message or message[0]:
        return message, None
    if len(message) >= _LEAD.size:
        length = _LEAD.unpack_from(message)[0] >> 8
        # The length came from a peer: it may point beyond the end.
        if _begin(length) <= len(message):
            return message[_LEAD.size : _LEAD.size + length], memoryview(message)[_begin(length) :]
    raise BadMessage(RejectCode.MALFORMED, "an answer shorter than its header", num_bytes=len(message))


def _begin(length: int) -> int:
    """Where the chunk begins behind a header of so many bytes."""
    return -(-(_LEAD.size + length) // _ALIGNED) * _ALIGNED


def pieces(payload: Sequence[Packed], most: int) -> Iterator[memoryview]:
    """The tensors in pieces of at most so many bytes, none shared by two tensors. Views: nothing is copied."""
    for tensor in payload:
        view = memoryview(tensor.data).cast("B")
        for start in range(0, len(view), most):
            yield view[start : start + most]


class Assembly:
    """A declared payload on its way in: a tensor of one chunk stays where it came, others are put together.

    Raises BadMessage if it is too large.
    """

    def __init__(self, declared: Sequence[TensorHeader], *, max_bytes: int) -> None:
        self.num_bytes = check_declared(declared, max_bytes=max_bytes)
        """That the whole payload has."""
        self._declared = declared
        self._tensors: list[memoryview] = []
        self._filled = 0  # bytes of the last one
        self._skip_empty()

    @property
    def whole(self) -> bool:
        """Has every byte come?"""
        return len(self._tensors) == len(self._declared) and not self._left

    @property
    def payload(self) -> tuple[Packed, ...]:
        """The tensors; it must be whole."""
        assert self.whole
        pairs = zip(self._declared, self._tensors, strict=True)
        return tuple(Packed(tensor.codec, tensor.shape, data) for tensor, data in pairs)

    def take(self, chunk: bytes | memoryview) -> None:
        """The next chunk. Raises BadMessage if it does not fit."""
        # A tensor of one chunk stays where gRPC has put it: no copy.
        if not self._left and not self.whole and self._declared[len(self._tensors)].length == len(chunk) <= CHUNK_BYTES:
            self._tensors.append(memoryview(chunk))
            self._filled = len(chunk)
            self._skip_empty()
        else:
            self.buffer(len(chunk), most=CHUNK_BYTES)[:] = chunk

    def buffer(self, num_bytes: int, *, most: int) -> memoryview:
        """Where the next piece goes, which then counts as come. Pieces have `most` bytes, but the last of a tensor.

        Raises BadMessage if it does not fit.
        """
        # A sender that goes on after the end would fill memory.
        if self.whole:
            raise BadMessage(RejectCode.MALFORMED, "more than was declared", num_bytes=num_bytes)
        left = self._left or self._declared[len(self._tensors)].length
        # Pieces have one size, so that no peer sends a gigabyte in single bytes.
        if num_bytes != min(most, left):
            raise BadMessage(RejectCode.MALFORMED, "piece does not fit", num_bytes=num_bytes, left=left)
        if not self._left:
            # Not a bytearray: that would first write every byte as zero.
            self._tensors.append(np.empty(left, dtype=np.uint8).data)
            self._filled = 0
        self._filled += num_bytes
        place = self._tensors[-1][self._filled - num_bytes : self._filled]
        self._skip_empty()
        return place

    @property
    def _left(self) -> int:
        """Bytes that the tensor under way still lacks."""
        return len(self._tensors[-1]) - self._filled if self._tensors else 0

    def _skip_empty(self) -> None:
        """No chunk comes for a tensor without bytes."""
        while not self._left and len(self._tensors) < len(self._declared):
            if self._declared[len(self._tensors)].length:
                return
            self._tensors.append(memoryview(b""))
            self._filled = 0
