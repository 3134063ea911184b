"""Records of bulk connections: only what the other end sealed opens, in the order in which it was sealed."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import BadMessage
from swarmnet.net.bulk.records import (
    AROUND,
    HEAD_BYTES,
    RECORD_BYTES,
    REKEY_AFTER,
    BulkKeys,
    Kind,
    Opener,
    Sealer,
    read_call,
    read_head,
)

SESSION = BulkKeys("ab" * 32, "caller", "callee", b"i" * 16, b"s" * 64)
UP, DOWN = SESSION.secrets(1)


def opened(opener: Opener, record: bytes) -> bytes:
    into = bytearray(len(record) - AROUND)
    opener.open(memoryview(record), memoryview(into))
    return bytes(into)


def refused(opener: Opener, record: bytes) -> bool:
    try:
        opened(opener, record)
    except BadMessage:
        return True
    return False


@given(st.lists(st.binary(max_size=100), max_size=20), st.integers(1, 5))
def test_what_is_sealed_opens_in_order_across_new_keys(parts: list[bytes], rekey_after: int) -> None:
    sealer, opener = Sealer(UP, rekey_after=rekey_after), Opener(UP, rekey_after=rekey_after)
    assert [opened(opener, sealer.record(Kind.DATA, part)) for part in parts] == parts


def test_a_replayed_record_does_not_open() -> None:
    sealer, opener = Sealer(UP), Opener(UP)
    record = sealer.record(Kind.DATA, b"once")
    assert opened(opener, record) == b"once"
    assert refused(opener, record)


def test_records_that_change_places_do_not_open() -> None:
    sealer = Sealer(UP)
    first, second = sealer.record(Kind.DATA, b"first"), sealer.record(Kind.DATA, b"other")
    assert refused(Opener(UP), second)
    assert not refused(Opener(UP), first)


def test_the_record_after_a_lost_one_does_not_open() -> None:
    sealer, opener = Sealer(UP), Opener(UP)
    first, _, third = (sealer.record(Kind.DATA, b"abc") for _ in range(3))
    assert not refused(opener, first)
    assert refused(opener, third)


@given(st.binary(min_size=1, max_size=40), st.data())
def test_a_flipped_bit_anywhere_does_not_open(plain: bytes, data: st.DataObject) -> None:
    record = bytearray(Sealer(UP).record(Kind.DATA, plain))
    bit = data.draw(st.integers(0, 8 * len(record) - 1))
    record[bit // 8] ^= 1 << bit % 8
    assert refused(Opener(UP), bytes(record))


@given(st.integers(1, AROUND + 7))
def test_a_record_that_was_cut_does_not_open(missing: int) -> None:
    record = Sealer(UP).record(Kind.DATA, b"12345678")[:-missing]
    into = memoryview(bytearray(max(len(record) - AROUND, 0)))
    with pytest.raises((BadMessage, ValueError)):
        Opener(UP).open(memoryview(record), into)


@pytest.mark.parametrize(
    "change",
    [
        {"run": "cd" * 32},
        {"caller": "another"},
        {"callee": "another"},
        {"id": b"j" * 16},
        {"secret": b"s" * 63 + b"t"},
        {"caller": "callerc", "callee": "allee"},
    ],
    ids=lambda change: "-".join(change),
)
def test_what_differs_in_a_session_makes_other_keys(change: dict) -> None:
    other, _ = dataclasses.replace(SESSION, **change).secrets(1)
    assert refused(Opener(other), Sealer(UP).record(Kind.HELLO))


def test_another_connection_and_the_other_direction_have_other_keys() -> None:
    secrets = [secret for number in (1, 2, 256) for secret in SESSION.secrets(number)]
    assert len(set(secrets)) == 6
    record = Sealer(UP).record(Kind.HELLO)
    assert [refused(Opener(secret), record) for secret in secrets] == [False] + 5 * [True]


def test_a_key_is_replaced_at_the_boundary_and_not_before() -> None:
    never, soon = Sealer(UP), Sealer(UP, rekey_after=3)
    plain = [(never.record(Kind.DATA, b"same"), soon.record(Kind.DATA, b"same")) for _ in range(7)]
    assert [one == other for one, other in plain] == [True] * 3 + [False] * 4
    # The second key goes as the first did.
    late = Opener(UP, rekey_after=3)
    for _, record in plain:
        assert opened(late, record) == b"same"


def test_no_key_seals_more_blocks_than_tls_allows() -> None:
    assert REKEY_AFTER * (RECORD_BYTES // 16) <= 2**34


@pytest.mark.parametrize(
    ("kind", "length"),
    [(0, 0), (6, 1), (Kind.HELLO, 1), (Kind.START, 7), (Kind.DATA, 0), (Kind.DATA, RECORD_BYTES + 1), (Kind.STOP, 1)],
)
def test_a_head_that_no_record_has_is_refused_before_anything_is_read(kind: int, length: int) -> None:
    with pytest.raises(BadMessage):
        read_head((kind << 24 | length).to_bytes(HEAD_BYTES, "big"))


def test_heads_say_kind_and_length() -> None:
    longest = (Kind.LAST << 24 | RECORD_BYTES).to_bytes(HEAD_BYTES, "big")
    assert read_head(longest) == (Kind.LAST, RECORD_BYTES)
    start = Sealer(UP).start(2**63 - 1)
    assert read_head(start) == (Kind.START, 8)
    assert read_call(opened(Opener(UP), start)) == 2**63 - 1
