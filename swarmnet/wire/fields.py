"""Dataclasses as protobuf messages, derived: type and bound of a field say how it is written, read and checked.

    hint                                   protobuf              read as
    bool                                   bool                  itself
    Annotated[int, Between]                  int64, uint64         an integer in the range
    float, Annotated[float, Between]         double                a finite number, in the range
    Literal["a", "b"], an Enum             string                one of those words
    Annotated[str, Size]                   string                a text of that length
    a scalar | None                        optional scalar       None where it is not set
    SignedMessage[A], SignedMessage[A | B] SignedMessage         its payload, as the message that its kind names
    Annotated[X, Outside]                  nothing               its default
    Annotated[bytes, Size]                 bytes                 bytes of that length
    Chain, RunId                           bytes                 32 bytes, 64 hex digits in Python
    PeerId                                 string                an Ed25519 peer id
    Annotated[PeerId, AS_KEY]              bytes                 the same, by its key
    frozenset[int]                         bytes                 microbatch indexes, a bitmap or runs
    a dataclass, tuple[A, B]               message               field by field; of a tuple, `Proto` names them
    a dataclass | None                     optional message      None where it is not set
    Annotated[tuple[X, ...], Entries]      repeated              so many at most
    the same of PeerId, packed             bytes                 their keys one after the other
    the same of (PeerId, Generation,       message               one owner for each index
      frozenset[int]), disjoint
    Mapping[int, tuple[A, B]], of int, A   message               the set of keys, a column for A, one for B

A field's number is its position in the dataclass, unless a `Proto` in the hint says another one. The messages are
declared to protobuf by `message_class`; `proto/generate.py` prints them as text for readers and other languages.

Reading is total: what is read obeys its bounds, or `Wrong` says what does not and where. Writing obeys the same rules,
and raises `Wrong` too: what one peer can send, every other peer can read. Each kind of field knows the most bytes that
it takes, so that a message which no peer of a run needs is refused by its length, before it is parsed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from swarmnet.bounds import MAX_INDEXES, MAX_MEMBERS, Between, Bounds, Entries, Outside, Proto, Size
from swarmnet.errors import BadMessage, RejectCode
from swarmnet.ids import Chain, Generation, PeerId, RunId
from swarmnet.statement import MAX_PAYLOAD_BYTES, SignedMessage
from swarmnet.wire.codec import malformed
from swarmnet.wire.index_sets import from_bytes, indexes_problem, most_set_bytes, to_bytes
from swarmnet.wire.peer_ids import PEER_ID_CHARS, is_peer_id, peer_id_from_public_bytes, public_bytes_of

MAX_MESSAGE_BYTES = 1 << 20
"""No header and no control message is longer, in any run."""

KEY_BYTES, MAX_NUMBER = 32, 1 << 53

TAG_BYTES, VARINT_BYTES, LENGTH_BYTES = 2, 10, 4
"""What protobuf adds at most: a field's number (below 2048), a number, the length of what follows."""

_LATER_FIELDS_BYTES = 256
"""Reserve in a signed payload for fields of a later version."""

_SMALL_BYTES, _MOST_KNOWN = 128, 256
"""Messages inside others of at most so many bytes are read once; so many of each kind are remembered."""


