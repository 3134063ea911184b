"""Signed, expiring announcements: one peer's `Record` under one DHT key, to bytes and back.

    signature (64 bytes) | JSON      signed: a domain separator, then the JSON, which names run, place and expiry

A record is announced once per *place*: each stage the peer serves, "trainers", and, by those who serve a stage, the
whole run, which its first digits are enough to find. The DHT key follows from run and place, so bytes that are genuine
under one key are refused under every other. The expiry doubles as the sequence number: a peer never publishes an
earlier one twice, and of two of a peer's announcements the later expiry is the newer.

Knows no DHT and no clock: `now` (wall-clock seconds, the DHT's common time) is an argument.

What is known of a run is a bounded table: the newest genuine announcement of each peer, until it expires by its own
clock. A full table keeps those who were there first; only somebody admitted takes the place of the newest who is not.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar, get_args

from swarmnet.directory import Complaint, Grounds, Record, StageStatus
from swarmnet.errors import BadMessage, RejectCode, UsageError
from swarmnet.ids import Chain, OnDisk, PeerId, Restart, RunId
from swarmnet.net.address import Address
from swarmnet.net.admission import MAX_CHARS
from swarmnet.net.identity import verify

TTL_S = 30.0
MAX_AHEAD_S = 120.0  # an expiry further in the future is refused: nobody squats in the DHT
MAX_BYTES = 8192  # checked before anything is parsed; an ordinary record has 700 to 1100
MAX_NUM_STAGES = 1024
MAX_STAGES_PER_PEER = 16
MAX_ADDRESSES = 8
MAX_ON_DISK = 8  # checkpoints of one stage that are announced, the newest
MAX_COMPLAINTS = 8  # of all stages together
MAX_REASON = 80
MAX_TEXT = 256
TRAINERS = "trainers"
WHOLE_RUN = "run"
FIRST_DIGITS = 12  # of the run id: what names a run in its `WHOLE_RUN` key

_DOMAIN = b"swarmnet record 1\0"
_SIGNATURE_BYTES = 64
_HEX_64 = re.compile(r"[0-9a-f]{64}")
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?")
_FIELDS = frozenset(
    (
        "run",
        "peer",
        "place",
        "expiry_ms",
        "num_stages",
        "incarnation",
        "addresses",
        "dht",
        "stages",
        "trainer",
        "numerics",
        "loss",
        "eval_loss",
        "tokens_per_second",
        "finished",
        "halted",
        "restart",
        "invitation",
        "wants",
        "complaints",
    )
)

Place = int | str
"""Where a record is announced: a stage's number, `TRAINERS`, or `WHOLE_RUN`."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A genuine record as found in the DHT. dht: multiaddrs (with /p2p/) at which the peer's own DHT node listens.

    num_stages: how many stages the peer says the run has. expiry_ms: Unix milliseconds.
    """

    record: Record
    place: Place
    expiry_ms: int
    num_stages: int
    dht: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The DHT key it belongs under."""
        return dht_key(self.record.run, self.place)


def dht_key(run: RunId, place: Place) -> str:
    """The DHT key of a place: `{run}.stage.{k}`, `{run}.trainers`, or `{first digits}.run`."""
    if place == WHOLE_RUN:
        return f"{run[:FIRST_DIGITS]}.{WHOLE_RUN}"
    return f"{run}.{TRAINERS}" if place == TRAINERS else f"{run}.stage.{place}"


def bans_key(run: RunId) -> str:
    """The DHT key of a run's list of bans."""
    return f"{run}.bans"


def places_of(record: Record) -> tuple[Place, ...]:
    """Everywhere `record` is to be announced."""
    stages = tuple(status.stage for status in record.stages)
    return (*stages, *((TRAINERS,) if record.trainer else ()), *((WHOLE_RUN,) if stages else ()))


