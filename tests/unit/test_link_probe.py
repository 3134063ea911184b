"""When a link asks for an answer, and which answer counts."""

from __future__ import annotations

import pytest

from swarmnet.errors import BadMessage
from swarmnet.net.grpc_link import PING_S, Probe, Refusals
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


def test_a_refusal_is_said_once_for_each_reason_and_then_seldom_with_a_count() -> None:
    refused = Refusals()
    said = [refused.again("a", now=3.0 * number) for number in range(1000)]
    assert said[0] == 1 and [times for times in said if times] == [1, 201, 401, 601, 801]
    assert refused.again("b", now=3000.0) == 1 and refused.again("b", now=3001.0) == 0