class Wrong(ValueError):
    """A field does not obey its bounds. where: its path; why: what it is or has, in words."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where} {why}")
        self.where, self.why = where, why

    def inside(self, name: str) -> Wrong:
        """The same, seen from the message that holds this one as `name`."""
        return Wrong(f"{name}.{self.where}" if self.where else name, self.why)


# ---------------------------------------------------------------- kinds of field


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number, a text, bytes or a flag."""

    type: str
    """Protobuf's."""
    most_bytes: int
    problem: Callable[[Any], str] = lambda raw: ""
    """What is wrong with what protobuf holds; "" if nothing is."""
    pack: Callable[[Any], Any] = _same
    """Value to what protobuf holds."""
    unpack: Callable[[Any], Any] = _same
    """Back, after the check."""
    optional: bool = False
    """None stands for a field that is not set."""

    def packed(self, name: str, value: Any) -> Any:
        """What protobuf holds for a value of ours. Raises Wrong."""
        raw = self.pack(value)
        if problem := self.problem(raw):
            raise Wrong(name, problem)
        return raw

    def unpacked(self, name: str, raw: Any) -> Any:
        """The value that protobuf holds. Raises Wrong."""
        if problem := self.problem(raw):
            raise Wrong(name, problem)
        return self.unpack(raw)

    def append(self, repeated: Any, name: str, value: Any) -> None:
        """Write one more entry of a repeated field."""
        repeated.append(self.packed(name, value))

    def write(self, message: Message, name: str, value: Any) -> None:
        if value is not None:
            setattr(message, name, self.packed(name, value))

    def read(self, message: Message, name: str) -> Any:
        if self.optional and not message.HasField(name):
            return None
        raw = getattr(message, name)
        if problem := self.problem(raw):
            raise Wrong(name, problem)
        return self.unpack(raw)


@dataclass(frozen=True, slots=True)
class Struct:
    """A dataclass, or a tuple, as one message: every field by name."""

    make: Callable[..., Any]
    """The dataclass, or `tuple`; of a `SignedMessage`, what reads its payload too. May raise Wrong."""
    message: type[Message]
    """Protobuf's class."""
    fields: dict[str, Kind]
    unset: frozenset[str]
    """Fields that need not be written where they are 0 or empty, which they read as then."""
    known: tuple[Callable[[bytes], Any], Callable[[Any], bytes]] | None = None
    """Of a small message: what bytes hold, and the bytes of a value. Most messages of a step have the same stamp and
    the same ballot, which would cost more than all else in them."""
    optional: bool = False
    """None stands for a message that is not set."""

    @property
    def most_bytes(self) -> int:
        """No valid message takes more, its length and the number of the field it is in included."""
        return TAG_BYTES + LENGTH_BYTES + sum(kind.most_bytes for kind in self.fields.values())

    def fill(self, message: Message, value: Any) -> None:
        """Write `value` into an empty message."""
        message.SetInParent()  # a message without a set field is there, too
        values = value if self.make is tuple else [getattr(value, name) for name in self.fields]
        for (name, kind), part in zip(self.fields.items(), values, strict=True):
            # Each field checks its bound: our own mistake never leaves this process.
            if part or name not in self.unset:
                kind.write(message, name, part)

    def written(self, value: Any) -> bytes:
        """The bytes of a message. Raises Wrong."""
        message = self.message()
        self.fill(message, value)
        return message.SerializeToString()

    def parsed(self, data: bytes, most_bytes: int = MAX_MESSAGE_BYTES) -> Any:
        """The inverse. Raises BadMessage."""
        try:
            return self.take(parsed(self.message, data, most_bytes))
        except Wrong as wrong:
            raise malformed(f"{self.message.DESCRIPTOR.name}.{wrong}") from None

    def append(self, repeated: Any, name: str, value: Any) -> None:
        """Write one more entry of a repeated field."""
        self.fill(repeated.add(), value)

    def write(self, message: Message, name: str, value: Any) -> None:
        if value is None:
            return
        inner = getattr(message, name)
        if self.known is None:
            self.fill(inner, value)
        else:
            inner.SetInParent()
            inner.MergeFromString(self.known[1](value))

    def read(self, message: Message, name: str) -> Any:
        if message.HasField(name):
            return self.unpacked(name, getattr(message, name))
        if not self.optional:
            raise Wrong(name, "is missing")
        return None

    def take(self, message: Message) -> Any:
        """Read and check every field. Raises Wrong."""
        parts = {name: kind.read(message, name) for name, kind in self.fields.items()}
        if self.make is tuple:
            return tuple(parts.values())
        value = self.make(**parts)
        # Parts that are good each and contradict each other: the message is refused as a whole.
        contradiction = getattr(value, "contradiction", None)
        if contradiction is not None and (why := contradiction()):
            raise Wrong("", why)
        return value

    def unpacked(self, name: str, message: Message) -> Any:
        """What the message holds, which is in another one as `name`. Raises Wrong."""
        try:
            # Fields of a later version would be kept with it, and there is no bound to them.
            small = self.known is not None and message.ByteSize() <= _SMALL_BYTES
            return self.known[0](message.SerializeToString()) if small and self.known else self.take(message)
        except Wrong as wrong:
            raise wrong.inside(name) from None


