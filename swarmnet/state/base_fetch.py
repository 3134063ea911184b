"""Fetch the frozen weights of a stage from peers that have them, into a file: in pieces, from all at once.

The manifest names the content (`model.base_file`), so no peer has to be believed: what is described or sent and does
not fit that name is refused, and its sender is not asked again by this fetch. A fetch that was broken off goes on with
the pieces that are in the file.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any

from swarmnet.errors import BadMessage, NoReplica, RejectCode, unwritable
from swarmnet.fetch.driver import HolderCalls, PieceFetch, expect, first_answers
from swarmnet.fetch.plan import address, check_content, digest_of, num_pieces, piece_size, span
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Content, SnapshotPiece, SnapshotRequest
from swarmnet.transport import ask

_DESCRIBED_S = 60.0
"""How long a description is waited for: a Byzantine holder may promise it for ever."""

_PIECE_S, _SLOWEST_BYTES_PER_S = 60.0, 32_000
"""A piece takes so long at most, and so long as a very slow line takes for it; then its holder is given up."""

FetchedBytes = Callable[[int, int], None]
"""Called with the bytes that are here, and with all."""


async def fetch_base(
    calls: HolderCalls,
    holders: Collection[PeerId],
    stage: int,
    path: Path,
    *,
    root: str,
    num_bytes: int,
    fetched: FetchedBytes = lambda done, all_bytes: None,
) -> None:
    """Put the content with the address `root`, of so many bytes, into `path`. Raises NoReplica; UsageError if it cannot
    be written."""
    named = bytes.fromhex(root)

    def describe(source: PeerId) -> Coroutine[Any, Any, Content | None]:
        def take(answer: Answer) -> Content:
            content = expect(answer, Content, source)
            check_content(content, max_bytes=num_bytes, holder=source)
            # Other lengths would be another file, whatever its name.
            as_made = (content.num_bytes, content.piece_bytes) == (num_bytes, piece_size(num_bytes))
            if address(content) != named or not as_made:
                raise BadMessage(RejectCode.MALFORMED, "describes another content than was asked for", peer=source)
            return content

        return calls.ask(source, SnapshotRequest(stage, content=named), take)

    described = {holder: describe(holder) for holder in holders}
    answers, _ = await first_answers(described, counts=lambda answer: answer is not None, most_s=_DESCRIBED_S)
    content = next(filter(None, answers.values()), None)
    if content is None:
        raise NoReplica("no peer has the frozen weights", stage=stage)
    try:
        # Of all, not only of those that described it first: who has nothing of it says so.
        await _pull(calls, sorted(calls.usable(holders)), content, stage, path, named, fetched)
    except OSError as error:
        raise unwritable(path, error) from error


async def _pull(
    calls: HolderCalls,
    holders: Sequence[PeerId],
    content: Content,
    stage: int,
    path: Path,
    named: bytes,
    fetched: FetchedBytes,
) -> None:
    partial, limit_s = path.with_suffix(".part"), _PIECE_S + content.piece_bytes / _SLOWEST_BYTES_PER_S
    done = await asyncio.to_thread(_prepared, partial, content)
    with partial.open("r+b") as file:

        def put(piece: int, data: bytes | bytearray | memoryview) -> bool:
            if hashlib.sha256(data).digest() != digest_of(content, piece):
                return False
            if os.pwrite(file.fileno(), data, span(content, piece)[0]) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return True

        async def get(source: PeerId, piece: int) -> None:
            request = SnapshotRequest(stage, content=named, piece=piece)
            answer = expect(await ask(calls.transport, source, request, limit_s=limit_s), SnapshotPiece, source)
            # Hashing and writing are of megabytes.
            if len(answer.payload) != 1 or not await asyncio.to_thread(put, piece, answer.payload[0].data):
                raise BadMessage(RejectCode.MALFORMED, "a piece that is not the one described", peer=source)
            done.add(piece)
            fetched(sum(stop - start for start, stop in (span(content, each) for each in done)), content.num_bytes)

        fetch = PieceFetch(num_pieces(content), get, holders, done=done, dropped=calls.failed)
        if (error := await fetch.run()) is not None:
            raise NoReplica(f"the frozen weights came in part only: {error}", stage=stage)
        await asyncio.to_thread(os.fsync, file.fileno())
    partial.replace(path)


def _prepared(partial: Path, content: Content) -> set[int]:
    """The pieces that an earlier fetch has left in the file, which has the content's length now."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    done, begun = set[int](), partial.exists()
    with partial.open("r+b" if begun else "w+b") as file:
        file.truncate(content.num_bytes)
        if not begun:
            return done
        for piece in range(num_pieces(content)):
            start, stop = span(content, piece)
            if hashlib.sha256(os.pread(file.fileno(), stop - start, start)).digest() == digest_of(content, piece):
                done.add(piece)
    return done
