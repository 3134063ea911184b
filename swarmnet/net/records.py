"""Signed, expiring announcements: one peer's `Record` under one DHT key, in an envelope (`wire.signed`).

A record is announced under several keys: one of each stage the peer serves, or its part of a large one; "trainers";
"movers", if the peer would go to another stage; and, for members that serve a stage, the whole run, which its first
digits are enough to find. The DHT key follows from the run and that name, so bytes that are genuine under one key are
refused under all others. The end of the envelope doubles as the sequence number: a peer never publishes an earlier one
twice, and of two of a peer's announcements the one that ends later is the newer.

Knows no DHT and no clock: `now` (wall-clock seconds, the DHT's common time) is an argument.

What is known of a run is a bounded table: the newest genuine announcement of each peer, until it expires by its own
clock. A full table keeps the peers that were there first; only an admitted peer replaces the newest that is not.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

from swarmnet.bounds import Between, Entries, Outside, Size
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
from swarmnet.ids import PeerId, RunId, mark_of
from swarmnet.net.address import Address
from swarmnet.net.identity import verify
from swarmnet.quorum import quorum
from swarmnet.statement import MAX_PAYLOAD_BYTES, SignedMessage
from swarmnet.wire import signed as signing
from swarmnet.wire.fields import Wrong

TTL_S = 30.0
MAX_AHEAD_S = 120.0  # an expiry further in the future is refused: no peer can squat in the DHT
TRAINERS = "trainers"
WHOLE_RUN = "run"
MAX_PEERS = 1 << 14  # of a run that one peer remembers
FIRST_DIGITS = 12  # of the run id: what names a run in its `WHOLE_RUN` key

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?")
MOVERS = "movers"
Place = Annotated[str, Size(32, printable=True)]
"""Where a record is announced: a stage's number, or that and the first bits of the peer's mark ("3/01");
`TRAINERS`, `MOVERS`, or `WHOLE_RUN`."""

MANY, FEW = 24, 9
"""Records of a part: more are cut in two, fewer are put together."""

MAX_PARTS = 10
"""As a power of two."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A genuine record as found in the DHT."""

    record: Record
    place: Place
    expiry_ms: Annotated[int, Outside()] = 0
    """Unix milliseconds: the end of the envelope."""
    num_stages: Annotated[int, Between(1, MAX_NUM_STAGES)] = 1
    """How many stages the peer says that the run has."""
    dht: Addresses = ()
    """Multiaddrs (with /p2p/) at which the peer's own DHT node listens."""
    parts: Annotated[tuple[Annotated[int, Between(0, MAX_PARTS)], ...], Entries(MAX_STAGES_PER_PEER)] = ()
    """In how many parts, as a power of two, the records of each of its stages are stored, as this peer knows it."""

    def contradiction(self) -> str:
        """Which rule about several fields does not hold; "": none."""
        record = self.record
        stages = [status.stage for status in record.stages]
        # Else its claims about one stage would contradict each other.
        if len(set(stages)) != len(stages):
            return "names a stage twice"
        named = [*record.stages, *record.complaints, *record.tainted, *((record.disputed,) if record.disputed else ())]
        if any(about.stage >= self.num_stages for about in named):
            return f"names a stage that the run of {self.num_stages} stages does not have"
        if self.parts and len(self.parts) != len(stages):
            return "tells of parts of others than its stages"
        if self.place not in places_of(record, self.parts):
            return f"is announced under {self.place}, which it does not claim"
        # Others dial it under that id: it must be the one who signed.
        if not all(address.endswith(f"/p2p/{record.peer}") for address in self.dht):
            return "gives a DHT address without its peer id"
        problems = (_address_problem(address, record.peer) for address in (*record.addresses, *self.dht))
        return next(filter(None, problems), "")

    @property
    def key(self) -> str:
        """The DHT key it belongs under."""
        return dht_key(self.record.run, self.place)


