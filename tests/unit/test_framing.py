"""Payloads cross a stream of messages whole or not at all, and no declaration takes memory it does not deserve."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import BadMessage, PeerGone, RejectCode
from swarmnet.messages import Packed
from swarmnet.net.payloads import Chunks
from swarmnet.net.traffic import Flow
from swarmnet.wire import framing
from swarmnet.wire.convert import TensorHeader, declare
from swarmnet.wire.framing import Assembly, answer_messages, check_declared, payload_messages, split_answer

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
    chunks = Chunks(Assembly(declared, max_bytes=max_bytes), Flow(), Stream(messages).read)
    assert asyncio.run(chunks.come(stall_s=1.0))
    return chunks.payload


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
    if not messages:
        return
    del messages[data.draw(st.integers(0, len(messages) - 1))]
    with pytest.raises((BadMessage, PeerGone)):
        receive(messages, declare(payload))


@given(lengths, st.data(), st.binary(max_size=12))
def test_any_message_may_be_replaced_by_junk(sizes: list[int], data: st.DataObject, junk: bytes) -> None:
    payload = tuple(map(tensor, sizes))
    messages = list(payload_messages(payload))
    if not messages:
        return
    messages[data.draw(st.integers(0, len(messages) - 1))] = junk
    try:
        received = receive(messages, declare(payload))
    except BadMessage as error:
        assert error.code is RejectCode.MALFORMED
    else:
        assert [x.num_bytes for x in received] == sizes


def test_more_than_was_declared_is_refused() -> None:
    assembly = Assembly(declare((tensor(20),)), max_bytes=MAX)
    for chunk in payload_messages((tensor(20),)):
        assembly.take(chunk)
    assert assembly.whole
    with pytest.raises(BadMessage, match="more than was declared"):
        assembly.take(b"1")


def test_a_tensor_of_one_chunk_stays_where_it_came() -> None:
    chunk = bytes(range(8))
    assembly = Assembly(declare((tensor(8),)), max_bytes=MAX)
    assembly.take(chunk)
    assert isinstance(data := assembly.payload[0].data, memoryview) and data.obj is chunk


def receive_answer(messages: Iterable[bytes], declared: tuple[TensorHeader, ...]) -> tuple[bytes, tuple[Packed, ...]]:
    stream = Stream(messages)

    async def read() -> tuple[bytes, tuple[Packed, ...]]:
        header, chunk = split_answer(await stream.read())
        assembly = Assembly(declared, max_bytes=MAX)
        if chunk is not None:
            assembly.take(chunk)
        while not assembly.whole:
            assembly.take(await stream.read())
        return header, assembly.payload

    return asyncio.run(read())


@given(st.binary(min_size=1, max_size=70).filter(lambda header: header[0]), st.lists(st.integers(0, 40), max_size=4))
def test_an_answer_is_one_message_shorter(header: bytes, sizes: list[int]) -> None:
    payload = tuple(map(tensor, sizes))
    messages = list(answer_messages(header, payload))
    assert len(messages) == max(1, len(list(payload_messages(payload))))
    found, received = receive_answer(messages, declare(payload))
    assert found == header and [bytes(x.data) for x in received] == [x.data for x in payload]


@given(st.binary(max_size=70).map(lambda header: b"h" + header))
def test_the_chunk_in_an_answer_is_aligned(header: bytes) -> None:
    (message,) = answer_messages(header, (tensor(8),))
    _, chunk = split_answer(message)
    assert chunk is not None and (len(message) - len(chunk)) % 16 == 0


@given(st.binary(max_size=12))
def test_any_answer_is_split_or_malformed(junk: bytes) -> None:
    for message in (junk, b"\0" + junk):
        try:
            header, chunk = split_answer(message)
        except BadMessage as error:
            assert error.code is RejectCode.MALFORMED
        else:
            assert len(header) + len(chunk or b"") <= len(message)


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