def parsed(make: type[Message], data: bytes, most_bytes: int) -> Message:
    """A message of protobuf's. Raises BadMessage."""
    # By its length alone: a parser would already have taken memory for all of it.
    if len(data) > most_bytes:
        raise BadMessage(RejectCode.TOO_LARGE, "message is too long", num_bytes=len(data), most_bytes=most_bytes)
    try:
        return make.FromString(data)
    except DecodeError as error:
        raise malformed("not a protobuf message") from error


@dataclass(frozen=True, slots=True)
class Repeated:
    """A tuple of scalars or of messages."""

    entry: Scalar | Struct
    limit: int
    distinct: bool = False
    """Each is, or has as its `peer`, another peer."""

    @property
    def most_bytes(self) -> int:
        return TAG_BYTES + LENGTH_BYTES + self.limit * self.entry.most_bytes

    def write(self, message: Message, name: str, value: tuple[Any, ...]) -> None:
        if len(value) > self.limit:
            raise Wrong(name, f"has {len(value)} entries, more than {self.limit}")
        for each in value:
            self.entry.append(getattr(message, name), name, each)

    def read(self, message: Message, name: str) -> tuple[Any, ...]:
        # Before any entry is converted: protobuf has parsed them, we have made nothing of them.
        raw = getattr(message, name)
        if len(raw) > self.limit:
            raise Wrong(name, f"has {len(raw)} entries, more than {self.limit}")
        if self.distinct and len({getattr(each, "peer", each) for each in raw}) != len(raw):
            raise Wrong(name, "names a peer twice")
        return tuple(self.entry.unpacked(name, each) for each in raw)


@dataclass(frozen=True, slots=True)
class Keys:
    """A tuple of peers, as their Ed25519 keys one after the other."""

    type: ClassVar = "bytes"
    limit: int
    distinct: bool = False

    @property
    def most_bytes(self) -> int:
        return TAG_BYTES + LENGTH_BYTES + KEY_BYTES * self.limit

    def write(self, message: Message, name: str, value: tuple[PeerId, ...]) -> None:
        if len(value) > self.limit:
            raise Wrong(name, f"has {len(value)} entries, more than {self.limit}")
        setattr(message, name, b"".join(map(public_bytes_of, value)))

    def read(self, message: Message, name: str) -> tuple[PeerId, ...]:
        raw = getattr(message, name)
        if len(raw) > KEY_BYTES * self.limit or len(raw) % KEY_BYTES:
            raise Wrong(name, f"has {len(raw)} bytes, not {KEY_BYTES} for each of at most {self.limit}")
        keys = [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]
        if self.distinct and len(set(keys)) != len(keys):
            raise Wrong(name, "names a peer twice")
        return tuple(map(peer_id_from_public_bytes, keys))


