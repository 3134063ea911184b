"""Payloads cross a stream of messages whole or not at all, and no declaration takes memory it does not deserve."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import BadMessage, PeerGone, RejectCode
from swarmnet.messages import Packed
from swarmnet.wire import framing
from swarmnet.wire.convert import declare, write_end
from swarmnet.wire.convert_calls import TensorHeader
from swarmnet.wire.framing import check_declared, payload_messages, read_payload

MAX = 1 << 30


class Stream:
    """Messages to read, then the end of a dead sender."""

    def __init__(self, messages: Iterable[bytes]) -> None:
        self._messages: Iterator[bytes] = iter(messages)

    async def read(self) -> bytes:
        for message in self._messages:
            return message
        raise PeerGone("end of stream")


def receive(messages: Iterable[bytes], declared: tuple[TensorHeader, ...], max_bytes: int = MAX) -> tuple[Packed, ...]:
    return asyncio.run(read_payload(Stream(messages).read, declared, max_bytes=max_bytes))


def tensor(length: int) -> Packed:
    return Packed("uint8", (length,), bytes(at % 253 for at in range(length)))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "CHUNK_BYTES", 8)


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=4)


@given(lengths)
def test_what_is_sent_arrives(sizes: list[int]) -> None:
    payload = tuple(map(tensor, sizes))
    received = receive(payload_messages(payload), declare(payload))
    assert [(x.codec, x.shape, bytes(x.data)) for x in received] == [(x.codec, x.shape, x.data) for x in payload]


def test_nothing_declared_reads_nothing() -> None:
    assert list(payload_messages(())) == []
    assert receive([], ()) == ()


@given(lengths, st.data())
def test_a_missing_message_is_never_success(sizes: list[int], data: st.DataObject) -> None:
    payload = tuple(map(tensor, sizes))
    messages = list(payload_messages(payload))
    del messages[data.draw(st.integers(0, len(messages) - 1))]
    with pytest.raises((BadMessage, PeerGone)):
        receive(messages, declare(payload))


@given(lengths, st.data(), st.binary(max_size=12))
def test_any_message_may_be_replaced_by_junk(sizes: list[int], data: st.DataObject, junk: bytes) -> None:
    payload = tuple(map(tensor, sizes))
    messages = list(payload_messages(payload))
    messages[data.draw(st.integers(0, len(messages) - 1))] = junk
    try:
        received = receive(messages, declare(payload))
    except BadMessage as error:
        assert error.code is RejectCode.MALFORMED
    else:
        assert [x.num_bytes for x in received] == sizes


def test_the_end_counts_the_bytes() -> None:
    payload = (tensor(20),)
    *chunks, _ = payload_messages(payload)
    with pytest.raises(BadMessage, match="counts other bytes"):
        receive([*chunks, write_end(19)], declare(payload))


@pytest.mark.parametrize(
    ("declared", "code"),
    [
        (TensorHeader("uint8", (MAX + 1,), MAX + 1), RejectCode.TOO_LARGE),
        (TensorHeader("uint8", (4,), 5), RejectCode.BAD_SHAPE),
        (TensorHeader("fp32", (4,), 4), RejectCode.BAD_SHAPE),
        (TensorHeader("fp32", (1 << 47, 1 << 47), 4), RejectCode.TOO_LARGE),
        (TensorHeader("zip", (4,), 4), RejectCode.MALFORMED),
    ],
)
def test_declarations_are_checked_before_memory_is_taken(declared: TensorHeader, code: RejectCode) -> None:
    with pytest.raises(BadMessage) as caught:
        check_declared((declared,), max_bytes=MAX)
    assert caught.value.code is code


def test_the_limit_is_on_the_sum() -> None:
    two = (TensorHeader("uint8", (6,), 6),) * 2
    assert check_declared(two, max_bytes=12) == 12
    with pytest.raises(BadMessage) as caught:
        check_declared(two, max_bytes=11)
    assert caught.value.code is RejectCode.TOO_LARGE


def test_a_buffer_of_wider_items_is_sent_as_bytes() -> None:
    data = memoryview(bytearray(16)).cast("q")
    data[0] = 1
    sent = Packed("int64", (2,), data.cast("B"))
    assert bytes(receive(payload_messages((sent,)), declare((sent,)))[0].data) == bytes(data)
