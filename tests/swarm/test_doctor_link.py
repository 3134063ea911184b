"""The doctor measures what arrives from a member with a piece of its state: on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest
from test_grpc_transport import grpc_pair

from swarmnet.errors import Refused, RejectCode
from swarmnet.ids import Chain, PeerId
from swarmnet.messages import (
    Answer,
    Busy,
    History,
    HistoryRequest,
    Packed,
    Rejected,
    Request,
    Snapshot,
    SnapshotPiece,
    StateHeader,
)
from swarmnet.peer.doctor import _fetch_rate, _round_trip
from swarmnet.state.snapshot_source import described
from swarmnet.transport import ReadPayload
from tests.contracts.transport_contract import LIMIT_S

HEADER = StateHeader(0, Chain("0a" * 32), Chain("0b" * 32), Chain("00" * 32))


@pytest.mark.parametrize(
    ("num_bytes", "busy", "measured"),
    [(1 << 20, False, True), (1000, False, False), (1, True, False), (0, False, False)],
)
def test_a_piece_of_state_tells_the_bandwidth(num_bytes: int, busy: bool, measured: bool) -> None:
    async def answer(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
        if isinstance(request, HistoryRequest):
            yield History()
        elif busy:
            yield Busy(5.0, 0)
        elif num_bytes == 0:
            yield Rejected(RejectCode.NOT_ADMITTED, "banned")
        elif request.piece < 0:
            yield Snapshot(0, HEADER, described(bytes(num_bytes), num_bytes))
        else:
            yield SnapshotPiece((Packed("uint8", (num_bytes,), bytes(num_bytes)),))

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), grpc_pair() as pair:
            pair.b.service.answering = answer
            round_trip_s = await _round_trip(pair.a.transport, pair.b.peer)
            assert 0 < round_trip_s < LIMIT_S
            with pytest.raises(Refused) if num_bytes == 0 else contextlib.nullcontext():
                assert (await _fetch_rate(pair.a.transport, pair.b.peer, 0, round_trip_s) > 0) == measured

    asyncio.run(main())
