"""Messages to bytes and back, at the edge: arbitrary bytes become frozen values or BadMessage(MALFORMED), nothing else.

The tables in `convert_control` and `convert_calls` say what every field may be. Tensors are declared in the header of a
call or an answer (`TensorHeader`) and travel behind it (`wire.framing`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar, cast

from google.protobuf.message import DecodeError, Message

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.messages import Answer, Control, Packed, PartData, Process, Rejected, Request
from swarmnet.wire.bounds import ANY_RUN, Bounds
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
from swarmnet.wire.convert_control import CONTROL, Ping
from swarmnet.wire.convert_fields import LENGTH_BYTES, malformed
from swarmnet.wire.convert_values import Many, One, Value
from swarmnet.wire.pb import calls_pb2, control_pb2

MAX_MESSAGE_BYTES = 1 << 20
"""No header and no control message is longer, in any run."""

_LATER_VERSIONS_BYTES = 1024

M = TypeVar("M", bound=Message)

_DECLARED = Many(TENSOR, limit=MAX_TENSORS)


def _by_type(table: dict[str, Value]) -> dict[type, str]:
    types = {name: value.make if isinstance(value.make, type) else PartData for name, value in table.items()}
    return {made: name for name, made in types.items()}


_CONTROL_NAMES = _by_type(CONTROL)
_REQUEST_NAMES = _by_type(REQUESTS)
_ANSWER_NAMES = _by_type(ANSWERS)


# ---------------------------------------------------------------- one-way messages


def write_control(message: Control | Ping) -> bytes:
    """One message of a link."""
    return _write(control_pb2.Envelope(), CONTROL, _CONTROL_NAMES[type(message)], message)


# ---------------------------------------------------------------- calls


def declare(payload: tuple[Packed, ...]) -> tuple[TensorHeader, ...]:
    """What a header says about the tensors behind it."""
    return tuple(TensorHeader(tensor.codec, tuple(tensor.shape), tensor.num_bytes) for tensor in payload)


def write_request(request: Request, payload: tuple[TensorHeader, ...] = ()) -> bytes:
    """The header of a call."""
    header = calls_pb2.CallHeader()
    _DECLARED.write(header, "payload", payload)
    return _write(header, REQUESTS, _REQUEST_NAMES[type(request)], request)


def write_answer(answer: Answer | Signal) -> bytes:
    """The header of an answer; it declares the answer's payload."""
    header = calls_pb2.AnswerHeader()
    if isinstance(answer, PAYLOAD_ANSWERS):
        _DECLARED.write(header, "payload", declare(answer.payload))
    return _write(header, ANSWERS, _ANSWER_NAMES[type(answer)], answer)


def with_payload(answer: Answer, payload: tuple[Packed, ...]) -> Answer:
    """The answer together with the tensors that followed it."""
    return replace(answer, payload=payload) if isinstance(answer, PAYLOAD_ANSWERS) else answer


# ---------------------------------------------------------------- reading, within the bounds of a run


class Reader:
    """Reads what other peers of a run say. What none of them could need is refused by its length, unparsed."""

    def __init__(self, bounds: Bounds) -> None:
        self._control = _within(CONTROL, bounds)
        self._answers = _within(ANSWERS, bounds)
        kinds = {field.name: field.number for field in control_pb2.Envelope.DESCRIPTOR.fields}
        self._most_control = {kinds[name]: _capped(value.most_bytes()) for name, value in self._control.items()}
        requests = max(value.most_bytes() for value in REQUESTS.values())
        self._most_request = _capped(requests + _DECLARED.most_bytes())

    def most_bytes(self, *kinds: type) -> int:
        """The longest one-way messages of these types, one after the other."""
        return sum(_capped(self._control[_CONTROL_NAMES[kind]].most_bytes()) for kind in kinds)

    def control(self, data: bytes) -> Control | Ping:
        """The inverse of `write_control`. Raises BadMessage."""
        most = self._most_control.get(_only_field(data))
        if most is None:
            raise malformed("not a one-way message")
        return cast(Control | Ping, _read_one(_parse(control_pb2.Envelope(), data, most), "kind", self._control))

    def request(self, data: bytes) -> tuple[Request, tuple[TensorHeader, ...]]:
        """The inverse of `write_request`. Raises BadMessage."""
        header = _parse(calls_pb2.CallHeader(), data, self._most_request)
        request, declared = cast(Request, _read_one(header, "request", REQUESTS)), _DECLARED.read(header, "payload")
        if declared and not isinstance(request, Process):
            raise malformed("a call that has no payload declares one", request=type(request).__name__)
        return request, declared

    def answer(self, data: bytes) -> tuple[Answer | Signal, tuple[TensorHeader, ...]]:
        """An answer without its payload, and what payload follows. Raises BadMessage."""
        header = _parse(calls_pb2.AnswerHeader(), data)
        answer = cast(Answer | Signal, _read_one(header, "answer", self._answers))
        declared = _DECLARED.read(header, "payload")
        if declared and not isinstance(answer, PAYLOAD_ANSWERS):
            raise malformed("an answer that has no payload declares one", answer=type(answer).__name__)
        return answer, declared


def _within(table: dict[str, Value], bounds: Bounds) -> dict[str, Value]:
    return {name: value.within(bounds) for name, value in table.items()}


def _capped(num_bytes: int) -> int:
    """With room for fields of a later minor version."""
    return min(num_bytes + _LATER_VERSIONS_BYTES, MAX_MESSAGE_BYTES)


def _only_field(data: bytes) -> int:
    """The number of the field that is all of a message; 0 if there is more than one, or it is no message."""
    key, at = _varint(data, 0)
    length, at = _varint(data, at)
    return key >> 3 if at and key & 7 == 2 and at + length == len(data) else 0


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of protobuf's at `at`, and where it ends; 0 if there is none of at most four bytes."""
    number = 0
    for place, byte in enumerate(data[at : at + LENGTH_BYTES]):
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number, at + place + 1
    return number, 0


IN_ANY_RUN = Reader(ANY_RUN)
read_control, read_request, read_answer = IN_ANY_RUN.control, IN_ANY_RUN.request, IN_ANY_RUN.answer


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


def _parse(message: M, data: bytes, most_bytes: int = MAX_MESSAGE_BYTES) -> M:
    if len(data) > most_bytes:
        raise BadMessage(RejectCode.TOO_LARGE, "message is too long", num_bytes=len(data), most_bytes=most_bytes)
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
