"""Signed, expiring announcements: one peer's `Record` under one DHT key, to bytes and back.

    signature (64 bytes) | JSON      signed: a domain separator, then the JSON, which names run, place and expiry

A record is announced once per *place*: each stage the peer serves, or its part of a large one; "trainers"; "movers",
if the peer would go to another stage; and, by those who serve a stage, the whole run, which its first digits are enough
to find. The DHT key follows from run and place, so bytes that are genuine
under one key are refused under every other. The expiry doubles as the sequence number: a peer never publishes an
earlier one twice, and of two of a peer's announcements the later expiry is the newer.

Knows no DHT and no clock: `now` (wall-clock seconds, the DHT's common time) is an argument.

What is known of a run is a bounded table: the newest genuine announcement of each peer, until it expires by its own
clock. A full table keeps those who were there first; only somebody admitted takes the place of the newest who is not.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from swarmnet.bounds import Between, Entries
from swarmnet.directory import (
    MAX_COMPLAINTS,
    MAX_NUM_STAGES,
    MAX_ON_DISK,
    MAX_REASON,
    MAX_STAGES_PER_PEER,
    Addresses,
    Record,
)
from swarmnet.errors import BadMessage, RejectCode, UsageError
from swarmnet.ids import Chain, Number, PeerId, RunId, mark_of
from swarmnet.net.address import Address
from swarmnet.net.identity import verify
from swarmnet.quorum import quorum

TTL_S = 30.0
MAX_AHEAD_S = 120.0  # an expiry further in the future is refused: nobody squats in the DHT
MAX_BYTES = 8192  # before it is parsed. Ordinary: 700 to 1100; 16 stages with 8 checkpoints each: up to 7400
TRAINERS = "trainers"
WHOLE_RUN = "run"
MAX_PEERS = 1 << 14  # of a run that one peer remembers
FIRST_DIGITS = 12  # of the run id: what names a run in its `WHOLE_RUN` key

_DOMAIN = b"swarmnet record 1\0"
_SIGNATURE_BYTES = 64
_HEX_64 = re.compile(r"[0-9a-f]{64}")
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?")
MOVERS = "movers"
Place = int | str
"""Where a record is announced: a stage's number, or that and the first bits of the peer's mark ("3/01");
`TRAINERS`, `MOVERS`, or `WHOLE_RUN`."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A genuine record as found in the DHT. dht: multiaddrs (with /p2p/) at which the peer's own DHT node listens.

    num_stages: how many stages the peer says the run has. expiry_ms: Unix milliseconds. parts: in how many parts, as a
    power of two, the records of each of its stages lie, as it sees it.
    """

    record: Record
    place: Place
    expiry_ms: int
    num_stages: int
    dht: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """The DHT key it belongs under."""
        return dht_key(self.record.run, self.place)


def dht_key(run: RunId, place: Place) -> str:
    """The DHT key of a place: `{run}.stage.{k}`, `{run}.stage.{k}/{bits}`, `{run}.trainers`, `{run}.movers`, or
    `{first digits}.run`."""
    if place == WHOLE_RUN:
        return f"{run[:FIRST_DIGITS]}.{WHOLE_RUN}"
    return f"{run}.{place}" if place in (TRAINERS, MOVERS) else f"{run}.stage.{place}"


def bans_key(run: RunId) -> str:
    """The DHT key of a run's list of bans."""
    return f"{run}.bans"


def notice_key(run: RunId) -> str:
    """The DHT key of the newest notice that extends a run."""
    return f"{run}.longer"


def places_of(record: Record, parts: Sequence[int] = ()) -> tuple[Place, ...]:
    """Everywhere `record` is to be announced. parts: of its stages, as in an `Announcement`."""
    stages = [
        place
        for status, bits in zip(record.stages, parts or itertools.repeat(0), strict=False)
        for place in places_in(record.peer, status.stage, bits)
    ]
    return (
        *stages,
        *((TRAINERS,) if record.trainer else ()),
        *((MOVERS,) if stages and record.going is not None else ()),
        *((WHOLE_RUN,) if stages else ()),
    )


