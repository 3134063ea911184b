"""Messages to bytes and back, at the edge: arbitrary bytes become frozen values or one BadMessage, nothing else.

How a message converts is derived from its dataclass (`wire.fields`). Tensors are declared in the header of a call or an
answer (`TensorHeader`) and travel behind it (`wire.framing`). `Hello` and the signals are said between the two ends of
a transport, and never reach a peer's own code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Generic, TypeVar

from swarmnet.bounds import ANY_RUN, Between, Bounds, Entries, Proto, Size
from swarmnet.directory import Pass
from swarmnet.ids import Incarnation, RunId
from swarmnet.messages import (
    Accepted,
    Answer,
    AuditData,
    AuditRequest,
    Busy,
    Case,
    Committed,
    Content,
    Control,
    DialBack,
    DialledBack,
    Extent,
    Fetch,
    Fetched,
    Gradient,
    Heartbeat,
    History,
    HistoryRequest,
    ManifestData,
    ManifestRequest,
    MemberState,
    MovedTo,
    Packed,
    Part,
    PartData,
    Process,
    Rejected,
    Request,
    Running,
    Sent,
    Snapshot,
    SnapshotPiece,
    SnapshotRequest,
    StagePlan,
    TrailRequest,
    TrailStep,
)
from swarmnet.wire.codec import malformed
from swarmnet.wire.fields import MAX_MESSAGE_BYTES, Kind, Repeated, Wrong, message_class, parsed, struct_of
from swarmnet.wire.index_sets import varint

MAX_TENSORS = 16
"""Tensors in one payload."""

MAX_SOFTWARE_CHARS = 64
MAX_FILLED_IN_CHARS = 16384
"""All fields of a manifest with their defaults are a quarter of it."""

NONCE_BYTES = 4
"""Of a Ping and its Pong."""

SECRET_BYTES, SESSION_BYTES = 32, 16
"""Of what two peers agree on for bulk connections."""

_LATER_VERSIONS_BYTES = 1024

T = TypeVar("T")

Nonce = Annotated[bytes, Size(NONCE_BYTES, least=NONCE_BYTES)]
Uint32 = Annotated[int, Between(0, (1 << 32) - 1)]
Uint63 = Annotated[int, Between(0, (1 << 63) - 1)]


# ---------------------------------------------------------------- what the two ends of a transport say


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor that follows as raw chunks: `length` bytes hold `shape` under `codec`. Declared, not yet believed."""

    codec: Annotated[str, Size(32)]
    shape: Annotated[tuple[Extent, ...], Entries(8)]
    length: Extent


@dataclass(frozen=True, slots=True)
class Lane:
    """Where the tensors of a header come: on a bulk connection (`net.bulk`)."""

    session: Annotated[bytes, Size(SESSION_BYTES)] = b""
    """Of the caller's; an answer leaves it out."""
    connection: Uint63 = 0
    """0: not on one."""
    call: Uint63 = 0
    """The caller's number of the call; an answer leaves it out."""


@dataclass(frozen=True, slots=True)
class BulkAsk:
    """Who says it wants to open bulk connections."""

    secret: Annotated[bytes, Size(SECRET_BYTES, least=SECRET_BYTES)]


@dataclass(frozen=True, slots=True)
class BulkOffer:
    """Where to open them."""

    port: Annotated[int, Between(0, (1 << 16) - 1)]
    """At the host where the callee was reached; 0: nowhere."""
    session: Annotated[bytes, Size(SESSION_BYTES)] = b""
    secret: Annotated[bytes, Size(SECRET_BYTES)] = b""


