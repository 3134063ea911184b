"""What is said on one stream, each message packed with the help of those before it.

Heartbeats, reports and prepares repeat what they said last but for a few bytes: of 250 bytes 10 are left. Each message
is one raw DEFLATE block that ends on a byte, as in WebSockets (RFC 7692, section 7.2.1): the four bytes 00 00 ff ff
that end each of them are left out. Both ends forget with the stream.
"""

from __future__ import annotations

import zlib

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.wire.codec import malformed

_TAIL = b"\x00\x00\xff\xff"

_WINDOW_BITS, _MEMORY_LEVEL = 11, 4
"""How far back a message is looked for: 2 KiB, for 20 KiB of memory at both ends of a stream."""


class Deflater:
    """The writing end of one stream."""

    def __init__(self) -> None:
        self._packer = zlib.compressobj(wbits=-_WINDOW_BITS, memLevel=_MEMORY_LEVEL)

    def __call__(self, message: bytes) -> bytes:
        """The bytes to send, after all those before."""
        return (self._packer.compress(message) + self._packer.flush(zlib.Z_SYNC_FLUSH))[: -len(_TAIL)]


class Inflater:
    """The reading end of one stream. most_bytes: no message is longer."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._unpacker = most_bytes, zlib.decompressobj(wbits=-_WINDOW_BITS)

    def __call__(self, data: bytes) -> bytes:
        """The message. Raises BadMessage: MALFORMED, TOO_LARGE."""
        # Unpacking takes time by what comes in, too: empty blocks unpack to nothing.
        if len(data) > self._most_bytes + self._most_bytes // 1000 + 64:
            raise BadMessage(RejectCode.TOO_LARGE, f"{len(data)} bytes for a message of {self._most_bytes} at most")
        try:
            # One more than there may be is enough to refuse it: what is beyond is not unpacked.
            message = self._unpacker.decompress(data + _TAIL, self._most_bytes + 1)
        except zlib.error as error:
            raise malformed("is not packed as messages of a stream are", error=str(error)) from error
        if len(message) > self._most_bytes or self._unpacker.unconsumed_tail:
            raise BadMessage(RejectCode.TOO_LARGE, f"a message longer than {self._most_bytes} bytes")
        if self._unpacker.eof or self._unpacker.unused_data:
            raise malformed("ends its stream of messages")
        return message
