"""What does the line to a peer carry? A megabyte goes there and one comes back, seldom: `swarmnet doctor` asks.

Both ends: who asks (`measure`), and who is asked (`LineTests`), who lets nobody fill a line with it: one test at a
time, for 20 s at most, one every two seconds of whomever, one a minute of each caller, and what it sends gives way to
what steps need.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from swarmnet.clock import loop_time
from swarmnet.errors import PeerGone
from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Answer, Busy, LineTest, LineTested, Packed, Rejected, Running
from swarmnet.net.limits import LINE_TESTS
from swarmnet.pacing import Budgets
from swarmnet.transport import ReadPayload, Transport, ask

TEST_BYTES = 1 << 20
_PINGS = 3
_LIMIT_S, _LONGEST_BUSY_S = 20.0, 5.0
_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class MeasuredLine:
    """round_trip_s: the least of a few empty calls. Rates in bytes per second, as far as a megabyte tells; 0: the peer
    was busy with other tests."""

    round_trip_s: float
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0


def bytes_per_s(seconds: float, round_trip_s: float) -> float:
    """What the line carries, if the test's bytes and a round trip took so long.

    The round trip was another one, on a busy machine as long as all of it: it is credited with three quarters at most.
    """
    return TEST_BYTES / max(seconds - round_trip_s, seconds / 4, 1e-6)


async def measure(transport: Transport, peer: PeerId) -> MeasuredLine:
    """Raises PeerGone, PeerTimeout, BadMessage."""
    round_trips = []
    for _ in range(_PINGS):  # the first one opens the connection
        began = loop_time()
        await ask(transport, peer, LineTest(), limit_s=_LIMIT_S)
        round_trips.append(loop_time() - began)
    until, round_trip_s = loop_time() + _LIMIT_S, min(round_trips)
    while isinstance(found := await _loaded(transport, peer, round_trip_s, until), Busy):
        if found.retry_after_s > _LONGEST_BUSY_S or loop_time() >= until:
            return MeasuredLine(round_trip_s)
        await asyncio.sleep(found.retry_after_s)
    return found


async def _loaded(transport: Transport, peer: PeerId, round_trip_s: float, until: float) -> MeasuredLine | Busy:
    payload, began, uploaded_at = (_bytes(TEST_BYTES),), loop_time(), 0.0
    answers = transport.call(peer, LineTest(TEST_BYTES), payload, deadline=until)
    async with contextlib.aclosing(answers):
        async for answer in answers:
            match answer:
                case Running() if not uploaded_at:  # later ones say that the payload is arriving
                    uploaded_at = loop_time()
                case Busy():
                    return answer
                case Rejected():
                    raise PeerGone(f"it does not test lines: {answer.reason}", peer=peer)
                case LineTested():
                    return MeasuredLine(
                        round_trip_s,
                        bytes_per_s(uploaded_at - began, round_trip_s),
                        bytes_per_s(loop_time() - uploaded_at, 0.0),
                    )
    raise PeerGone("the call ended without an answer", peer=peer)


def _bytes(count: int) -> Packed:
    return Packed("uint8", (count,), bytes(count))


class LineTests:
    """Answers `LineTest`."""

    def __init__(self) -> None:
        self._each, self._free_at = Budgets[PeerId](LINE_TESTS), -math.inf

    async def serve(self, caller: PeerId, request: LineTest, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
        """An empty one costs no more than any message, and is answered at once."""
        if not (request.num_bytes or payload.declared):
            yield LineTested()
            return
        now = loop_time()
        # Identities cost nothing, so all callers together wait as well.
        if (wait_s := max(self._each.of(caller).wait_s(now), min(self._free_at - now, _EVERY_S))) > 0:
            yield Busy(wait_s, -1)
            return
        self._each.of(caller).take(now)
        # A caller that sends or reads too slowly keeps others out for so long, and not for longer.
        self._free_at = mine = now + _LIMIT_S
        try:
            yield Accepted()
            async with asyncio.timeout_at(mine):
                await payload()
            yield Running()
            yield LineTested((_bytes(request.num_bytes),))
        except TimeoutError as error:
            raise PeerGone("it sends too slowly", peer=caller) from error
        finally:
            if self._free_at == mine:
                self._free_at = now + _EVERY_S