@dataclass(frozen=True, slots=True)
class Hello:
    """Who greets."""

    run: RunId
    major: Uint32
    """Of the protocol's version, as `minor`."""
    minor: Uint32
    # Number 4 was the numerics class, and number 6 the pass as text.
    clock: Annotated[float, Between(0.0, 1e12), Proto(5)]
    """What its clock shows: Unix seconds."""
    invitation: Annotated[Pass | None, Proto(11)] = None
    """The pass that it shows in a run by invitation."""
    software: Annotated[str, Size(MAX_SOFTWARE_CHARS, cut=True), Proto(7)] = ""
    """What runs there, for people: "swarmnet 0.1.0"."""
    completed: Annotated[bytes, Size(32), Proto(8)] = b""
    """`manifest.file.completed_hash` of its manifest; empty: an earlier version does not say it."""
    filled_in: Annotated[str, Size(MAX_FILLED_IN_CHARS), Proto(9)] = ""
    """`manifest.file.filled_in` of its manifest."""
    boot_id: Annotated[Incarnation, Proto(10)] = 0
    """Of its process; 0: not said."""


@dataclass(frozen=True, slots=True)
class Ping:
    """Said on a link: answer with this nonce (`Pong`)."""

    nonce: Nonce


@dataclass(frozen=True, slots=True)
class Pong:
    """The callee's event loop has read the Ping with this nonce."""

    nonce: Nonce


@dataclass(frozen=True, slots=True)
class Told:
    """Said on a link by its callee, which cannot connect to the caller: a one-way message, by `write_control`."""

    message: Annotated[bytes, Size(MAX_MESSAGE_BYTES)]


@dataclass(frozen=True, slots=True)
class GreetFirst:
    """The callee does not know the caller (any more): say Hello, then repeat the call."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """The callee is alive, its answer is not there yet."""


@dataclass(frozen=True, slots=True)
class Done:
    """That was the last answer, and the payload was not wanted: leave.

    If the callee ended the stream itself, under an upload, it would fail that.
    """


Signal = GreetFirst | Pulse | Done | Pong | Told
"""What stands where an answer would, for the caller's transport alone."""

PAYLOAD_ANSWERS = (Gradient, Fetched, PartData, AuditData, SnapshotPiece)
"""The answers that carry tensors, in `payload`."""


# ---------------------------------------------------------------- envelopes


_DECLARED = Repeated(struct_of(TensorHeader, ANY_RUN), MAX_TENSORS)
_LANE = struct_of(Lane, ANY_RUN)
_PAYLOAD = 15
"""Number of the field with what is declared."""


