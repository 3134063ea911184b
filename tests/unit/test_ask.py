"""Asking a peer: signs of life prolong the wait, silence and an end without an answer are the peer's failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Answer, Packed, Rejected, Request, Running, SnapshotRequest
from swarmnet.testing.clock import VirtualLoop
from swarmnet.transport import ask

PEER = PeerId("p")
NO = Rejected(RejectCode.NOT_FOUND, "no")


class Script:
    """A transport whose calls play a script: seconds to wait, answers to give, errors to raise."""

    def __init__(self, *script: float | Answer | Exception) -> None:
        self.script, self.left = script, False

    def tell(self, peer: PeerId, message: object) -> None:
        raise AssertionError("nothing is told")

    async def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        try:
            for scene in self.script:
                if isinstance(scene, float):
                    await asyncio.sleep(scene)
                elif isinstance(scene, Exception):
                    raise scene
                else:
                    yield scene
        finally:
            self.left = True


def play(script: Script, *, patience_s: float = 5.0, limit_s: float = 3600.0) -> tuple[Answer, int]:
    """The answer, and how many signs of life were heard."""
    heard: list[float] = []

    async def story() -> Answer:
        clock = asyncio.get_running_loop().time
        return await ask(
            script,
            PEER,
            SnapshotRequest(0),
            patience=lambda: patience_s,
            heard=lambda: heard.append(clock()),
            limit_s=limit_s,
        )

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(story()), len(heard)


def test_a_peer_that_shows_life_is_waited_for_however_long() -> None:
    script = Script(Accepted(), *[4.0, Running()] * 100, 4.0, NO)
    assert play(script) == (NO, 102)


def test_signs_of_life_do_not_hold_a_caller_beyond_its_limit() -> None:
    script = Script(Accepted(), *[4.0, Running()] * 100)
    with pytest.raises(PeerTimeout) as caught:
        play(script, limit_s=41.0)
    assert caught.value.facts["limit_s"] == 41.0 and script.left
    assert script.left, "the call is closed, not left to the garbage collector"


def test_silence_is_the_peers_failure() -> None:
    script = Script(Accepted(), 6.0, NO)
    with pytest.raises(PeerTimeout, match="silent"):
        play(script)
    assert script.left


def test_an_end_without_an_answer_is_the_peers_failure() -> None:
    with pytest.raises(PeerGone, match="without an answer"):
        play(Script(Accepted(), Running()))


@pytest.mark.parametrize(
    "error", [PeerGone("refused", definite=True), PeerTimeout("late"), BadMessage(RejectCode.MALFORMED, "garbage")]
)
def test_what_the_transport_says_is_passed_on(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        play(Script(Accepted(), error))
    assert caught.value is error
