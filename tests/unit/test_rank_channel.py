"""The rank channel: packets arrive whole, in order, with the descriptors sent with them."""

import json
import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.errors import BadMessage, Overflow, Refused, RejectCode
from swarmnet.ranks.channel import ChannelClosed, ChildChannel, channel_pair, disagreement, error_of, packed, packet_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
PACKETS = st.lists(st.dictionaries(st.text(max_size=8), JSON, max_size=4), min_size=1, max_size=6)


def pair(limit_s: float = 10.0) -> tuple[ChildChannel, ChildChannel]:
    ours, theirs = channel_pair()
    return ChildChannel(ours, limit_s=limit_s), ChildChannel(theirs)


@settings(max_examples=30)
@given(packets=PACKETS)
def test_packets_cross_both_ways_in_order(packets: list[dict[str, Any]]) -> None:
    peer, rank = pair()
    for one, other in ((peer, rank), (rank, peer)):
        for packet in packets:
            one.send(packed(packet))
        assert [other.receive() for _ in packets] == [(packet, []) for packet in packets]
    peer.close()
    rank.close()


def test_the_peer_does_not_wait_for_ever_for_a_rank_that_does_not_read() -> None:
    peer, rank = pair(limit_s=0.05)
    for _ in range(20):
        peer.send(packed({"text": "x" * 30_000}))
    assert len(rank.receive()[0]["text"]) == 30_000
    peer.close()
    rank.close()


def test_descriptors_come_with_their_packets_and_are_not_inherited() -> None:
    peer, rank = pair()
    pipes = [os.pipe() for _ in range(3)]
    peer.send(packed({"map": 0}), pipes[0][1])
    peer.send(packed({"order": 0}))
    peer.send(packed({"map": 1}), pipes[1][1])
    peer.send(packed({"map": 2}), pipes[2][1])
    for number in (0, None, 1, 2):
        packet, descriptors = rank.receive()
        if number is None:
            assert packet == {"order": 0} and not descriptors
            continue
        (descriptor,) = descriptors
        assert packet == {"map": number} and not os.get_inheritable(descriptor)
        os.write(descriptor, b"%d" % number)
        assert os.read(pipes[number][0], 9) == b"%d" % number
        os.close(descriptor)
    peer.close()
    rank.close()
    for ends in pipes:
        for each in ends:
            os.close(each)


def test_the_end_comes_after_the_last_words() -> None:
    peer, rank = pair()
    rank.send(packed({"failed": "why"}))
    rank.close()
    assert peer.receive() == ({"failed": "why"}, [])
    with pytest.raises(ChannelClosed):
        peer.receive()
    peer.close()


def test_what_is_sent_to_a_closed_end_is_lost_and_receiving_says_so() -> None:
    peer, rank = pair()
    peer.close()
    rank.send(packed({}))
    with pytest.raises(ChannelClosed):
        rank.receive()
    rank.close()


# ---------------------------------------------------------------- errors as packets


@pytest.mark.parametrize(
    "error",
    [
        BadMessage(RejectCode.BAD_SHAPE, "too short", dim=1),
        Refused(RejectCode.OVERFLOWED, "not finite"),
        Overflow("big", bits=64),
    ],
)
def test_errors_survive_the_line(error: BadMessage | Refused | Overflow) -> None:
    again = error_of(json.loads(json.dumps(packet_of(error))))
    assert type(again) is type(error) and str(again) == str(error) and again.facts == error.facts


def test_ranks_agree_by_class_and_code() -> None:
    one = packet_of(BadMessage(RejectCode.NON_FINITE, "here", at=1))
    two = packet_of(BadMessage(RejectCode.NON_FINITE, "there", at=2))
    other = packet_of(Refused(RejectCode.NON_FINITE, "here", at=1))
    third = packet_of(BadMessage(RejectCode.OVERFLOWED, "here", at=1))
    assert disagreement([one, two]) is None and disagreement([None, None]) is None
    for raised in ([one, other], [one, third], [one, None]):
        assert disagreement(raised) is not None
    assert "on rank 0 it was done; on rank 2 it raised" in str(disagreement([None, None, one]))
