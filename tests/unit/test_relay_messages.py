"""What is said to relays and by them: read as it was written, within its bounds, or refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.messages import Accepted, Busy, Rejected
from swarmnet.net.identity import Identity
from swarmnet.wire import relay
from swarmnet.wire.convert import GreetFirst, Ping, Pong
from swarmnet.wire.relay import (
    ID_BYTES,
    MAX_BYTES,
    Arrive,
    Connect,
    Reserve,
    Reserved,
    Summon,
    checked,
    read_ask,
    read_reply,
    write_ask,
    write_reply,
)

PEER, IDENT = Identity.generate().peer, bytes(range(ID_BYTES))
ASKS = [Reserve(), Connect(PEER, IDENT), Connect(PEER, IDENT, reverse=True), Arrive(IDENT), Ping(b"1234")]
REPLIES = [
    Accepted(),
    Reserved(1 << 20, 8.0),
    Summon(PEER, IDENT, reverse=True),
    Pong(b"1234"),
    Busy(2.0, -1),
    Rejected(RejectCode.NOT_SERVED, "no reservation here"),
    GreetFirst(),
]


def test_every_message_is_read_as_it_was_written() -> None:
    assert [read_ask(write_ask(each)) for each in ASKS] == ASKS
    assert [read_reply(write_reply(each)) for each in REPLIES] == REPLIES


@pytest.mark.parametrize(
    "wrong",
    [{"peer": "nobody", "id": IDENT}, {"peer": PEER, "id": IDENT[1:]}, {"peer": PEER, "id": IDENT + b"x"}],
    ids=["no peer id", "a short id", "a long id"],
)
def test_what_breaks_a_bound_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(BadMessage):
        read_ask(relay.ASKS.message(connect=wrong).SerializeToString())


@given(st.binary(max_size=2000))
def test_whatever_comes_is_a_message_or_refused(data: bytes) -> None:
    for read in (read_ask, read_reply):
        try:
            read(data)
        except BadMessage:
            pass


def test_bytes_of_a_stream_are_some_and_not_too_many_at_once() -> None:
    assert checked(bytes(MAX_BYTES)) == bytes(MAX_BYTES) and checked(b"x") == b"x"
    for wrong in (b"", bytes(MAX_BYTES + 1)):
        with pytest.raises(BadMessage):
            checked(wrong)
