"""Why a link ends is said if it can be said, and costs nothing else."""

from __future__ import annotations

from typing import Any

import grpc

from swarmnet.errors import RejectCode
from swarmnet.messages import Rejected
from swarmnet.net.grpc_callee import _last_word


class Stream:
    """Takes what is written, or fails as gRPC does while a cancelled write is under way."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.written = error, 0

    async def write(self, data: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.written += bool(data)


async def test_a_last_word_that_cannot_be_written_is_left_unsaid() -> None:
    stream: Any
    for stream, written in ((Stream(), 1), (Stream(grpc.aio.InternalError("GRPC_CALL_ERROR_TOO_MANY_OPERATIONS")), 0)):
        await _last_word(stream, Rejected(RejectCode.MALFORMED, "no message"))
        assert stream.written == written
