"""Asking a peer: signs of life prolong the wait, silence and an end without an answer are the peer's failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Answer, Rejected, Running, SnapshotRequest
from swarmnet.testing import doubles
from swarmnet.testing.doubles import FakeTransport, Script, run_virtual
from swarmnet.transport import ask

PEER = PeerId("p")
NO = Rejected(RejectCode.NOT_FOUND, "no")


def script(*parts: Script) -> FakeTransport:
    """A transport whose calls play a script; left: the call was closed."""

    async def answer() -> AsyncGenerator[Answer, None]:
        try:
            async for said in doubles.play([*parts]):
                yield said
        finally:
            transport.left = True

    transport: Any = FakeTransport(lambda peer, request: answer())
    transport.left = False
    return transport


def play(transport: FakeTransport, *, patience_s: float = 5.0, limit_s: float = 3600.0) -> tuple[Answer, int]:
    """The answer, and how many signs of life were heard."""
    heard: list[float] = []

    async def story() -> Answer:
        clock = asyncio.get_running_loop().time
        return await ask(
            transport,
            PEER,
            SnapshotRequest(0),
            patience=lambda: patience_s,
            heard=lambda: heard.append(clock()),
            limit_s=limit_s,
        )

    return run_virtual(story()), len(heard)


def test_a_peer_that_shows_life_is_waited_for_however_long() -> None:
    transport = script(Accepted(), *[4.0, Running()] * 100, 4.0, NO)
    assert play(transport) == (NO, 102)


def test_signs_of_life_do_not_hold_a_caller_beyond_its_limit() -> None:
    transport = script(Accepted(), *[4.0, Running()] * 100)
    with pytest.raises(PeerTimeout) as caught:
        play(transport, limit_s=41.0)
    assert caught.value.facts["limit_s"] == 41.0 and transport.left
    assert transport.left, "the call is closed, not left to the garbage collector"


def test_silence_is_the_peers_failure() -> None:
    transport = script(Accepted(), 6.0, NO)
    with pytest.raises(PeerTimeout, match="silent"):
        play(transport)
    assert transport.left


def test_an_end_without_an_answer_is_the_peers_failure() -> None:
    with pytest.raises(PeerGone, match="without an answer"):
        play(script(Accepted(), Running()))


@pytest.mark.parametrize(
    "error", [PeerGone("refused", definite=True), PeerTimeout("late"), BadMessage(RejectCode.MALFORMED, "garbage")]
)
def test_what_the_transport_says_is_passed_on(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        play(script(Accepted(), error))
    assert caught.value is error