class Envelope(Generic[T]):
    """A message of protobuf's that holds one of ours, within the bounds of a run.

    Args:
        kinds: by the number of the field that holds it. The field has the name of the dataclass, with small letters.
        lane: number of the field that says on which lane tensors come; 0: the envelope declares no tensors.
        most_bytes: what is longer is refused, unparsed.
    """

    def __init__(
        self,
        title: str,
        kinds: Mapping[int, type],
        bounds: Bounds = ANY_RUN,
        *,
        lane: int = 0,
        most_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.numbers = {re.sub(r"\B(?=[A-Z])", "_", kind.__name__).lower(): number for number, kind in kinds.items()}
        self.kinds = {name: struct_of(kinds[number], bounds) for name, number in self.numbers.items()}
        self._names = {kind.make: name for name, kind in self.kinds.items()}
        self._declares, self._most_bytes = bool(lane), most_bytes
        fields: dict[str, tuple[int, Kind]] = {name: (at, self.kinds[name]) for name, at in self.numbers.items()}
        if lane:
            fields |= {"lane": (lane, replace(_LANE, optional=True)), "payload": (_PAYLOAD, _DECLARED)}
        self.message = message_class(title, fields, choice="kind")
        """Protobuf's class."""

    def most_bytes(self, kind: type) -> int:
        """No valid message of this type takes more."""
        return _capped(self.kinds[self._names[kind]].most_bytes)

    def write(self, message: T, payload: tuple[TensorHeader, ...] = (), lane: Lane | None = None) -> bytes:
        """The envelope around a valid message."""
        envelope, name = self.message(), self._names[type(message)]
        if payload:
            _DECLARED.write(envelope, "payload", payload)
        if lane is not None:
            _LANE.write(envelope, "lane", lane)
        self.kinds[name].write(envelope, name, message)
        data = envelope.SerializeToString()
        assert len(data) <= MAX_MESSAGE_BYTES, f"{name} takes {len(data)} bytes, at most {MAX_MESSAGE_BYTES}"
        return data

    def read(self, data: bytes) -> T:
        """The inverse. Raises BadMessage."""
        return self.read_header(data)[0]

    def read_header(
        self, data: bytes, most_bytes: int | None = None
    ) -> tuple[T, tuple[TensorHeader, ...], Lane | None]:
        """The message, the tensors that are declared with it, and the lane that it names. Raises BadMessage."""
        envelope = parsed(self.message, data, self._most_bytes if most_bytes is None else most_bytes)
        name = envelope.WhichOneof("kind")
        # A later version may know more kinds; this one refuses what it cannot read.
        if name is None:
            raise malformed("the kind of message is missing or unknown")
        try:
            message: T = self.kinds[name].read(envelope, name)
            if not self._declares:
                return message, (), None
            lane = _LANE.read(envelope, "lane") if envelope.HasField("lane") else None
            return message, _DECLARED.read(envelope, "payload"), lane
        except Wrong as wrong:
            raise malformed(str(wrong)) from None


_CONTROL_KINDS = {1: Heartbeat, 2: StagePlan, 6: MemberState, 10: Committed, 12: Ping, 13: Case, 15: Sent}
_REQUEST_KINDS = {
    1: Process,
    2: Fetch,
    3: Part,
    4: SnapshotRequest,
    5: ManifestRequest,
    6: TrailRequest,
    7: DialBack,
    # Number 8 was a test of a network link.
    9: HistoryRequest,
    10: AuditRequest,
}
_ANSWER_KINDS = {
    1: Accepted,
    2: Running,
    3: Busy,
    4: MovedTo,
    5: Rejected,
    6: Gradient,
    7: Fetched,
    8: PartData,
    9: Snapshot,
    10: ManifestData,
    11: SnapshotPiece,
    12: Done,
    13: GreetFirst,
    14: Pulse,
    16: TrailStep,
    17: Pong,
    18: DialledBack,
    19: Told,
    # Number 20 was its answer.
    21: History,
    23: AuditData,
    24: Content,
}


def _envelopes(bounds: Bounds) -> tuple[Envelope[Control | Ping], Envelope[Request], Envelope[Answer | Signal]]:
    """Of one-way messages, calls and answers."""
    return (
        Envelope("Envelope", _CONTROL_KINDS, bounds),
        Envelope("CallHeader", _REQUEST_KINDS, bounds, lane=14),
        Envelope("AnswerHeader", _ANSWER_KINDS, bounds, lane=22),
    )


CONTROL, REQUESTS, ANSWERS = _envelopes(ANY_RUN)
GREETINGS: Envelope[Hello | Rejected] = Envelope("HelloReply", {1: Hello, 2: Rejected})


# ---------------------------------------------------------------- writing


def write_control(message: Control | Ping) -> bytes:
    """One message of a link."""
    return CONTROL.write(message)


def declare(payload: tuple[Packed, ...]) -> tuple[TensorHeader, ...]:
    """What a header says about the tensors behind it."""
    return tuple(TensorHeader(tensor.codec, tuple(tensor.shape), tensor.num_bytes) for tensor in payload)


def write_request(request: Request, payload: tuple[TensorHeader, ...] = (), lane: Lane | None = None) -> bytes:
    """The header of a call."""
    return REQUESTS.write(request, payload, lane)


def write_answer(answer: Answer | Signal, lane: Lane | None = None) -> bytes:
    """The header of an answer; it declares the answer's payload."""
    return ANSWERS.write(answer, declare(answer.payload) if isinstance(answer, PAYLOAD_ANSWERS) else (), lane)


def with_payload(answer: Answer, payload: tuple[Packed, ...]) -> Answer:
    """The answer together with the tensors that followed it."""
    return replace(answer, payload=payload) if isinstance(answer, PAYLOAD_ANSWERS) else answer


# ---------------------------------------------------------------- reading, within the bounds of a run


class Reader:
    """Reads what other peers of a run say. What none of them could need is refused by its length, unparsed."""

    def __init__(self, bounds: Bounds) -> None:
        self._control, self._requests, self._answers = _envelopes(bounds)
        numbers = self._control.numbers
        self._most_control = {numbers[name]: _capped(kind.most_bytes) for name, kind in self._control.kinds.items()}
        self.longest = max(self._most_control.values())
        """Bytes of the longest one-way message."""
        longest = max(kind.most_bytes for kind in self._requests.kinds.values())
        self._most_request = _capped(longest + _DECLARED.most_bytes + _LANE.most_bytes)

    def most_bytes(self, *kinds: type) -> int:
        """The longest one-way messages of these types, one after the other."""
        return sum(map(self._control.most_bytes, kinds))

    def control(self, data: bytes) -> Control | Ping:
        """The inverse of `write_control`. Raises BadMessage."""
        # The kind is read off the first bytes, and with it how long the message may be.
        most = self._most_control.get(_only_field(data))
        if most is None:
            raise malformed("not a one-way message")
        return self._control.read_header(data, most)[0]

    def request(self, data: bytes) -> tuple[Request, tuple[TensorHeader, ...], Lane | None]:
        """The inverse of `write_request`. Raises BadMessage."""
        request, declared, lane = self._requests.read_header(data, self._most_request)
        # Payloads cost memory: only the call that has one may declare one.
        if declared and not isinstance(request, Process):
            raise malformed("a call that has no payload declares one", request=type(request).__name__)
        return request, declared, lane

    def answer(self, data: bytes) -> tuple[Answer | Signal, tuple[TensorHeader, ...], Lane | None]:
        """An answer without its payload, what payload follows, and on which lane. Raises BadMessage."""
        answer, declared, lane = self._answers.read_header(data)
        if declared and not isinstance(answer, PAYLOAD_ANSWERS):
            raise malformed("an answer that has no payload declares one", answer=type(answer).__name__)
        return answer, declared, lane


def _capped(num_bytes: int) -> int:
    """With reserve for fields of a later minor version."""
    return min(num_bytes + _LATER_VERSIONS_BYTES, MAX_MESSAGE_BYTES)


def _only_field(data: bytes) -> int:
    """The number of the field that is all of a message; 0 if there is more than one, or it is no message.

    Protobuf takes the last of several fields of one choice: a short first one must not decide how long it may be.
    """
    key, at = varint(data, 0)
    length, at = varint(data, at)
    return key >> 3 if at and key & 7 == 2 and at + length == len(data) else 0


IN_ANY_RUN = Reader(ANY_RUN)
read_control, read_request, read_answer = IN_ANY_RUN.control, IN_ANY_RUN.request, IN_ANY_RUN.answer


# ---------------------------------------------------------------- greetings


_HELLO, _BULK_ASK, _BULK_OFFER = (struct_of(make, ANY_RUN) for make in (Hello, BulkAsk, BulkOffer))
write_hello, write_bulk_ask, write_bulk_offer = _HELLO.written, _BULK_ASK.written, _BULK_OFFER.written
read_hello: Callable[[bytes], Hello] = _HELLO.parsed
read_bulk_ask: Callable[[bytes], BulkAsk] = _BULK_ASK.parsed
read_bulk_offer: Callable[[bytes], BulkOffer] = _BULK_OFFER.parsed
write_hello_reply, read_hello_reply = GREETINGS.write, GREETINGS.read