@dataclass(frozen=True, slots=True)
class Owners:
    """Disjoint index sets of (peer, generation): for each index the position of its owner, from 1 on, or 0 for none.

    So no index has two owners, whatever the bytes are. Of n peers a position has as many bits as n. They are written as
    bitmaps over the indexes, the lowest bit of all positions first.
    """

    message: type[Message]
    peers: Keys
    below: int
    """All indexes are."""

    @property
    def most_bytes(self) -> int:
        lengths, generations = 4 * (TAG_BYTES + LENGTH_BYTES), self.peers.limit * (8 + VARINT_BYTES)
        return lengths + self.peers.most_bytes + generations + self.peers.limit.bit_length() * -(-self.below // 8)

    def write(self, message: Message, name: str, value: tuple[tuple[PeerId, Generation, frozenset[int]], ...]) -> None:
        table = getattr(message, name)
        table.SetInParent()
        self.peers.write(table, "peers", tuple(peer for peer, _, _ in value))
        table.incarnations.extend(generation.incarnation for _, generation, _ in value)
        table.numbers.extend(generation.number for _, generation, _ in value)
        size = max((max(indexes) + 1 for _, _, indexes in value if indexes), default=0)
        assert size <= self.below, f"{name} has an index of {self.below} or more"
        places = np.zeros(-(-size // 8) * 8, np.uint16)
        for place, (_, _, indexes) in enumerate(value, 1):
            places[list(indexes)] = place
        assert np.count_nonzero(places) == sum(len(held) for _, _, held in value), f"{name} names an index twice"
        bits = places >> np.arange(len(value).bit_length(), dtype=np.uint16)[:, None] & 1
        table.owners = np.packbits(bits.astype(np.uint8), axis=1, bitorder="little").tobytes()

    def read(self, message: Message, name: str) -> tuple[tuple[PeerId, Generation, frozenset[int]], ...]:
        if not message.HasField(name):
            raise Wrong(name, "is missing")
        try:
            return self._take(getattr(message, name))
        except Wrong as wrong:
            raise wrong.inside(name) from None

    def _take(self, table: Any) -> tuple[tuple[PeerId, Generation, frozenset[int]], ...]:
        peers = self.peers.read(table, "peers")
        if len(table.incarnations) != len(peers) or len(table.numbers) != len(peers):
            raise Wrong("generations", "are not one for each peer")
        if any(not 0 <= number <= MAX_NUMBER for number in table.numbers):
            raise Wrong("numbers", f"has one that is not in 0..{MAX_NUMBER}")
        num_bits, longest = len(peers).bit_length(), -(-self.below // 8)
        if len(table.owners) > num_bits * longest or len(table.owners) % max(num_bits, 1):
            raise Wrong("owners", f"has {len(table.owners)} bytes, not {num_bits} for each 8 of {self.below} at most")
        rows = np.frombuffer(table.owners, np.uint8).reshape(max(num_bits, 1), -1)
        bits = np.unpackbits(rows, axis=1, bitorder="little").astype(np.int64)
        places = (bits << np.arange(len(rows))[:, None]).sum(axis=0)
        if np.any(places > len(peers)) or np.any(places[self.below :]):
            raise Wrong("owners", f"has an owner that is not named, or an index of {self.below} or more")
        ends = np.cumsum(np.bincount(places, minlength=len(peers) + 1))
        sets = [frozenset(found.tolist()) for found in np.split(np.argsort(places, kind="stable"), ends)[1:-1]]
        return tuple(zip(peers, map(Generation, table.incarnations, table.numbers), sets, strict=True))


@dataclass(frozen=True, slots=True)
class Columns:
    """A mapping from index to a tuple or a scalar: the set of indexes, then a column for each member of the tuple."""

    message: type[Message]
    keys: tuple[str, Scalar]
    columns: dict[str, Scalar]
    bare: bool
    """A value is no tuple."""
    most_bytes: int

    def write(self, message: Message, name: str, value: Mapping[int, Any]) -> None:
        table = getattr(message, name)
        table.SetInParent()
        key, indexes = self.keys
        indexes.write(table, key, frozenset(value))
        rows = [(value[index],) if self.bare else value[index] for index in sorted(value)]
        for place, (column, scalar) in enumerate(self.columns.items()):
            getattr(table, column).extend(scalar.packed(column, row[place]) for row in rows)

    def read(self, message: Message, name: str) -> dict[int, Any]:
        table = getattr(message, name)
        key, held = self.keys
        try:
            indexes = sorted(held.read(table, key))
            found = []
            for column, scalar in self.columns.items():
                raw = getattr(table, column)
                # A column that is too short would shift every number after it.
                if len(raw) != len(indexes):
                    raise Wrong(column, "has not one entry per index")
                found.append([scalar.unpacked(column, each) for each in raw])
        except Wrong as wrong:
            raise wrong.inside(name) from None
        return dict(zip(indexes, found[0] if self.bare else zip(*found, strict=True), strict=True))


Kind = Scalar | Struct | Repeated | Keys | Owners | Columns
"""How one field converts. most_bytes: no valid field takes more, its number included. write(message, name, value)
writes a valid value; read(message, name) reads and checks it, and raises Wrong."""


# ---------------------------------------------------------------- declaration

PACKAGE = "swarmnet.v1"
_POOL = DescriptorPool()


def message_class(name: str, fields: Mapping[str, tuple[int, Kind]], choice: str = "") -> type[Message]:
    """Declare a message to protobuf.

    Args:
        fields: number and kind of each.
        choice: of the messages that are fields, one is there at a time: the name of protobuf's `oneof`.

    Raises TypeError if two fields have one number, or another message has the name.
    """
    file = FileDescriptorProto(name=name, package=PACKAGE, syntax="proto3")
    message = file.message_type.add(name=name)
    if choice:
        message.oneof_decl.add(name=choice)
    needed = set[str]()
    for field_name, (number, kind) in fields.items():
        entry = kind.entry if isinstance(kind, Repeated) else kind
        field = message.field.add(name=field_name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
        if isinstance(kind, Repeated):
            field.label = FieldDescriptorProto.LABEL_REPEATED
        if isinstance(entry, Scalar | Keys):
            field.type = FieldDescriptorProto.Type.Value(f"TYPE_{entry.type.upper()}")
        else:
            field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{entry.message.DESCRIPTOR.full_name}"
            needed.add(entry.message.DESCRIPTOR.file.name)
        if choice and isinstance(kind, Struct) and not kind.optional:
            field.oneof_index = 0
        elif isinstance(kind, Scalar | Struct) and kind.optional:
            # In proto3 a field that may be unset is a choice of its own.
            field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field_name}")
    file.dependency.extend(sorted(needed))
    _POOL.AddSerializedFile(file.SerializeToString())  # the same file again changes nothing
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


_CONTRIBUTIONS = message_class(
    "Contributions",
    {
        "peers": (1, Keys(MAX_MEMBERS)),
        "incarnations": (2, Repeated(Scalar("fixed64", 8), MAX_MEMBERS)),
        "numbers": (3, Repeated(Scalar("int64", VARINT_BYTES), MAX_MEMBERS)),
        "owners": (4, Scalar("bytes", 0)),
    },
)
"""What `Owners` writes."""


# ---------------------------------------------------------------- derivation


@functools.cache
def struct_of(make: type, bounds: Bounds) -> Struct:
    """How a dataclass is a message of its name, in a run of these numbers.

    Raises TypeError if a field's hint is in no line of the table, or has the number of another field.
    """
    hints = {name: _parts(hint) for name, hint in get_type_hints(make, include_extras=True).items()}
    inside = {name: parts for name, parts in hints.items() if not isinstance(parts[1], Outside)}
    fields = {
        name: (proto.number or place, _kind((plain, bound, proto), f"{make.__name__}.{name}", bounds))
        for place, (name, (plain, bound, proto)) in enumerate(inside.items(), 1)
    }
    return _struct(make, make.__name__, fields, whole=len(inside) == len(hints))


def _struct(make: type, title: str, fields: dict[str, tuple[int, Kind]], *, whole: bool = True) -> Struct:
    """whole: nothing travels behind the message."""
    empty, unset, floats = message_class(title, fields), set[str](), False
    kinds = {name: kind for name, (_, kind) in fields.items()}
    for name, kind in kinds.items():
        with contextlib.suppress(Wrong):
            value = kind.read(empty(), name)
            floats = floats or isinstance(value, float)
            # -0.0 must arrive as it is, an empty table is a message, and an optional 0 is not None.
            if not isinstance(value, float | Mapping) and not (isinstance(kind, Scalar) and kind.optional):
                unset.add(name)
    found = Struct(make, empty, kinds, frozenset(unset))
    # Equal values must have equal bytes: 0.0 equals -0.0, and what travels behind a message is part of its value.
    flat = all(isinstance(kind, Scalar) or (isinstance(kind, Struct) and kind.known) for kind in kinds.values())
    if found.most_bytes > _SMALL_BYTES or floats or not whole or not flat:
        return found

    @functools.lru_cache(_MOST_KNOWN)
    def read(data: bytes) -> Any:
        return found.take(empty.FromString(data))

    return dataclasses.replace(found, known=(read, functools.lru_cache(_MOST_KNOWN)(found.written)))


Parts = tuple[Any, Any, Proto]
"""Of a hint: the type, its bound or None, and what it says to protobuf."""


def _parts(hint: Any) -> Parts:
    plain, *said = (hint.__origin__, *hint.__metadata__) if get_origin(hint) is Annotated else (hint,)
    proto = next((each for each in said if isinstance(each, Proto)), Proto())
    return plain, next((each for each in said if not isinstance(each, Proto)), None), proto


def _kind(parts: Parts, where: str, bounds: Bounds) -> Kind:
    """where: the dataclass and the field, with a dot between."""
    plain, bound, proto = parts
    inner = get_args(plain)
    origin: Any = get_origin(plain)
    if origin in (Union, UnionType):
        kind = _kind(_parts(inner[0]), where, bounds)
        assert isinstance(kind, Scalar | Struct), f"{where} cannot be None"
        return dataclasses.replace(kind, optional=True)
    if isinstance(bound, Entries):
        limit = min(bound.most, bound.times * getattr(bounds, bound.of)) if bound.of else bound.most
        if bound.packed:
            return Keys(limit, bound.distinct)
        if bound.disjoint:
            return Owners(_CONTRIBUTIONS, Keys(limit, bound.distinct), _most_indexes(bounds))
        entry = _kind(_parts(inner[0]), where, bounds)
        assert isinstance(entry, Scalar | Struct), f"{where} has entries that are lists"
        return Repeated(entry, limit, bound.distinct)
    if isinstance(plain, type) and dataclasses.is_dataclass(plain):
        return struct_of(plain, bounds)
    if origin is SignedMessage:
        return signed_struct(get_args(inner[0]) or inner, bounds)
    if origin is tuple:
        members = enumerate(zip(proto.names, inner, strict=True), 1)
        return _struct(
            tuple, _title(where), {name: (at, _kind(_parts(hint), where, bounds)) for at, (name, hint) in members}
        )
    if origin is Mapping:
        return _columns(inner[1], where, proto.names, bounds)
    return _scalar(parts, where, bounds)


@functools.cache
def signed_struct(kinds: tuple[type, ...], bounds: Bounds, most: int = MAX_PAYLOAD_BYTES) -> Struct:
    """How a `SignedMessage` of one of these dataclasses, of at most so many bytes, is read."""
    contents = {make.__name__: struct_of(make, bounds) for make in kinds}
    longest = max((content.most_bytes for content in contents.values()), default=most)
    most_payload = min(longest + _LATER_FIELDS_BYTES, most)

    def opened(kind: str, payload: bytes, **envelope: Any) -> SignedMessage[Any]:
        if kind not in contents:
            raise Wrong("kind", f"is {kind!r}, not {' or '.join(contents)}")
        content = contents[kind]
        try:
            value = content.take(content.message.FromString(payload))
        except DecodeError:
            raise Wrong("payload", "is no protobuf message") from None
        except Wrong as wrong:
            raise wrong.inside("payload") from None
        return SignedMessage(kind, payload, **envelope, value=value)

    envelope = struct_of(SignedMessage, bounds)
    payload = _scalar((bytes, Size(most_payload), Proto()), "SignedMessage.payload", bounds)
    return dataclasses.replace(envelope, make=opened, fields={**envelope.fields, "payload": payload})


def _columns(value: Any, where: str, names: tuple[str, ...], bounds: Bounds) -> Columns:
    (key, *others), bare = names, get_origin(value) is not tuple
    hints = (value,) if bare else get_args(value)
    indexes = _scalar((frozenset[int], None, Proto()), where, bounds)
    columns = {name: _scalar(_parts(hint), where, bounds) for name, hint in zip(others, hints, strict=True)}
    lists = {name: (at, Repeated(scalar, MAX_INDEXES)) for at, (name, scalar) in enumerate(columns.items(), 2)}
    a_row = sum(scalar.most_bytes for scalar in columns.values())
    most_bytes = TAG_BYTES + LENGTH_BYTES + indexes.most_bytes + _most_indexes(bounds) * a_row
    message = message_class(_title(where), {key: (1, indexes), **lists})
    return Columns(message, (key, indexes), columns, bare, most_bytes)


def _title(where: str) -> str:
    """`StagePlanMoved` for "StagePlan.moved"."""
    return re.sub(r"[._]([a-z])", lambda found: found[1].upper(), where)


def _most_indexes(bounds: Bounds) -> int:
    return min(MAX_INDEXES, bounds.microbatches)


def _scalar(parts: Parts, where: str, bounds: Bounds) -> Scalar:
    plain, bound, proto = parts
    number, text = TAG_BYTES + VARINT_BYTES, TAG_BYTES + LENGTH_BYTES
    match bound:
        case Between(low=low, high=high) if plain is int:
            coded = proto.type or ("int64" if high < 1 << 63 else "uint64")
            return Scalar(coded, number, lambda raw: "" if low <= raw <= high else f"is {raw}, not in {low}..{high}")
        case Size(most=most, cut=cut, printable=printable) if plain is str:
            pack = (lambda words: words[:most].encode("utf-8", "replace").decode("utf-8")) if cut else _same
            size = text + (1 if printable else 4) * most
            return Scalar("string", size, lambda raw: _text_problem(raw, most, printable), pack)
        case Size(most=most, least=least) if plain is bytes:
            return Scalar("bytes", text + most, lambda raw: _length_problem(raw, least, most), bytes)
        case Between() | None if plain is float:
            low, high = (bound.low, bound.high) if bound else (-math.inf, math.inf)
            finite = f"no finite {low}..{high}"
            return Scalar(
                "double", number, lambda raw: "" if math.isfinite(raw) and low <= raw <= high else f"is {raw}, {finite}"
            )
    if plain is bool:
        return Scalar("bool", number)  # nothing to check
    origin: Any = get_origin(plain)
    if origin is Literal:
        return _words(get_args(plain))
    if isinstance(plain, type) and issubclass(plain, Enum):
        words = _words(tuple(member.value for member in plain))
        return dataclasses.replace(words, pack=attrgetter("value"), unpack=plain)
    # Half as long as its hex digits.
    if plain in (Chain, RunId):
        return Scalar("bytes", text + 32, lambda raw: _length_problem(raw, 32, 32), _unhex, bytes.hex)
    if plain is PeerId and proto.type == "bytes":
        return Scalar(
            "bytes",
            text + KEY_BYTES,
            lambda raw: _length_problem(raw, KEY_BYTES, KEY_BYTES),
            public_bytes_of,
            peer_id_from_public_bytes,
        )
    if plain is PeerId:
        size = text + PEER_ID_CHARS
        return Scalar(
            "string", size, lambda raw: "" if is_peer_id(raw) else f"is {raw[:64]!r}, no peer id", unpack=PeerId
        )
    if plain == frozenset[int]:
        below = _most_indexes(bounds)
        size = text + most_set_bytes(below)
        return Scalar("bytes", size, lambda raw: indexes_problem(raw, below), to_bytes, from_bytes)
    raise TypeError(f"{where}: no field is derived from {plain}")


def _text_problem(raw: str, most: int, printable: bool) -> str:
    if len(raw) > most:
        return f"has {len(raw)} characters, more than {most}"
    return (
        "has characters other than printable ASCII" if printable and not (raw.isascii() and raw.isprintable()) else ""
    )


def _length_problem(raw: bytes, least: int, most: int) -> str:
    allowed = f"{least}..{most}" if least < most else least
    return "" if least <= len(raw) <= most else f"has {len(raw)} bytes, not {allowed}"


def _words(words: tuple[str, ...]) -> Scalar:
    return Scalar(
        "string",
        TAG_BYTES + LENGTH_BYTES + max(map(len, words)),
        lambda raw: "" if raw in words else f"is {raw[:32]!r}, no word that is known",
    )


def _unhex(text: str) -> bytes:
    # Capitals would come back as other text.
    assert set(text) <= set("0123456789abcdef"), f"{text!r} is not in lower-case hex digits"
    return bytes.fromhex(text)
