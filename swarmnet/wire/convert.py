"""Messages to bytes and back, at the edge: arbitrary bytes become frozen values or BadMessage(MALFORMED), nothing else.

The tables in `convert_control` and `convert_calls` say what every field may be. Tensors are declared in the header of a
call or an answer (`TensorHeader`) and travel behind it (`wire.framing`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar, cast

from google.protobuf.message import DecodeError, Message

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.messages import Answer, Control, Packed, PartData, Rejected, Request
from swarmnet.wire.convert_calls import (
    ANSWERS,
    HELLO,
    MAX_TENSORS,
    PAYLOAD_ANSWERS,
    REJECTED,
    REQUESTS,
    TENSOR,
    Hello,
    Signal,
    TensorHeader,
)
from swarmnet.wire.convert_control import CONTROL
from swarmnet.wire.convert_fields import malformed
from swarmnet.wire.convert_values import Many, One, Value
from swarmnet.wire.pb import calls_pb2, control_pb2

MAX_MESSAGE_BYTES = 1 << 20
"""No header and no control message is longer."""

M = TypeVar("M", bound=Message)

_DECLARED = Many(TENSOR, limit=MAX_TENSORS)


def _by_type(table: dict[str, Value]) -> dict[type, str]:
    types = {name: value.make if isinstance(value.make, type) else PartData for name, value in table.items()}
    return {made: name for name, made in types.items()}


_CONTROL_NAMES = _by_type(CONTROL)
_REQUEST_NAMES = _by_type(REQUESTS)
_ANSWER_NAMES = _by_type(ANSWERS)


# ---------------------------------------------------------------- one-way messages


def write_control(message: Control) -> bytes:
    """One message of a link."""
    return _write(control_pb2.Envelope(), CONTROL, _CONTROL_NAMES[type(message)], message)


def read_control(data: bytes) -> Control:
    """The inverse of `write_control`. Raises BadMessage."""
    return cast(Control, _read_one(_parse(control_pb2.Envelope(), data), "kind", CONTROL))


# ---------------------------------------------------------------- calls


def declare(payload: tuple[Packed, ...]) -> tuple[TensorHeader, ...]:
    """What a header says about the tensors behind it."""
    return tuple(TensorHeader(tensor.codec, tuple(tensor.shape), tensor.num_bytes) for tensor in payload)


def write_request(request: Request, payload: tuple[TensorHeader, ...] = ()) -> bytes:
    """The header of a call."""
    header = calls_pb2.CallHeader()
    _DECLARED.write(header, "payload", payload)
    return _write(header, REQUESTS, _REQUEST_NAMES[type(request)], request)


def read_request(data: bytes) -> tuple[Request, tuple[TensorHeader, ...]]:
    """The inverse of `write_request`. Raises BadMessage."""
    header = _parse(calls_pb2.CallHeader(), data)
    return cast(Request, _read_one(header, "request", REQUESTS)), _DECLARED.read(header, "payload")


def write_answer(answer: Answer | Signal) -> bytes:
    """The header of an answer; it declares the answer's payload."""
    header = calls_pb2.AnswerHeader()
    if isinstance(answer, PAYLOAD_ANSWERS):
        _DECLARED.write(header, "payload", declare(answer.payload))
    return _write(header, ANSWERS, _ANSWER_NAMES[type(answer)], answer)


def read_answer(data: bytes) -> tuple[Answer | Signal, tuple[TensorHeader, ...]]:
    """An answer without its payload, and what payload follows. Raises BadMessage."""
    header = _parse(calls_pb2.AnswerHeader(), data)
    answer = cast(Answer | Signal, _read_one(header, "answer", ANSWERS))
    declared = _DECLARED.read(header, "payload")
    if declared and not isinstance(answer, PAYLOAD_ANSWERS):
        raise malformed("an answer that has no payload declares one", answer=type(answer).__name__)
    return answer, declared


def with_payload(answer: Answer, payload: tuple[Packed, ...]) -> Answer:
    """The answer together with the tensors that followed it."""
    return replace(answer, payload=payload) if isinstance(answer, PAYLOAD_ANSWERS) else answer


# ---------------------------------------------------------------- greetings


def write_hello(hello: Hello) -> bytes:
    """What the caller says first."""
    return HELLO.to_message(hello).SerializeToString()


def read_hello(data: bytes) -> Hello:
    """The inverse of `write_hello`. Raises BadMessage."""
    return cast(Hello, HELLO.from_message(_parse(calls_pb2.Hello(), data)))


def write_hello_reply(reply: Hello | Rejected) -> bytes:
    """What the callee answers."""
    message = calls_pb2.HelloReply()
    name, kind = ("hello", HELLO) if isinstance(reply, Hello) else ("rejected", REJECTED)
    One(kind).write(message, name, reply)
    return message.SerializeToString()


def read_hello_reply(data: bytes) -> Hello | Rejected:
    """The inverse of `write_hello_reply`. Raises BadMessage."""
    message = _parse(calls_pb2.HelloReply(), data)
    return cast(Hello | Rejected, _read_one(message, "reply", {"hello": HELLO, "rejected": REJECTED}))


# ---------------------------------------------------------------- bytes


def _parse(message: M, data: bytes) -> M:
    if len(data) > MAX_MESSAGE_BYTES:
        raise BadMessage(RejectCode.TOO_LARGE, "message is too long", num_bytes=len(data))
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise malformed("not a protobuf message") from error
    return message


def _read_one(message: Message, oneof: str, table: dict[str, Value]) -> Any:
    name = message.WhichOneof(oneof)
    if name is None:
        raise malformed(f"{oneof} is missing or unknown")
    return One(table[name]).read(message, name)


def _write(message: Message, table: dict[str, Value], name: str, value: Any) -> bytes:
    One(table[name]).write(message, name, value)
    data = message.SerializeToString()
    assert len(data) <= MAX_MESSAGE_BYTES, f"{name} takes {len(data)} bytes, at most {MAX_MESSAGE_BYTES}"
    return data
