"""What a signature under a message is of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from swarmnet.ids import PeerId
from swarmnet.statement import SignedMessage, statement


@dataclass(frozen=True)
class Inner:
    number: int
    text: str


@dataclass(frozen=True)
class Message:
    inner: Inner
    names: tuple[str, ...] = ("ab", "c")
    indexes: frozenset[int] = frozenset((3, 1))
    loss: float = 0.0
    flag: bool = False
    other: Inner | None = None
    signature: bytes = b""


MESSAGE = Message(Inner(1, "x"))
OTHERWISE = {
    "inner": [Inner(2, "x"), Inner(1, "y")],
    "names": [("a", "bc"), ("ab", "c", "")],
    "indexes": [frozenset((3, 2))],
    "loss": [1.0],
    "flag": [True],
    "other": [Inner(0, "")],
}
CHANGED = [replace(MESSAGE, **{name: each}) for name, values in OTHERWISE.items() for each in values]
CHANGED.append(type("Twin", (Message,), {"__doc__": "The same fields under another name."})(Inner(1, "x")))


def test_every_field_and_the_class_is_signed() -> None:
    assert len({statement(message) for message in (MESSAGE, *CHANGED)}) == len(CHANGED) + 1


def test_equal_messages_have_one_statement_whatever_their_signature() -> None:
    alike = [MESSAGE, replace(MESSAGE, signature=b"s"), replace(MESSAGE, loss=-0.0), replace(MESSAGE, flag=0)]
    assert len({statement.__wrapped__(message) for message in alike}) == 1


def test_context_is_signed_too() -> None:
    about = [(), (b"a",), ("a",), (b"a", b""), (Inner(1, "x"),)]
    assert len({statement(MESSAGE, *context) for context in about}) == len(about)


def test_left_out_fields_are_not_signed() -> None:
    one, other = (statement(message, without=("inner", "signature")) for message in (MESSAGE, CHANGED[0]))
    assert one == other != statement(MESSAGE)


def test_what_has_no_signed_form_is_refused() -> None:
    with pytest.raises(TypeError, match="list has no signed form"):
        statement.__wrapped__(MESSAGE, [1])


def test_of_a_signed_message_within_another_its_bytes_are_signed_and_not_what_a_version_reads_in_them() -> None:
    def notice(payload: bytes, value: Inner) -> Message:
        return replace(MESSAGE, other=SignedMessage("Inner", payload, PeerId("owner"), 0, b"signature", value))

    assert statement(notice(b"1x", Inner(1, "x"))) == statement(notice(b"1x", Inner(1, "")))
    assert statement(notice(b"1x", Inner(1, "x"))) != statement(notice(b"2x", Inner(1, "x")))