# ---------------------------------------------------------------- large stages
#
# Of a stage of more replicas than one key should hold, the records lie in parts: each under the first bits of a hash of
# its peer's id, its *mark*. Those of the first part are found under the stage's own key as well, and tell whoever looks
# there first how many parts there are. A peer reads its own part of each stage near it, so it reads as much in a stage
# of a thousand as in one of thirty.

MANY, FEW = 24, 9
"""Records of a part: more are cut in two, fewer are put together."""

MAX_PARTS = 10
"""As a power of two."""


def part_of(mark: int, stage: int, bits: int) -> Place:
    """The place of the part of a stage in which this mark lies, of 2**bits."""
    return f"{stage}/{mark >> (64 - bits):0{bits}b}" if bits else stage


def places_in(peer: PeerId, stage: int, bits: int) -> tuple[Place, ...]:
    """Where the record of a replica of a stage is announced."""
    mark = mark_of(peer)
    first = (stage,) if bits and not mark >> (64 - bits) else ()
    return (part_of(mark, stage, bits), *first)


def parts_seen(found: Sequence[Announcement], stage: int) -> int | None:
    """In how many parts, as a power of two, the records of a stage should lie. found: what lies under its own key.
    None: there is nothing."""
    said = [parts_said(each, stage) for each in found]
    if not said:
        return None
    bits = statistics.median_low(said)
    if len(said) > MANY:
        return min(bits + 1, MAX_PARTS)
    return bits - 1 if bits and len(said) < FEW else bits


def parts_said(found: Announcement, stage: int) -> int:
    """As the author of an announcement sees it."""
    stages = [status.stage for status in found.record.stages]
    return found.parts[stages.index(stage)] if stage in stages and found.parts else 0