def seal(announcement: Announcement, sign: Callable[[bytes], bytes]) -> bytes:
    """Encode and sign. A non-finite loss is left out (a diverged run still announces itself).

    Raises UsageError if the record is too large or breaks a rule that `unseal` checks: nobody would accept it.
    """
    record = _finite(announcement.record)
    fields = {
        "run": record.run,
        "peer": record.peer,
        "place": announcement.place,
        "expiry_ms": announcement.expiry_ms,
        "num_stages": announcement.num_stages,
        "incarnation": record.incarnation,
        "addresses": record.addresses,
        "dht": announcement.dht,
        "stages": [_sealed(s) for s in record.stages],
        "trainer": record.trainer,
        "numerics": record.numerics,
        "loss": record.loss,
        "eval_loss": record.eval_loss,
        "tokens_per_second": record.tokens_per_second,
        "finished": record.finished,
        "halted": record.halted,
        "restart": [record.restart.number, record.restart.version],
        "invitation": record.invitation,
        "wants": [record.wants.number, record.wants.version],
        "complaints": [
            [c.stage, c.peer, c.how, c.reason[:MAX_REASON], c.seconds] for c in record.complaints[:MAX_COMPLAINTS]
        ],
    }
    payload = json.dumps(fields, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()
    try:
        if len(payload) + _SIGNATURE_BYTES > MAX_BYTES:
            if record.complaints:  # to be found matters more
                return seal(replace(announcement, record=replace(record, complaints=())), sign)
            _refuse("record is too large", RejectCode.TOO_LARGE, size=len(payload) + _SIGNATURE_BYTES)
        _announcement(json.loads(payload))
    except BadMessage as error:
        raise UsageError(f"cannot announce this peer: {error.reason}", **error.facts) from error
    return sign(_DOMAIN + payload) + payload


def unseal(data: bytes, *, now: float, grace_s: float = 0.0) -> Announcement:
    """Decode and verify. Total: any bytes give an Announcement or BadMessage.

    Refuses what expired more than `grace_s` ago and what expires more than `MAX_AHEAD_S` ahead.
    """
    if len(data) > MAX_BYTES:
        _refuse("record is too large", RejectCode.TOO_LARGE, size=len(data))
    signature, payload = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
    try:
        fields = json.loads(payload.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadMessage(RejectCode.MALFORMED, "record is not JSON") from error
    announcement = _announcement(fields)
    expiry = announcement.expiry_ms / 1000
    if not now - grace_s < expiry <= now + MAX_AHEAD_S:
        _refuse("record has expired or expires too far ahead", RejectCode.CLOCK, seconds_left=round(expiry - now, 3))
    if not verify(announcement.record.peer, _DOMAIN + payload, signature):
        _refuse("record is not signed by its peer", RejectCode.UNKNOWN_IDENTITY, peer=announcement.record.peer)
    return announcement


# ---------------------------------------------------------------- one rule per field


def _announcement(fields: object) -> Announcement:
    """Check every field; the signature is not looked at."""
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        _refuse("record has missing or unknown fields")
    num_stages = _whole("num_stages", fields["num_stages"], 1, MAX_NUM_STAGES)
    statuses = tuple(_status(entry, num_stages) for entry in _list("stages", fields["stages"], MAX_STAGES_PER_PEER))
    stages = tuple(status.stage for status in statuses)
    if len(set(stages)) != len(stages):
        _refuse("record names a stage twice")
    peer = PeerId(_peer(fields["peer"]))
    record = Record(
        run=RunId(_hex("run", fields["run"])),
        peer=peer,
        incarnation=_whole("incarnation", fields["incarnation"], 0, 2**64 - 1),
        addresses=tuple(_address(entry, peer) for entry in _list("addresses", fields["addresses"], MAX_ADDRESSES)),
        stages=statuses,
        trainer=_flag("trainer", fields["trainer"]),
        numerics=_text("numerics", fields["numerics"]),
        loss=_loss("loss", fields["loss"]),
        eval_loss=_loss("eval_loss", fields["eval_loss"]),
        tokens_per_second=_number("tokens_per_second", fields["tokens_per_second"], 0.0, 1e15),
        finished=_flag("finished", fields["finished"]),
        halted=None if fields["halted"] is None else _whole("halted", fields["halted"], 0, 2**53),
        restart=_restart("restart", fields["restart"]),
        wants=_restart("wants", fields["wants"]),
        invitation=_text("invitation", fields["invitation"], MAX_CHARS),
        complaints=tuple(
            _complaint(entry, num_stages) for entry in _list("complaints", fields["complaints"], MAX_COMPLAINTS)
        ),
    )
    place = fields["place"]
    if type(place) not in (int, str) or place not in places_of(record):
        _refuse("record does not claim the place it is announced under", RejectCode.NOT_SERVED)
    dht = tuple(_address(entry, peer) for entry in _list("dht", fields["dht"], MAX_ADDRESSES))
    if not all(address.endswith(f"/p2p/{peer}") for address in dht):
        _refuse("record gives a DHT address without its peer id")
    return Announcement(record, place, _whole("expiry_ms", fields["expiry_ms"], 0, 2**53), num_stages, dht)


def _status(entry: object, num_stages: int) -> StageStatus:
    if not isinstance(entry, list) or len(entry) != 13:
        _refuse("stages: not thirteen fields")
    (stage, version, chain, synced, queue, slots, disk, draining, executions, counted, drift, stray, still_s) = entry
    return StageStatus(
        stage=_whole("stage", stage, 0, num_stages - 1),
        version=_whole("version", version, 0, 2**53),
        chain=Chain(_hex("chain", chain)),
        synced=_flag("synced", synced),
        queue=_whole("queue", queue, 0, 2**31),
        slots=_whole("slots", slots, 0, 2**31),
        disk=tuple(map(_on_disk, _list("disk", disk, MAX_ON_DISK))),
        draining=_flag("draining", draining),
        executions=_whole("executions", executions, 0, 2**53),
        counted=_whole("counted", counted, 0, 2**53),
        drift=None if drift is None else _whole("drift", drift, 0, 2**53),
        stray=_flag("stray", stray),
        still_s=_whole("still_s", still_s, 0, 2**31),
    )


def _sealed(status: StageStatus) -> list[object]:
    return [
        status.stage,
        status.version,
        status.chain,
        status.synced,
        status.queue,
        status.slots,
        [[kept.version, kept.restart.number, kept.restart.version] for kept in status.disk[-MAX_ON_DISK:]],
        status.draining,
        status.executions,
        status.counted,
        status.drift,
        status.stray,
        status.still_s,
    ]


def _complaint(entry: object, num_stages: int) -> Complaint:
    if not isinstance(entry, list) or len(entry) != 5 or entry[2] not in get_args(Grounds):
        _refuse("complaints: not a stage, a peer, what of four, why and how long")
    stage, peer, how, reason, seconds = entry
    return Complaint(
        _whole("complaints", stage, 0, num_stages - 1),
        PeerId(_peer(peer)),
        how,
        _text("complaints", reason, MAX_REASON),
        _whole("complaints", seconds, 0, 2**31),
    )


def _on_disk(value: object) -> OnDisk:
    numbers = [_whole("disk", number, 0, 2**53) for number in _list("disk", value, 3)]
    if len(numbers) != 3:
        _refuse("disk: not a version and a restart")
    return OnDisk(numbers[0], Restart(numbers[1], numbers[2]))


def _restart(name: str, value: object) -> Restart:
    number, version = _pair(name, value)
    return Restart(_whole(name, number, 0, 2**53), _whole(name, version, 0, 2**53))


def _address(entry: object, peer: PeerId) -> str:
    """A multiaddr of a TCP port; a peer id in it must be the record's own."""
    text = _text("address", entry)
    parts = text.split("/")
    if len(parts) > 2 and parts[1] in ("dns4", "dns6") and not all(map(_LABEL.fullmatch, parts[2].split("."))):
        _refuse("address: not a host name", address=text)
    try:
        address = Address.parse(text)
    except UsageError as error:
        raise BadMessage(RejectCode.MALFORMED, "address: not a multiaddr of a TCP port", address=text) from error
    if address.peer not in (None, peer):
        _refuse("address: names another peer", address=text)
    return text


def _peer(value: object) -> str:
    """Only its syntax: whose key it embeds is the signature's business."""
    text = _text("peer", value)
    if len(text) != 52 or not text.startswith("12D3Koo") or not text.isalnum():
        _refuse("peer: not an Ed25519 peer id")
    return text


def _loss(name: str, value: object) -> tuple[int, float] | None:
    if value is None:
        return None
    step, loss = _pair(name, value)
    return _whole(name, step, 0, 2**53), _number(name, loss, -1e30, 1e30)


def _pair(name: str, value: object) -> tuple[object, object]:
    first, *rest = _list(name, value, 2) or [None]
    if len(rest) != 1:
        _refuse(f"{name}: not a pair")
    return first, rest[0]


def _list(name: str, value: object, limit: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > limit:
        _refuse(f"{name}: not a list of at most {limit}")
    return value


def _whole(name: str, value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        _refuse(f"{name}: not a whole number from {low} to {high}")
    return value


def _number(name: str, value: Any, low: float, high: float) -> float:
    if type(value) not in (int, float) or not low <= value <= high:  # NaN fails every comparison
        _refuse(f"{name}: not a finite number from {low:g} to {high:g}", RejectCode.NON_FINITE)
    return float(value)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        _refuse(f"{name}: not true or false")
    return value


def _text(name: str, value: object, limit: int = MAX_TEXT) -> str:
    if not isinstance(value, str) or len(value) > limit or not (value.isascii() and value.isprintable()):
        _refuse(f"{name}: not at most {limit} printable ASCII characters")
    return value


def _hex(name: str, value: object) -> str:
    if not isinstance(value, str) or not _HEX_64.fullmatch(value):
        _refuse(f"{name}: not 64 hex digits")
    return value


def _no_constant(name: str) -> NoReturn:
    _refuse("record holds a non-finite number", RejectCode.NON_FINITE, constant=name)


def _refuse(reason: str, code: RejectCode = RejectCode.MALFORMED, **facts: object) -> NoReturn:
    raise BadMessage(code, reason, **facts)


def _finite(record: Record) -> Record:
    loss, eval_loss = (pair if pair and math.isfinite(pair[1]) else None for pair in (record.loss, record.eval_loss))
    speed = record.tokens_per_second if math.isfinite(record.tokens_per_second) else 0.0
    return replace(record, loss=loss, eval_loss=eval_loss, tokens_per_second=speed)


# ---------------------------------------------------------------- what is known of a run


MAX_PEERS = 4096


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

    def get(self, peer: PeerId, *, now: float) -> Announcement | None:
        """This peer's, if it has not expired."""
        found = self._newest.get(peer)
        return found if found is not None and found.expiry_ms > now * 1000 else None

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


def nobody_serves(stages: tuple[int, ...]) -> dict[str, object]:
    """Fields of the event `waiting`."""
    return {
        "reason": f"nobody serves stage {', '.join(map(str, stages))} yet",
        "advice": f"start a peer with --stage {','.join(map(str, stages))} and --bootstrap with an address of this one",
    }