def dht_key(run: RunId, place: Place) -> str:
    """The DHT key: `{run}.stage.{k}`, `{run}.stage.{k}/{bits}`, `{run}.trainers`, `{run}.movers`, or
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
# If a stage has more replicas than one key should hold, its records are split into parts by the first bits of a hash of
# the peer's id, its *mark*. The records of the first part are stored under the stage's own key as well, and tell a
# reader there first how many parts there are. A peer reads its own part of each stage near it, so it reads as much in a
# stage of a thousand as in one of thirty.


def part_of(mark: int, stage: int, bits: int) -> Place:
    """The key of the part of a stage that has this mark, of 2**bits parts."""
    return f"{stage}/{mark >> (64 - bits):0{bits}b}" if bits else str(stage)


def places_in(peer: PeerId, stage: int, bits: int) -> tuple[Place, ...]:
    """Where the record of a replica of a stage is announced."""
    mark = mark_of(peer)
    first = (str(stage),) if bits and not mark >> (64 - bits) else ()
    return (part_of(mark, stage, bits), *first)


def parts_seen(found: Sequence[Announcement], stage: int) -> int | None:
    """In how many parts, as a power of two, the records of a stage should be stored. found: the records under its own
    key. None: there are none."""
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

    Raises UsageError if the record is too large or breaks a rule that `unseal` checks: every node would refuse it.
    """
    record = _announceable(announcement.record)
    try:
        if why := replace(announcement, record=record).contradiction():
            raise Wrong("record", why)
        signed = signing.sign(replace(announcement, record=record), record.peer, sign, not_after=announcement.expiry_ms)
    except Wrong as wrong:
        raise UsageError(f"cannot announce this peer: {wrong}") from wrong
    if len(signed.payload) <= MAX_PAYLOAD_BYTES:
        return signing.to_bytes(signed)
    # That the peer can be found matters more than its reports about others.
    found = replace(record, complaints=(), tainted=(), disputed=None)
    if found == record:
        raise UsageError(
            f"cannot announce this peer: its record has {len(signed.payload)} bytes, at most {MAX_PAYLOAD_BYTES}"
        )
    return seal(replace(announcement, record=found), sign)


def unseal(data: bytes, *, now: float, grace_s: float = 0.0) -> Announcement:
    """Decode and verify. Total: any bytes give an Announcement or BadMessage.

    Refuses what expired more than `grace_s` ago and what expires more than `MAX_AHEAD_S` ahead.
    """
    return verified(signing.from_bytes(data, Announcement), now=now, grace_s=grace_s)


def verified(signed: SignedMessage[Announcement], *, now: float, grace_s: float = 0.0) -> Announcement:
    """What is in the envelope, if it is signed by its peer and its end is near. Raises BadMessage."""
    announcement: Announcement = replace(signed.value, expiry_ms=signed.not_after)
    left_s = round(signed.end_s - now, 3)
    # Before the signature, which costs as much again.
    if not -grace_s < left_s <= MAX_AHEAD_S:
        raise BadMessage(RejectCode.CLOCK, "record has expired or ends too far ahead", seconds_left=left_s)
    if signed.key != announcement.record.peer or not signed.is_genuine(verify):
        peer = announcement.record.peer
        raise BadMessage(RejectCode.UNKNOWN_IDENTITY, "record is not signed by its peer", peer=peer)
    return announcement


def _address_problem(text: str, peer: PeerId) -> str:
    """Why that is no multiaddr of a TCP port or a circuit that leads to `peer`; "" if it is."""
    parts = text.split("/")
    if len(parts) > 2 and parts[1] in ("dns4", "dns6") and not all(map(_LABEL.fullmatch, parts[2].split("."))):
        return f"{text}: not a host name"
    try:
        address = Address.parse(text)
    except UsageError:
        return f"{text}: neither a TCP port's address nor a circuit's"
    # A record must not direct callers to another peer under this name.
    return "" if address.peer in (None, peer) else f"{text}: the address names another peer"


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
    """At most so many characters of it: whole words, and dots for the omitted rest."""
    return text if len(text) <= most else f"{text[: most - 3].rsplit(' ', 1)[0]}..."


# ---------------------------------------------------------------- what is known of a run


K = TypeVar("K")
V = TypeVar("V")


def gives_way(standing: Mapping[K, V], admits: Callable[[V], bool]) -> K | None:
    """Which entry leaves a full table for an admitted peer: the newest that is not admitted, if any. standing: oldest
    first."""
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
        """The unexpired announcements under that name."""
        return tuple(each for each in self.fresh(now=now) if place in places_of(each.record, each.parts))

    def fresh(self, *, now: float) -> tuple[Announcement, ...]:
        """What has not expired, sorted by peer; forgets the rest."""
        self._newest = {peer: found for peer, found in self._newest.items() if found.expiry_ms > now * 1000}
        return tuple(found for _, found in sorted(self._newest.items()))


def agreed_num_stages(announcements: Iterable[Announcement]) -> int:
    """How many stages most peers say the run has (the smaller number on a tie); 0 if none said."""
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


def waiting_for_stages(stages: tuple[int, ...], *, stranger_to: str = "") -> dict[str, object]:
    """Fields of the event `waiting`. stranger_to: my run, of which no peer answers at --bootstrap."""
    return {
        "reason": f"no peer serves stage {', '.join(map(str, stages))} yet",
        "advice": f"start the peers of these stages; if they run already, their manifest differs, because none behind "
        f"--bootstrap is in run {stranger_to[:12]}: compare it with the link they print, swarm:RUN@..., or join by it"
        if stranger_to
        else f"unless one is just starting, start a peer with --stage {','.join(map(str, stages))} and "
        "--bootstrap with an address of this one, and with the --dir that served it before, if one did",
    }
