"""Messages of one stream are packed with the help of those before them, and nothing packed costs its reader more."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.ids import Ballot, Chain, PeerId
from swarmnet.messages import Heartbeat, Stamp
from swarmnet.net.identity import Identity
from swarmnet.wire.convert import write_control
from swarmnet.wire.deflate import Deflater, Inflater


@given(st.lists(st.binary(max_size=5000), max_size=8))
def test_what_is_packed_comes_out(messages: list[bytes]) -> None:
    packed, unpacked = Deflater(), Inflater(5000)
    assert [unpacked(packed(message)) for message in messages] == messages


def test_a_heartbeat_that_says_what_the_last_one_said_is_a_few_bytes() -> None:
    leader = Ballot(3, Identity.from_seed(bytes(32)).peer)
    packed = Deflater()
    sizes = []
    for queue in range(3):
        chain = Chain("5a" * 32)
        stamp, numerics = Stamp(1000, 50, chain), "cpu AVX512/torch-2.13.0/1/fp32"
        beat = Heartbeat(stamp, 1 << 61, True, leader, queue=queue, numerics=numerics, before=chain)
        sizes.append((len(packed(write_control(beat))), len(write_control(beat))))
    assert sizes[0][0] > 100 and max(packed_bytes for packed_bytes, _ in sizes[1:]) <= 16, sizes


def test_a_message_that_would_unpack_to_more_than_there_may_be_is_refused_unread() -> None:
    bomb = Deflater()(bytes(50 << 20))
    assert len(bomb) < 1 << 18
    with pytest.raises(BadMessage) as caught:
        Inflater(1 << 20)(bomb)
    assert caught.value.code is RejectCode.TOO_LARGE
    whole = Deflater()(bytes(1 << 20))
    assert len(Inflater(1 << 20)(whole)) == 1 << 20


def test_what_no_writer_packs_is_malformed() -> None:
    final = zlib.compressobj(wbits=-11)
    ended = final.compress(b"the end") + final.flush()
    for wrong in (b"\xff\xff", ended, Deflater()(b"twice")[:-1] + b"\x07"):
        with pytest.raises(BadMessage) as caught:
            Inflater(1000)(wrong)
        assert caught.value.code is RejectCode.MALFORMED


def test_each_stream_begins_anew() -> None:
    packed, me = Deflater(), PeerId("me")
    first, second = packed(me.encode() * 20), packed(me.encode() * 20)
    assert Inflater(100)(first) == me.encode() * 20
    with pytest.raises(BadMessage):
        Inflater(100)(second)


def test_what_unpacks_to_nothing_is_no_cheaper_to_send() -> None:
    empty = b"\x00\x00\x00\xff\xff" * 2000  # stored blocks of no bytes
    with pytest.raises(BadMessage) as refusal:
        Inflater(5000)(empty)
    assert refusal.value.code is RejectCode.TOO_LARGE
