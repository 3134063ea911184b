"""What the caller makes of answers that are wrong: it leaves who gave them, and believes no single refusal."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from swarmnet.errors import NoReplica, PeerGone, Refused, RejectCode
from swarmnet.ids import PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.messages import Busy, Gradient, MovedTo, Packed, Process, Rejected, Request, Running
from swarmnet.pipeline.caller import OF_PAYLOAD, Caller
from swarmnet.pipeline.inputs import AnswerCheck
from swarmnet.pipeline.router import Router
from swarmnet.testing.doubles import FakeTransport, run_virtual

TIMERS = Timers()

pytestmark = pytest.mark.virtual_time

CHECK = AnswerCheck((("fp32", (1, 1, 1)),), num_tokens=1)
REQUEST = Process(0, 1, 0)
PAYLOAD = (Packed("int32", (1, 2), bytes(8)),)


def gradient(value: float = 1.0, **changes: object) -> Gradient:
    answer = Gradient(0.5, 1, 0.01, (Packed("fp32", (1, 1, 1), struct.pack("<f", value)),))
    return replace(answer, **changes)  # type: ignore[arg-type]


class NextReplicas:
    """Implements CalledStage. queues: of the candidates. rerouted_from: (peer, reason), in order."""

    def __init__(self, queues: dict[PeerId, int], leaving: frozenset[PeerId] = frozenset()) -> None:
        self.queues, self._leaving = queues, leaving
        self.rerouted_from: list[tuple[PeerId, str]] = []

    def candidates(self) -> dict[PeerId, int]:
        return self.queues

    def leaving(self) -> frozenset[PeerId]:
        return self._leaving

    def contributors(self) -> frozenset[PeerId]:
        return frozenset()

    def left(self, step: int) -> None:
        """It cannot tell."""

    def rerouted(self, request: Request, peer: PeerId, reason: str) -> None:
        self.rerouted_from.append((peer, reason))


class Scene:
    """A caller in front of scripted replicas; left: whom a microbatch had to leave, and why."""

    def __init__(self, **peers) -> None:
        self.transport, self.router = FakeTransport(**peers), Router(TIMERS)
        stage = NextReplicas(dict.fromkeys(map(PeerId, peers), 0))
        self.peers, self.left = stage.queues, stage.rerouted_from
        self.caller = Caller(self.transport, self.router, stage, CHECK)

    async def process(self, request: Process = REQUEST) -> Gradient:
        return await self.caller.process(request, PAYLOAD)


BAD = {
    "nan": gradient(math.nan),
    "infinity": gradient(-math.inf),
    "shape": gradient(payload=(Packed("fp32", (1, 1, 2), bytes(8)),)),
    "codec": gradient(payload=(Packed("bf16", (1, 1, 1), bytes(2)),)),
    "length": gradient(payload=(Packed("fp32", (1, 1, 1), bytes(3)),)),
    "nothing": gradient(payload=()),
    "two": gradient(payload=gradient().payload * 2),
    "tokens": gradient(num_tokens=2),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
async def test_a_bad_gradient_bans_its_sender_and_another_is_asked(bad: Gradient) -> None:
    scene = Scene(a=lambda request: bad, b=lambda request: gradient())
    assert await scene.process() == gradient()
    assert scene.left == [("a", "BadMessage")]
    with pytest.raises(NoReplica) as none:
        scene.router.pick(num_bytes=8, now=asyncio.get_running_loop().time(), exclude=frozenset({"b"}))
    assert none.value.facts["banned"] == 1


async def test_an_evaluation_is_answered_without_a_gradient() -> None:
    scene = Scene(a=lambda request: gradient(), b=lambda request: gradient(payload=()))
    assert (await scene.process(Process(0, 1, 0, purpose="eval"))).payload == ()
    assert scene.left == [("a", "BadMessage")]


EVALUATION = Process(0, 1, 0, purpose="eval")


async def test_a_route_begins_with_who_was_called() -> None:
    """A replica can lie about those after it, and not about itself."""
    scene = Scene(a=lambda request: gradient(payload=(), route=("z",)))
    scene.caller._check = replace(CHECK, further=1)
    assert (await scene.process(EVALUATION)).route == ("a", "z")


@pytest.mark.parametrize("request_, route", [(EVALUATION, ()), (EVALUATION, ("x", "y")), (REQUEST, ("x",))])
async def test_a_route_of_another_length_is_no_answer(request_: Process, route: tuple[PeerId, ...]) -> None:
    right = gradient(payload=(), route=("z",)) if request_ is EVALUATION else gradient()
    scene = Scene(a=lambda request: replace(right, route=route), b=lambda request: right)
    scene.caller._check = replace(CHECK, further=1)
    await scene.process(request_)
    assert scene.left == [("a", "BadMessage")]


def answered_by(seconds: float, avoid: tuple[str, ...], **peers) -> str:
    """Who answers an evaluation that is to go around some, within so many seconds."""

    async def main() -> str:
        scene = Scene(**peers)
        async with asyncio.timeout(seconds):
            answer = await scene.process(replace(EVALUATION, avoid=tuple(map(PeerId, avoid))))
        return answer.route[0]

    return run_virtual(main())


def test_an_evaluation_goes_around_those_that_it_is_to_avoid() -> None:
    def right(request: Process) -> Gradient:
        return gradient(payload=())

    for number in range(20):
        avoid = ("a", "b", "c")[: 1 + number % 2]
        assert answered_by(1.0, avoid, a=right, b=right, c=right) not in avoid
    assert answered_by(1.0, ("a", "b"), a=right, b=right) in ("a", "b"), "there is nobody else"
    assert answered_by(1.0, ("a",), a=right, b=lambda request: PeerGone("refused", definite=True)) == "a"
    busy = iter([Busy(0.5, 0)] * 3)
    assert answered_by(3.0, ("a",), a=right, b=lambda request: next(busy, right(request))) == "b", "it is waited for"
    assert answered_by(60.0, ("a",), a=right, b=lambda request: Busy(0.5, 0)) == "a", "but not for ever"


@pytest.mark.parametrize("code", sorted(OF_PAYLOAD, key=str))
async def test_one_replica_s_refusal_of_the_payload_is_not_believed(code: RejectCode) -> None:
    scene = Scene(a=lambda request: Rejected(code), b=lambda request: gradient())
    assert await scene.process() == gradient()
    assert scene.left == [("a", code.value)]


EVERYWHERE = (RejectCode.STALE, RejectCode.OVERFLOWED, RejectCode.FINISHED)


@pytest.mark.parametrize(
    ("code", "calls"), [*((code, 2) for code in sorted(OF_PAYLOAD, key=str)), *((code, 1) for code in EVERYWHERE)]
)
async def test_everybody_s_refusal_is_final_and_at_once_where_it_is_true_everywhere(
    code: RejectCode, calls: int
) -> None:
    scene = Scene(a=lambda request: Rejected(code), b=lambda request: Rejected(code) if calls > 1 else gradient())
    with pytest.raises(Refused) as refused:
        await scene.process()
    assert refused.value.code is code and len(scene.transport.calls) == calls


async def test_one_refusal_is_not_everybody_s_when_no_replica_is_left() -> None:
    def leaves(request: Process) -> Rejected:
        scene.peers.clear()
        asyncio.get_running_loop().call_later(1.0, scene.peers.update, {PeerId("b"): 0})
        return Rejected(RejectCode.MALFORMED)

    scene = Scene(a=leaves, b=lambda request: gradient())
    del scene.peers["b"]
    assert await scene.process() == gradient()


async def test_a_busy_owner_does_not_choose_how_long_its_caller_sleeps() -> None:
    asked = iter([Busy(3600.0, 0), gradient()])
    scene = Scene(
        a=lambda request: MovedTo("b") if len(scene.transport.calls) == 1 else gradient(), b=lambda request: next(asked)
    )
    await scene.process()
    times = [at for _, _, at in scene.transport.calls]
    assert len(times) == 3 and times[2] - times[1] < 31.0


@pytest.mark.parametrize("owned", [False, True])
async def test_who_does_not_know_us_yet_is_asked_again(owned: bool) -> None:
    """A replica that has just joined calls before its first heartbeat is heard: nothing may be lost by that."""
    calls = 0

    def said(request) -> Rejected | MovedTo | Gradient:
        nonlocal calls
        calls += 1
        if owned and calls == 1:
            return MovedTo("a")
        return Rejected(RejectCode.NOT_A_FEEDER, "who are you") if calls < 5 else gradient()

    scene = Scene(a=said)
    assert await scene.process() == gradient()
    times = [at for _, _, at in scene.transport.calls]
    assert len(times) == 5 and 1.0 < times[-1] < 3.0
    assert set(scene.left) == {("a", "not_a_feeder")}


async def test_meanwhile_others_are_asked() -> None:
    scene = Scene(a=lambda request: Rejected(RejectCode.NOT_A_FEEDER), b=lambda request: gradient())
    for _ in range(6):
        assert await scene.process() == gradient()
    assert asyncio.get_running_loop().time() < 0.3
    assert [peer for peer, _, _ in scene.transport.calls].count("a") == 1


async def running(request: Process) -> AsyncGenerator[Running, None]:
    """At work, every half second and for ever."""
    while True:
        await asyncio.sleep(0.5)
        yield Running()


async def test_a_replica_that_says_running_for_ever_is_left_and_charged() -> None:
    scene = Scene(a=running, b=lambda request: gradient())
    limit_s = scene.router.call_s()
    assert await scene.process() == gradient()
    (first, _, began), (second, request, left) = scene.transport.calls
    assert (first, second) == ("a", "b") and left - began == limit_s
    assert request.repair and request.hedge and scene.left == [("a", "PeerTimeout")]
    for _ in range(60):
        assert await scene.process() == gradient()
    assert [peer for peer, _, _ in scene.transport.calls].count("a") == 1, "it is banned"
    assert scene.router.call_s() < limit_s, "and who answered decides how long others are waited for"


async def test_a_replica_that_gives_no_result_while_others_do_is_named_once() -> None:
    for idle in (Busy(0.01, 0), MovedTo(PeerId("b"))):
        scene = Scene(a=lambda request, idle=idle: idle, b=lambda request: gradient())
        for _ in range(200):
            await scene.process()
        assert scene.left == [("a", "always busy, or others have it: it gives no result")]
