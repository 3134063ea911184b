"""When a link asks for an answer, and which answer counts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Rejected
from swarmnet.net import grpc_link
from swarmnet.net.grpc_link import PING_S, Link, Probe
from swarmnet.net.grpc_options import GrpcConfig
from swarmnet.net.limits import REPEATS
from swarmnet.net.traffic import BandwidthLimit
from swarmnet.testing.doubles import run_virtual
from swarmnet.wire.convert import NONCE_BYTES, Pong


def test_one_ping_is_under_way_and_they_are_apart():
    probe = Probe(patience_s=10.0)
    first = probe.ask(now=0.0)
    assert first is not None and len(first.nonce) == NONCE_BYTES
    assert probe.ask(now=5.0) is None, "not answered yet"
    assert probe.answered(Pong(first.nonce), now=5.0)
    second = probe.ask(now=5.0)
    assert second is not None and second.nonce != first.nonce
    assert probe.answered(Pong(second.nonce), now=5.1)
    assert probe.ask(now=5.0 + 0.9 * PING_S) is None and probe.ask(now=5.0 + PING_S) is not None


def test_only_the_nonce_that_was_asked_for_counts_and_once():
    probe = Probe(patience_s=10.0)
    with pytest.raises(BadMessage):
        probe.answered(Pong(bytes(NONCE_BYTES)), now=0.0)
    ping = probe.ask(now=0.0)
    assert ping is not None
    with pytest.raises(BadMessage):
        probe.answered(Pong(bytes(byte ^ 1 for byte in ping.nonce)), now=0.0)
    assert probe.answered(Pong(ping.nonce), now=0.1)
    with pytest.raises(BadMessage):
        probe.answered(Pong(ping.nonce), now=0.2)


def test_an_answer_that_may_have_waited_here_is_no_sign_of_life():
    probe = Probe(patience_s=10.0)
    ping = probe.ask(now=0.0)
    assert ping is not None and not probe.answered(Pong(ping.nonce), now=10.1)
    assert probe.ask(now=10.1) is not None, "asked again at once"


def test_a_refusal_is_logged_once_for_each_reason_and_then_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[tuple[float, str]]()

    async def story() -> None:
        loop, reason = asyncio.get_running_loop(), "a"

        async def greet(*, deadline: float) -> Rejected:
            return Rejected(RejectCode.CLOCK, reason)

        channels = cast(Any, SimpleNamespace(config=GrpcConfig(), greet=greet, peer=PeerId("peer")))
        link = Link(channels, lambda message: b"", lambda peer: None, cast(Any, None), BandwidthLimit())
        told = SimpleNamespace(warning=lambda event, *, reason, **_: said.append((loop.time(), reason)))
        monkeypatch.setattr(grpc_link, "log", told)
        for number in range(1000):
            reason = "b" if number % 2 else "a"
            assert not await link._connect_and_stream()
            await asyncio.sleep(1.0)

    run_virtual(story())
    again_s = REPEATS.burst_s
    began = said[0][0]
    assert [(round(at - began), reason) for at, reason in said] == [
        (0, "a"),
        (1, "b"),
        (again_s, "a"),
        (again_s + 1, "b"),
    ]


def test_a_link_is_tried_again_ever_more_slowly_and_soon_after_it_was_open(monkeypatch: pytest.MonkeyPatch) -> None:
    tried_at, opens = list[float](), iter([*[False] * 12, True, *[False] * 3])

    async def story() -> None:
        async def connect() -> bool:
            tried_at.append(asyncio.get_running_loop().time())
            return next(opens)

        channels = cast(Any, SimpleNamespace(config=GrpcConfig()))
        link = Link(channels, lambda message: b"", lambda peer: None, cast(Any, None), BandwidthLimit())
        monkeypatch.setattr(link, "_connect_and_stream", connect)
        link.outbox.put(cast(Any, None))
        with contextlib.suppress(StopAsyncIteration, RuntimeError):
            await link.run()

    run_virtual(story())
    gaps = [after - before for before, after in itertools.pairwise(tried_at)]
    for number, gap in enumerate(gaps[:12]):
        assert 0.5 * min(0.05 * 2**number, 3.0) <= gap <= min(0.05 * 2**number, 3.0)
    assert gaps[12] == 0.0 and 0.025 <= gaps[13] <= 0.05 <= gaps[14] <= 0.1