def seal(announcement: Announcement, sign: Callable[[bytes], bytes]) -> bytes:
    """Encode and sign. A non-finite loss is left out (a diverged run still announces itself).

    Raises UsageError if the record is too large or breaks a rule that `unseal` checks: nobody would accept it.
    """
    record = _announceable(announcement.record)
    fields = {
        each.name: _to_json(value)
        for each in dataclasses.fields(record)
        if (value := getattr(record, each.name)) != each.default or each.name not in _OPTIONAL
    }
    fields |= {"place": announcement.place, "expiry_ms": announcement.expiry_ms, "dht": announcement.dht}
    fields |= {"num_stages": announcement.num_stages, "parts": announcement.parts}
    payload = json.dumps(fields, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()
    try:
        if len(payload) + _SIGNATURE_BYTES > MAX_BYTES:
            # To be found matters more than what it holds against others.
            found = replace(record, complaints=(), tainted=(), disputed=None)
            if found != record:
                return seal(replace(announcement, record=found), sign)
            _refuse("record is too large", RejectCode.TOO_LARGE, size=len(payload) + _SIGNATURE_BYTES)
        _announcement(json.loads(payload))
    except BadMessage as error:
        raise UsageError(f"cannot announce this peer: {error.reason}", **error.facts) from error
    return sign(_DOMAIN + payload) + payload


def unseal(data: bytes, *, now: float, grace_s: float = 0.0) -> Announcement:
    """Decode and verify. Total: any bytes give an Announcement or BadMessage.

    Refuses what expired more than `grace_s` ago and what expires more than `MAX_AHEAD_S` ahead.
    """
    # Before anything is parsed.
    if len(data) > MAX_BYTES:
        _refuse("record is too large", RejectCode.TOO_LARGE, size=len(data))
    signature, payload = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
    try:
        fields = json.loads(payload.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadMessage(RejectCode.MALFORMED, "record is not JSON") from error
    announcement = _announcement(fields)
    expiry = announcement.expiry_ms / 1000
    # Before the signature, which costs a thousand times as much.
    if not now - grace_s < expiry <= now + MAX_AHEAD_S:
        _refuse("record has expired or expires too far ahead", RejectCode.CLOCK, seconds_left=round(expiry - now, 3))
    if not verify(announcement.record.peer, _DOMAIN + payload, signature):
        _refuse("record is not signed by its peer", RejectCode.UNKNOWN_IDENTITY, peer=announcement.record.peer)
    return announcement


# ---------------------------------------------------------------- values as JSON, derived from the type hints


def _announcement(fields: object) -> Announcement:
    """Check every field; the signature is not looked at."""
    # What a later minor version has added is passed over, and what an earlier one lacks has its default.
    if not isinstance(fields, dict) or not fields.keys() >= _REQUIRED:
        _refuse("record has missing fields")
    envelope = {name: _from_json(hint, fields[name], name) for name, hint in _ENVELOPE.items()}
    known = {name: hint for name, hint in _HINTS.items() if name in fields}
    record = Record(**{name: _from_json(hint, fields[name], name) for name, hint in known.items()})
    num_stages, place, peer = envelope["num_stages"], fields["place"], record.peer
    stages = [status.stage for status in record.stages]
    # Else its claims about one stage would contradict each other.
    if len(set(stages)) != len(stages):
        _refuse("record names a stage twice")
    named = [*stages, *(each.stage for each in record.complaints), *(each.stage for each in record.tainted)]
    named += [record.disputed.stage] if record.disputed else []
    if any(stage >= num_stages for stage in named):
        _refuse("record names a stage that the run does not have", num_stages=num_stages)
    if type(place) not in (int, str) or place not in places_of(record, envelope["parts"]):
        _refuse("record does not claim the place it is announced under", RejectCode.NOT_SERVED)
    for address in (*record.addresses, *envelope["dht"]):
        _check_address(address, peer)
    # Others dial it under that id: it must be the one who signed.
    if not all(address.endswith(f"/p2p/{peer}") for address in envelope["dht"]):
        _refuse("record gives a DHT address without its peer id")
    if envelope["parts"] and len(envelope["parts"]) != len(stages):
        _refuse("record tells of parts of others than its stages")
    return Announcement(record, place, envelope["expiry_ms"], num_stages, envelope["dht"], envelope["parts"])


def _to_json(value: object) -> object:
    """A dataclass is a list of its fields, those of a dataclass in it in line."""
    if dataclasses.is_dataclass(value):
        return list(_line(value))
    return [_to_json(each) for each in value] if isinstance(value, tuple) else value


def _line(value: Any) -> Iterator[object]:
    for each in dataclasses.fields(value):
        part = getattr(value, each.name)
        if dataclasses.is_dataclass(part):
            yield from _line(part)
        else:
            yield _to_json(part)


def _from_json(hint: Any, raw: Any, name: str) -> Any:
    """The inverse of `_to_json`: a value of this type, within the bounds beside it. Raises BadMessage."""
    plain, bound = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, None)
    parts = get_args(plain)
    if get_origin(plain) in (Union, UnionType):  # which of the two depends on what stands before `| None`
        return None if raw is None else _from_json(parts[0], raw, name)
    if get_origin(plain) is tuple:
        most = bound.most if isinstance(bound, Entries) else len(parts)
        if not isinstance(raw, list) or len(raw) > most or (bound is None and len(raw) < most):
            _refuse(f"{name}: not a list of {'at most ' if bound else ''}{most}")
        hints = parts[:1] * len(raw) if bound else parts
        return tuple(_from_json(each, entry, name) for each, entry in zip(hints, raw, strict=True))
    if dataclasses.is_dataclass(plain):
        if not isinstance(raw, list) or len(raw) != _width(plain):
            _refuse(f"{name}: not {_width(plain)} fields")
        return _from_line(plain, iter(raw), name)
    if plain is bool and isinstance(raw, bool):
        return raw
    if plain is int and type(raw) is int and bound.low <= raw <= bound.high:
        return raw
    if plain is float:
        if type(raw) not in (int, float) or not bound.low <= raw <= bound.high:  # NaN fails every comparison
            _refuse(f"{name}: not a finite number from {bound.low:g} to {bound.high:g}", RejectCode.NON_FINITE)
        return float(raw)
    if isinstance(raw, str) and raw.isascii() and raw.isprintable():
        # Of a peer id only the syntax: whose key it embeds is the signature's business.
        if plain is PeerId and len(raw) == 52 and raw.startswith("12D3Koo") and raw.isalnum():
            return raw
        if plain in (Chain, RunId) and _HEX_64.fullmatch(raw):
            return raw
        if plain is str and len(raw) <= bound.most:
            return raw
    if get_origin(plain) is Literal and raw in parts:
        return raw
    _refuse(f"{name}: not {_WORDS.get(plain, 'one of a few words')}")


def _from_line(make: Any, entries: Iterator[Any], name: str) -> Any:
    parts = {
        field: _from_line(hint, entries, field)
        if dataclasses.is_dataclass(hint)
        else _from_json(hint, next(entries), f"{name}: {field}")
        for field, hint in _hints(make).items()
    }
    return make(**parts)


def _width(make: Any) -> int:
    return sum(_width(hint) if dataclasses.is_dataclass(hint) else 1 for hint in _hints(make).values())


@functools.cache
def _hints(make: Any) -> dict[str, Any]:
    return get_type_hints(make, include_extras=True)


_HINTS = _hints(Record)
_ENVELOPE: dict[str, Any] = {
    "expiry_ms": Number,
    "num_stages": Annotated[int, Between(1, MAX_NUM_STAGES)],
    "dht": Addresses,
    "parts": Annotated[tuple[Annotated[int, Between(0, MAX_PARTS)], ...], Entries(MAX_STAGES_PER_PEER)],
}
"""What stands beside the record in an announcement."""
_OPTIONAL = ("steps", "step_s", "software", "region", "tainted", "num_tainted", "disputed", "num_disputed", "goes_back")
"""Fields that minor versions of the protocol have added: written where they are not their default."""
_REQUIRED = (_HINTS.keys() | _ENVELOPE.keys() | {"place"}) - set(_OPTIONAL)

_WORDS = {
    bool: "true or false",
    int: "a whole number in its range",
    str: "printable ASCII characters, not too many",
    PeerId: "an Ed25519 peer id",
    Chain: "64 hex digits",
    RunId: "64 hex digits",
}


def _check_address(text: str, peer: PeerId) -> None:
    """A multiaddr of a TCP port, or a circuit; whom it leads to must be the record's own peer."""
    parts = text.split("/")
    if len(parts) > 2 and parts[1] in ("dns4", "dns6") and not all(map(_LABEL.fullmatch, parts[2].split("."))):
        _refuse("address: not a host name", address=text)
    try:
        address = Address.parse(text)
    except UsageError as error:
        raise BadMessage(RejectCode.MALFORMED, "address: neither a TCP port's nor a circuit's", address=text) from error
    # A record must not send others to somebody else under this name.
    if address.peer not in (None, peer):
        _refuse("address: names another peer", address=text)


def _no_constant(name: str) -> NoReturn:
    _refuse("record holds a non-finite number", RejectCode.NON_FINITE, constant=name)


def _refuse(reason: str, code: RejectCode = RejectCode.MALFORMED, **facts: object) -> NoReturn:
    raise BadMessage(code, reason, **facts)


def _announceable(record: Record) -> Record:
    """Without what is not finite, and what is more than a record holds."""
    loss, eval_loss = (pair if pair and math.isfinite(pair[1]) else None for pair in (record.loss, record.eval_loss))
    return replace(
        record,
        loss=loss,
        eval_loss=eval_loss,
        tokens_per_second=record.tokens_per_second if math.isfinite(record.tokens_per_second) else 0.0,
        stages=tuple(replace(status, disk=status.disk[-MAX_ON_DISK:]) for status in record.stages),
        complaints=tuple(replace(c, reason=cut(c.reason, MAX_REASON)) for c in record.complaints[:MAX_COMPLAINTS]),
    )


def cut(text: str, most: int) -> str:
    """At most so many characters of it: whole words, and dots in the place of what is left out."""
    return text if len(text) <= most else f"{text[: most - 3].rsplit(' ', 1)[0]}..."


# ---------------------------------------------------------------- what is known of a run


K = TypeVar("K")
V = TypeVar("V")


def gives_way(standing: Mapping[K, V], admits: Callable[[V], bool]) -> K | None:
    """Who leaves a full place for somebody admitted: the newest who is not, if anybody. standing: the first first."""
    return next((who for who in reversed(tuple(standing)) if not admits(standing[who])), None)


class RecordTable:
    """Announcements of one run by peer; the later expiry is the newer one. admits: may its peer take part now?"""

    def __init__(
        self,
        run: RunId | None,
        *,
        admits: Callable[[Announcement], bool] = lambda found: True,
        max_peers: int = MAX_PEERS,
    ) -> None:
        self._run, self._admits, self._max_peers = run, admits, max_peers
        self._newest: dict[PeerId, Announcement] = {}  # in the order in which they came

    def offer(self, found: Announcement, *, now: float) -> bool:
        """Take in a verified announcement. Returns whether it told something new; when full, newcomers have to wait."""
        peer = found.record.peer
        held = self._newest.get(peer)
        # Copies of older announcements go around in the DHT for as long as they last.
        if found.record.run != self._run or (held is not None and held.expiry_ms >= found.expiry_ms):
            return False
        if held is None and len(self._newest) >= self._max_peers:
            self.fresh(now=now)
            if len(self._newest) >= self._max_peers:
                loser = gives_way(self._newest, self._admits) if self._admits(found) else None
                if loser is None:
                    return False
                del self._newest[loser]
        self._newest[peer] = found
        return held is None or held.record != found.record

    def __len__(self) -> int:
        return len(self._newest)

    def get(self, peer: PeerId, *, now: float) -> Announcement | None:
        """This peer's, if it has not expired."""
        found = self._newest.get(peer)
        return found if found is not None and found.expiry_ms > now * 1000 else None

    def at(self, place: Place, *, now: float) -> tuple[Announcement, ...]:
        """What has not expired and is announced at that place."""
        return tuple(each for each in self.fresh(now=now) if place in places_of(each.record, each.parts))

    def fresh(self, *, now: float) -> tuple[Announcement, ...]:
        """What has not expired, sorted by peer; forgets the rest."""
        self._newest = {peer: found for peer, found in self._newest.items() if found.expiry_ms > now * 1000}
        return tuple(found for _, found in sorted(self._newest.items()))


def agreed_num_stages(announcements: Iterable[Announcement]) -> int:
    """How many stages most peers say the run has (the smaller number on a tie); 0 if nobody said."""
    votes = Counter(found.num_stages for found in announcements)
    return min(votes, key=lambda number: (-votes[number], number), default=0)


def unserved(records: Iterable[Record], *, num_stages: int, mine: Iterable[int] = ()) -> tuple[int, ...]:
    """Stages of which there is no replica among `records`. mine: those that are served here."""
    served = {status.stage for record in records for status in record.stages}
    return tuple(sorted(set(range(num_stages)) - served - set(mine)))


def left_out(records: Collection[Record], stage: int, *, banned: bool = False) -> frozenset[PeerId]:
    """The replicas of a stage that most others of it, two at least, go on without (as `View.cut_off`).

    banned: only those that they have banned."""
    serve = {record.peer for record in records if any(status.stage == stage for status in record.stages)}
    said = Counter(
        peer
        for record in records
        if record.peer in serve
        for peer in {
            each.peer
            for each in record.complaints
            if each.stage == stage and (each.how == "convicted" if banned else each.how != "waited_for")
        }
    )
    return frozenset(peer for peer, voices in said.items() if voices > 1 and voices >= quorum(serve - {peer}))


def nobody_serves(stages: tuple[int, ...], *, stranger_to: str = "") -> dict[str, object]:
    """Fields of the event `waiting`. stranger_to: my run, of which nobody is where --bootstrap leads."""
    return {
        "reason": f"nobody serves stage {', '.join(map(str, stages))} yet",
        "advice": f"start the peers of these stages; if they run already, their manifest differs, because none behind "
        f"--bootstrap is in run {stranger_to[:12]}: compare it with the link they print, swarm:RUN@..., or join by it"
        if stranger_to
        else f"unless one is just starting, start a peer with --stage {','.join(map(str, stages))} and "
        "--bootstrap with an address of this one, and with the --dir that served it before, if one did",
    }
