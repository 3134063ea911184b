"""Discovery: `Directory` on hivemind's Kademlia DHT, and how a peer rejoins the swarm after all known peers have left.

Finds peers; never proves that one is alive (open connections do). It decides when to renew, to look around and to
re-join; how a node works and what it believes is `dht_node`, what a record is `records`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from swarmnet.clock import CLOCK, LOOK_S, MOST_APART_S, WallClock, correction_s, loop_time
from swarmnet.directory import MAX_ADDRESSES, SMALL_RUN, ReadPace, Record
from swarmnet.errors import SwarmError, UsageError
from swarmnet.ids import PeerId, RunId, mark_of
from swarmnet.manifest.extension import Extension, Notices
from swarmnet.net.address import Address, bootstrap_address, peer_in
from swarmnet.net.admission import Admissions, Bans, admits
from swarmnet.net.admission_files import OwnerStatements
from swarmnet.net.dht_daemon import Listen
from swarmnet.net.dht_node import DhtNode, Entry, NoPeerAnswered, OwnersWord, RecordGate, word_key
from swarmnet.net.identity import Identity, write_whole
from swarmnet.net.limits import LOOK_UPS, REJOIN_AGAIN
from swarmnet.net.records import (
    FIRST_DIGITS,
    MANY,
    MAX_AHEAD_S,
    MOVERS,
    TRAINERS,
    TTL_S,
    WHOLE_RUN,
    Announcement,
    Place,
    RecordTable,
    agreed_num_stages,
    bans_key,
    dht_key,
    notice_key,
    part_of,
    parts_said,
    parts_seen,
    places_of,
    seal,
)
from swarmnet.net.tls import CLOCK_SLACK_S
from swarmnet.pacing import Budgets
from swarmnet.statement import SignedMessage
from swarmnet.telemetry.log import get
from swarmnet.wire.signed import to_bytes

MAX_PEERS = 64
MAX_ADDRESSES_PER_PEER = 4
_MAX_FILE_BYTES = 256 * 1024


class KnownPeers:
    """Multiaddrs by peer, most recently met last. `path` None: in memory only."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._addresses: dict[PeerId, tuple[str, ...]] = {}
        self._saved: dict[PeerId, tuple[str, ...]] = {}
        for entry in reversed(_read(path)):
            self.met([entry])
        self._saved = dict(self._addresses)

    def met(self, addresses: Iterable[str]) -> None:
        """A peer is (or says it is) at `addresses`, all of one peer; unusable ones are skipped."""
        peers = [(address, peer) for address in addresses if (peer := peer_in(address)) is not None]
        for peer in {peer for _, peer in peers}:
            now_at = [address for address, owner in peers if owner == peer]
            before = [address for address in self._addresses.pop(peer, ()) if address not in now_at]
            # Where it is now comes first, and where it was stays as a second try.
            self._addresses[peer] = tuple((now_at + before)[:MAX_ADDRESSES_PER_PEER])
        while len(self._addresses) > MAX_PEERS:
            del self._addresses[next(iter(self._addresses))]

    def addresses(self) -> tuple[str, ...]:
        """All of them, most recently met peer first."""
        return tuple(address for peer in reversed(self._addresses) for address in self._addresses[peer])

    def save(self) -> None:
        """Replace the file if anything changed. Raises OSError."""
        if self._path is None or self._addresses == self._saved:
            return
        write_whole(self._path, json.dumps({"known_peers": self.addresses()}, indent=1) + "\n", mode=0o666)
        self._saved = dict(self._addresses)


def _read(path: Path | None) -> list[str]:
    """The file's addresses; a missing, foreign or broken file has none."""
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return []
    entries = content.get("known_peers") if isinstance(content, dict) else None
    return [entry for entry in entries if isinstance(entry, str)] if isinstance(entries, list) else []


# ---------------------------------------------------------------- the directory


PUBLISH_DEADLINE_S = 4.0
UNKNOWN_NUM_STAGES_READ = 8  # how far to look while the number of stages is unknown
WORD_TTL_S = 90.0  # of what a run's owner says, which those who know it renew
_LONGEST_TTL_S = 110.0  # of a record in a large run, which is read seldom
_PARTS_EVERY = 4  # near reads from one look at how many parts a stage has to the next
MAX_LOOKED_UP = 4096
REJOIN_AT_ONCE = 16
_SET_CLOCK = "this peer goes on by the others' time; set the clock that is wrong: timedatectl set-ntp true"
KNOWN_PEERS_FILE = "known_peers.json"

log = get(__name__)


class DhtDirectory:
    """A peer's membership in the DHT. `run` must be running for renewal, refresh and recovery to happen.

    A context manager: entering it joins the DHT, leaving it leaves.

    Args:
        run: None for a plain node: it stores records of any run and has none of its own.
        num_stages: 0: not known yet, learned from the records.
        listen: where its node listens.
        only_asks: until `serve` it answers no other node, and no other node learns of it.
        bootstrap: addresses to join through. Without any (or if they name only ourselves), and with no remembered peer
            alive, this is the first node.
        state_dir: where peers are remembered; None: nowhere.
        admissions: who takes part in the run; others' records are neither read nor stored here. None: unknown.
        manifest: its file; the owner's bans and notices may be in the same directory.
        between_reads_s: the least time from one read to the next (`ReadPace`); in between it answers from memory.
    """

    def __init__(
        self,
        identity: Identity,
        run: RunId | None,
        *,
        num_stages: int = 0,
        listen: Listen = Listen(),  # noqa: B008
        bootstrap: Sequence[str] = (),
        state_dir: Path | None = None,
        ttl_s: float = TTL_S,
        admissions: Admissions | None = None,
        notices: Notices | None = None,
        manifest: Path | None = None,
        between_reads_s: float = 0.0,
        only_asks: bool = False,
        clock: WallClock = CLOCK,
    ) -> None:
        assert 0 < ttl_s <= MAX_AHEAD_S
        self.peer = identity.peer
        self._identity, self._run, self._num_stages = identity, run, num_stages
        self._listen, self._ttl_s, self._state_dir = listen, ttl_s, state_dir
        self._only_asks = only_asks
        self._bootstrap = tuple(
            address for address in map(bootstrap_address, bootstrap) if peer_in(address) != identity.peer
        )
        self._known = KnownPeers(state_dir / KNOWN_PEERS_FILE if state_dir else None)
        self._table = RecordTable(run, admits=self._welcome)
        self._clock = clock
        self._gate = RecordGate(self._take, clock=clock.time, on_word=self._take_word, welcome=self._welcome)
        self._admissions, self._notices = admissions, notices
        self._follow_owner(manifest)
        self._word_until: dict[OwnersWord, float] = {}  # Unix seconds: how long the DHT keeps it
        self._mine: Record | None = None
        self.elsewhere: Announcement | None = None
        """The newest that another process has signed under my identity: perhaps one of mine that ended."""
        self.believes: Callable[[Record], bool] = lambda record: True
        """False for a record of a peer if messages of another process of it arrive."""
        self._expiry_ms = 0
        self._publish_again_at = self._whole_run_again_at = 0.0
        self._pace = ReadPace(between_reads_s)
        self._near: tuple[int, ...] | None = None  # the stages that were asked for last
        self._parts: dict[int, int] = {}  # by stage, as a power of two: in how many its records should be stored
        self._stored_parts: dict[int, frozenset[int]] = {}  # and in how many they are, while they move to other ones
        self._reads = 0
        self._look_ups = Budgets[PeerId](LOOK_UPS, MAX_LOOKED_UP)
        self.serves: Callable[[PeerId], Collection[int]] = lambda peer: ()
        self._sought: set[RunId] | None = None  # while `runs` waits
        self._looks_around = False  # does `run`?
        self.by_memory = False
        """Did no address in `bootstrap` answer, so that it joined through peers it remembered, of this run or
        another?"""
        self.met = frozenset[PeerId]()
        """Who answered at the addresses through which it joined, and proved to be the peer that each names."""
        self._replaces_node = False
        self._alone = True
        """Has it had no neighbour yet?"""
        self._rng = random.Random()
        self._node: DhtNode

    async def __aenter__(self) -> DhtDirectory:
        """Raises UsageError if the address cannot be listened on, `bootstrap` was given and no peer answers, or this
        machine's clock is off."""
        self._node = await self._open(self._listen)
        try:
            await self._join_first()
            await self._look_for_words()
        except BaseException:
            await self._node.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave. What was published expires by itself."""
        self._remember()
        await self._node.close()

    @property
    def maddrs(self) -> tuple[str, ...]:
        """Multiaddrs with which others can bootstrap from this node."""
        if self._listen.client or self._only_asks:
            return ()
        if not self._listen.announce:
            return self._node.maddrs
        return tuple(a if peer_in(a) else f"{a}/p2p/{self.peer}" for a in self._listen.announce)

    @property
    def port(self) -> int:
        """The port listened on; 0 for a client."""
        return next((Address.parse(address).port for address in self._node.maddrs), 0)

    @property
    def num_stages(self) -> int:
        """As told, or as most of the known records say; 0 while unknown."""
        return self._num_stages or agreed_num_stages(self._table.fresh(now=self._clock.time()))

    def found(self, run: RunId) -> None:
        """This is the run: until now only the first digits of its id were known."""
        assert self._run in (None, run)
        if self._run is None:
            self._run, self._table = run, RecordTable(run, admits=self._welcome)
            self.elsewhere = None  # it may be in another run
            self._node.own(self._own_keys())

    def learn(self, num_stages: int, admissions: Admissions) -> None:
        """The manifest has come: from now on it says how many stages there are, and who takes part."""
        self._num_stages, self._admissions = num_stages, admissions
        self._follow_owner(None)
        self._node.own(self._own_keys())

    async def take_part(self, notices: Notices, manifest: Path | None) -> None:
        """Hear from now on what the run's owner says, and keep it. manifest: see the constructor. After `learn`."""
        self._notices = notices
        self._follow_owner(manifest)
        await self._look_for_words()

    async def serve(self, between_reads_s: float) -> None:
        """Answer other nodes from now on, and have them know this one; read no more often than that."""
        if not self._only_asks:
            return
        self._only_asks, self._pace = False, ReadPace(between_reads_s)
        # A peer that was found to be unreachable stays a client.
        if self._listen.client:
            return
        # Its daemon may have died while nothing ran here.
        if self._node.broken or not await self._node.serve():
            await self._reopen()
        if not self._node.neighbours():
            await self._node.join(self._strangers()[:REJOIN_AT_ONCE])

    async def rest(self) -> None:
        """Only ask again, until `serve`: while a peer loads another stage it answers no other node."""
        self._only_asks = True
        self._mine = None  # it says the old stage
        if not self._listen.client:
            await self._node.rest()

    def _follow_owner(self, manifest: Path | None) -> None:
        books = {Bans: self._admissions, Extension: self._notices}
        self._statements: dict[type, OwnerStatements] = {
            kind: OwnerStatements(book, self._state_dir, manifest) for kind, book in books.items() if book is not None
        }

    @property
    def neighbours(self) -> frozenset[PeerId]:
        """Peers in the routing table."""
        return self._node.neighbours()

    async def publish(self, record: Record) -> None:
        """Announce `record` everywhere it belongs, and renew it from now on. Network trouble is retried by `run`.

        Raises UsageError if the record breaks the rules of `net.records`.
        """
        assert record.peer == self.peer and record.run == self._run
        self._mine = record
        await self._announce(record)

    async def records(self, near: Collection[int] | None = None, *, at_once: bool = False) -> tuple[Record, ...]:
        """Fresh, verified records of this run, newest per peer, my own among them; see `Directory`."""
        now, known = loop_time(), len(self._table)
        self._near = tuple(near) if near is not None else None
        # Of a small run the whole costs no more.
        whole = near is None or known <= SMALL_RUN
        seen = (
            known if whole else len([each for each in self._table.fresh(now=self._clock.time()) if _serves(each, near)])
        )
        if self._run is None or not self._pace.may_read(whole=whole, at_once=at_once, records=seen, now=now):
            return self.known()
        if not whole and near is not None:
            await self._read(near)
        elif await self._read(None, self._num_stages or UNKNOWN_NUM_STAGES_READ):
            learned = self.num_stages
            # The number of stages was unknown, and these records say that there are more than were read.
            if not self._num_stages and learned > UNKNOWN_NUM_STAGES_READ:
                await self._read(None, learned)
        wall = self._clock.time()
        found = self._table.fresh(now=wall)
        read = len(found) if whole else sum(_serves(each, near) for each in found)
        self._pace.has_read(whole=whole, records=read, jitter=self._rng.uniform(0.8, 1.2), now=now)
        return self.known()

    def complete(self) -> bool:
        """Was the whole run read lately?"""
        return self._pace.complete(loop_time())

    async def find(self, peer: PeerId, stages: Collection[int]) -> None:
        """Read the record of one peer of one of these stages."""
        if self._run is None:
            return
        await self._ask(
            [
                part_of(mark_of(peer), stage, bits)
                for stage in stages
                for bits in sorted(self._stored_parts.get(stage, {0}))
            ]
        )

    async def look_up(self, peer: PeerId) -> None:
        """Read the record of a peer near me, or that counts elsewhere, which is called by name; at most every few
        seconds."""
        if self._near is not None and not self._look_ups.of(peer).ask(loop_time()):
            await self.find(peer, {*self._near, *self.serves(peer)})

    async def look_for_myself(self) -> Announcement | None:
        """What another process has announced under my identity, in any stage or as a trainer."""
        await self._read(range(self._num_stages))
        self._reads = 0
        return self.elsewhere

    async def _read(self, near: Collection[int] | None, num_stages: int = 0) -> bool:
        """Read my part of each of these stages, and the next part of those that I serve; None: all parts of all."""
        stages = range(num_stages) if near is None else near
        others = [TRAINERS, MOVERS] if near is None else [TRAINERS] if 0 in near else []
        # The records of a stage's first part tell the number of its parts.
        first = near is None or self._reads % _PARTS_EVERY == 0
        self._reads += 1
        done = True
        if first:
            done = await self._ask([*others, *map(str, stages)])
            for stage in stages:
                found = self._table.at(str(stage), now=self._clock.time())
                seen = parts_seen(found, stage)
                bits = self._parts[stage] = self._parts.get(stage, 0) if seen is None else seen
                # Peers move one by one, to the next size up or down; no record may lead further.
                said = {parts_said(each, stage) for each in found} & {bits - 1, bits + 1}
                self._stored_parts[stage] = frozenset({bits, *said})
        mark, mine = mark_of(self.peer), {status.stage for status in self._mine.stages} if self._mine else set[int]()
        places: list[Place] = [] if first else list(others)
        sizes = [(stage, bits) for stage in stages for bits in sorted(self._stored_parts.get(stage, {0}))]
        for stage, bits in sizes:
            own = mark >> (64 - bits) if bits else 0
            numbers = range(1 << bits) if near is None else (own, own + 1) if stage in mine else (own,)
            places += [part_of((number % (1 << bits)) << (64 - bits), stage, bits) for number in numbers]
        asked = set(map(str, stages)) if first else set()
        places = [place for place in dict.fromkeys(places) if place not in asked]
        return done and (not places or await self._ask(places))

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        """Where a peer says that it listens, if its record is known and fresh and it is admitted."""
        found = self._table.get(peer, now=self._clock.time())
        return found.record.addresses if found and self._admits(found.record) else ()

    def known(self) -> tuple[Record, ...]:
        """All that is known, from memory alone."""
        found = (each.record for each in self._table.fresh(now=self._clock.time()))
        return tuple(record for record in found if record.peer == self.peer or self._admits(record))

    async def runs(self, first_digits: str) -> tuple[RunId, ...]:
        """Announced runs with an id that begins with `first_digits` (`FIRST_DIGITS` or more), sorted. Network errors do
        not raise."""
        assert len(first_digits) >= FIRST_DIGITS
        self._sought = set()
        try:
            await self._find_again()
            await self._node.lookup((dht_key(RunId(first_digits), WHOLE_RUN),))
            return tuple(sorted(run for run in self._sought if run.startswith(first_digits)))
        finally:
            self._sought = None

    def dht_addresses(self, peer: PeerId) -> tuple[str, ...]:
        """Where a peer's DHT node is said to listen."""
        found = self._table.get(peer, now=self._clock.time())
        return found.dht if found and self._admits(found.record) else ()

    def hide(self) -> None:
        """This peer is unreachable: its node becomes a client when it next looks around."""
        self._listen, self._replaces_node = replace(self._listen, client=True, announce=()), True

    async def run(self) -> None:
        """Renew, refresh, remember, re-join; until cancelled."""
        self._looks_around = True
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew())
            tasks.create_task(self._look_around())
            tasks.create_task(self._keep_time())

    # ---------------------------------------------------------------- publishing

    async def _announce(self, record: Record) -> None:
        wall, now = self._clock.time(), loop_time()
        # Where others look seldom a record has to last.
        ttl_s = max(self._ttl_s, min(3 * self._pace.near_s, _LONGEST_TTL_S))
        expiry_ms = int((wall + ttl_s) * 1000)
        set_back = self._expiry_ms > expiry_ms + _LONGEST_TTL_S * 1000  # this machine's clock was: start over
        self._expiry_ms = expiry_ms if set_back else max(expiry_ms, self._expiry_ms + 1)
        self._publish_again_at = now + self._rng.uniform(0.8, 1.2) * ttl_s / 3
        dht = self.maddrs[:MAX_ADDRESSES]
        # Those who look for runs need not know how it goes: one renewal in several.
        parts = tuple(self._parts.get(status.stage, 0) for status in record.stages)
        whole_run = now >= self._whole_run_again_at and self._stands_for_run()
        places = [place for place in places_of(record, parts) if place != WHOLE_RUN or whole_run]
        found = [Announcement(record, place, self._expiry_ms, self._num_stages, dht, parts) for place in places]
        if not found:
            return
        if WHOLE_RUN in places:  # says who is there, not how it goes: renewed less often
            self._whole_run_again_at = self._publish_again_at
        entries = [Entry(a.key, self.peer, seal(a, self._identity.sign), self._expiry_ms / 1000) for a in found]
        self._table.offer(found[0], now=wall)
        kept = await self._node.store(entries, deadline=now + PUBLISH_DEADLINE_S)
        # No node stores some of them: the peer cannot be found there, so try again soon.
        if kept < len(entries):
            self._publish_again_at = self._whole_run_again_at = now + self._rng.uniform(0.8, 1.2) * self._ttl_s / 10
            log.debug("publish_incomplete", places=len(entries), kept=kept)

    def _stands_for_run(self) -> bool:
        """Is this peer one of those with the lowest marks? Only they announce a large run as a whole."""
        found = self._table.fresh(now=self._clock.time())
        near = self._near if self._near is not None and len(found) > SMALL_RUN else None
        share = len(near) / max(self._num_stages, 1) if near else 1.0
        most = sum(1 << self._parts.get(stage, 0) for stage in near or ()) / max(len(near or ()), 1)
        many = max(len(found) / share, most * self._num_stages * MANY / 2)
        return mark_of(self.peer) <= (1 << 64) * min(MANY / max(many, 1.0), 1.0)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(max(self._publish_again_at - loop_time(), self._ttl_s / 30))
            if self._mine is not None and loop_time() >= self._publish_again_at:
                await self._announce(self._mine)

    # ---------------------------------------------------------------- reading

    def _take(self, found: Announcement) -> None:
        # Our own, come back. An older one must not replace what we say now.
        if found.record.peer == self.peer:
            other = self._mine is None or found.record.incarnation != self._mine.incarnation
            newer = self.elsewhere is None or found.expiry_ms > self.elsewhere.expiry_ms
            if other and newer and self._run in (None, found.record.run):
                self.elsewhere = found
            return
        if self._sought is not None and found.place == WHOLE_RUN:
            self._sought.add(found.record.run)
        # Else a crowd of them would fill the table.
        if not self._welcome(found) or not self.believes(found.record):
            return
        self._table.offer(found, now=self._clock.time())
        if found.record.run == self._run and found.dht:
            self._known.met(found.dht)

    def _admits(self, record: Record) -> bool:
        return self._admissions is None or admits(self._admissions, record, now=self._clock.time())

    def _welcome(self, found: Announcement | OwnersWord) -> bool:
        """Does the gate accept it? This peer cannot tell who is admitted to another run, and accepts all of its
        records."""
        if isinstance(found, SignedMessage):
            statements = self._statements.get(type(found.value))
            # An older one, renewed, would replace a newer one.
            return found.value.run != self._run or statements is None or found == statements.newest
        if found.record.run != self._run:
            return True
        # Of a run with so many stages there is nothing to know here.
        return self._num_stages in (0, found.num_stages) and self._admits(found.record)

    async def _find_again(self) -> None:
        """Dial the bootstrap peers again if `run` does not: a node that answered too late is no neighbour any more."""
        if not self._looks_around and not self._node.neighbours():
            await self._node.join(self._strangers()[:REJOIN_AT_ONCE])

    async def _ask(self, places: Sequence[Place]) -> bool:
        assert self._run is not None
        await self._find_again()
        wall = self._clock.time()
        known = {
            dht_key(self._run, place): {
                each.record.peer: each.expiry_ms
                for each in self._table.at(place, now=wall)
                if each.record.peer != self.peer
            }
            for place in places
        }
        self._node.own(known)
        return await self._node.read(known)

    # ---------------------------------------------------------------- what the owner says

    async def publish_word(self, word: OwnersWord) -> bool:
        """Publish a statement of a run's owner. Returns whether any node stores it."""
        expiry, deadline = self._clock.time() + WORD_TTL_S, loop_time() + PUBLISH_DEADLINE_S
        entry = Entry(word_key(word), word.key, to_bytes(word), expiry)
        kept = await self._node.store([entry], deadline=deadline)
        self._word_until[word] = expiry if kept else 0.0
        return kept > 0

    def _take_word(self, word: OwnersWord, expiry: float) -> None:
        # What owners of other runs say is only passed on.
        if word.value.run != self._run or (statements := self._statements.get(type(word.value))) is None:
            return
        with contextlib.suppress(ValueError):
            statements.learn(word)
        self._keep(statements)
        if word == statements.newest:
            self._word_until[word] = max(self._word_until.get(word, 0.0), expiry)

    async def _look_for_words(self) -> None:
        """Hear of new ones, on disk and in the DHT, and see to it that the newest stay in the DHT."""
        signed = [statements for statements in self._statements.values() if statements.owner is not None]
        for statements in signed:
            for reason in statements.read():
                log.warning("owner_statement_refused", reason=reason)
            self._keep(statements)
        if signed:
            await self._node.lookup([statements.key for statements in signed])
        for statements in signed:
            self._keep(statements)  # other peers tell them, too
            word = statements.newest
            # They expire soon: the peers that know them renew them in turn.
            soon = word is not None and self._word_until.get(word, 0.0) < self._clock.time() + WORD_TTL_S / 2
            if word is not None and soon and not self._listen.client:
                await self.publish_word(word)

    def _keep(self, statements: OwnerStatements) -> None:
        try:
            if statements.keep() and (word := statements.newest) is not None:
                log.info("owner_statement", kind=type(word.value).__name__.lower(), number=word.value.number)
        except OSError as error:
            log.warning("owner_statement_not_kept", error=str(error))

    # ---------------------------------------------------------------- staying in the swarm

    async def _open(self, listen: Listen) -> DhtNode:
        own_keys = self._own_keys()
        return await DhtNode.open(
            self._identity,
            self._gate,
            listen,
            own_keys=own_keys,
            admits=self._gate.admits,
            clock=self._clock,
            only_asks=self._only_asks,
        )

    def _own_keys(self) -> tuple[str, ...]:
        run = self._run
        return (*_keys(run, self._num_stages), dht_key(run, WHOLE_RUN), bans_key(run), notice_key(run)) if run else ()

    async def _join_first(self) -> None:
        met = await self._node.join(self._bootstrap)
        # Those who gave the addresses may be gone while the swarm lives on.
        if not met:
            met = await self._node.join(self._strangers()[:REJOIN_AT_ONCE])
            self.by_memory = bool(self._bootstrap and met)
        # Told to join and unable to: a swarm of its own is not what was asked for.
        if self._bootstrap and not met:
            raise NoPeerAnswered(
                f"no bootstrap peer answered; tried {', '.join(self._bootstrap)}: check that one of them is running "
                "and reachable from here, or leave bootstrap empty to start a new swarm"
            )
        by_s = correction_s([each.clock_ahead_s for each in met], joining=True)
        # An address that is only remembered may be a stranger's: it must not keep this peer from starting.
        if abs(by_s) > CLOCK_SLACK_S and (self.by_memory or not self._bootstrap):
            log.warning("clock_refused", by_s=round(by_s, 1), **self._system_clock())
            by_s = 0.0
        if abs(by_s) > CLOCK_SLACK_S:
            raise UsageError(
                f"this machine's clock is {abs(by_s):.0f} s {'behind' if by_s > 0 else 'ahead of'} the swarm's: "
                "set it (for example `timedatectl set-ntp true`) and start again"
            )
        self.met = frozenset(each.peer for each in met)
        self._alone = not met
        self._correct(by_s)

    def _correct(self, by_s: float) -> None:
        """Accept the others' time: records by this clock would expire early, or be refused as too far ahead."""
        if by_s:
            self._clock.correct(by_s)
            self._publish_again_at = 0.0
            log.warning("clock_corrected", by_s=round(by_s, 1), **self._system_clock())

    def _system_clock(self) -> dict[str, Any]:
        ahead_s = -self._clock.ahead_s()
        then = _SET_CLOCK if abs(ahead_s) > MOST_APART_S else "nothing to do: the two agree"
        return {"system_clock_ahead_s": round(ahead_s), "then": then}

    async def _keep_time(self) -> None:
        """Tell of every change of this machine's clock, and correct ours by the neighbours'."""
        ask_at = loop_time() + self._ttl_s / 3
        while True:
            await asyncio.sleep(LOOK_S)
            changes = self._clock.look()
            if changes.asleep:
                log.warning("machine_slept", seconds=round(changes.asleep, 1))
            if changes.set_by:
                log.warning("clock_changed", by_s=round(changes.set_by, 1), **self._system_clock())
            if changes.set_by or loop_time() >= ask_at:
                self._alone = self._alone and not self._node.neighbours()
                if self._alone:
                    # No other peer's time is known yet, and a machine may start before its clock has been set.
                    self._correct(correction_s([-self._clock.ahead_s()], joining=True))
                else:
                    await self._follow_members()
                ask_at = loop_time() + self._ttl_s / 3

    async def _follow_members(self) -> None:
        """Correct this peer's time by that of most members of its run."""
        # Identities in the DHT cost nothing. A stranger that is no member has no vote.
        members = None if self._run is None else {record.peer for record in self.known()}
        by_s = correction_s(await self._node.clocks_ahead_s(members), joining=False)
        # TLS goes by the system's clock: further away from it no connection is made.
        if abs(self._clock.ahead_s() + by_s) <= CLOCK_SLACK_S:
            self._correct(by_s)

    def _strangers(self) -> list[str]:
        """Known addresses, bootstrap first, of peers that are no neighbours now."""
        near = self._node.neighbours() | {self.peer}
        addresses = dict.fromkeys((*self._bootstrap, *self._known.addresses()))
        return [address for address in addresses if peer_in(address) not in near]

    async def _look_around(self) -> None:
        """Refresh; while alone, try every remembered peer, with back-off; else contact one stranger (heals
        partitions)."""
        rejoins = REJOIN_AGAIN(rng=self._rng)
        while True:
            period = max(self._ttl_s / 3, self._pace.near_s)
            if self._node.neighbours():
                rejoins.reset()
                await asyncio.sleep(self._rng.uniform(0.8, 1.2) * period)
            else:
                await asyncio.sleep(rejoins.failed(loop_time(), longest_s=period))
            # Before we look around: a dead daemon looks like a swarm without an answering peer.
            if self._node.broken:
                log.warning("dht_daemon_lost", action="starting another")
            if self._node.broken or self._replaces_node:
                await self._reopen()
            strangers = self._strangers()
            self._rng.shuffle(strangers)
            await self._node.join(strangers[: 1 if self._node.neighbours() else REJOIN_AT_ONCE])
            if self._run is None:
                await self._node.lookup_near_us()
            else:
                await self.records(self._near)
                await self._look_for_words()
            self._known.met(await self._node.neighbour_addresses())
            self._remember()

    async def _reopen(self) -> None:
        """Replace the node, at the same port if it is still to be had."""
        first = self.port
        await self._node.close()
        try:
            self._node = await self._open(replace(self._listen, first=first))
        except SwarmError as error:
            log.warning("dht_daemon_failed", error=str(error))
            return
        self._replaces_node = False
        await self._node.join(self._strangers()[:REJOIN_AT_ONCE])
        # The new node has stored nothing for us.
        if self._mine is not None:
            self._publish_again_at = 0.0

    def _remember(self) -> None:
        try:
            self._known.save()
        except OSError as error:
            log.warning("known_peers_not_saved", error=str(error))


def _keys(run: RunId, num_stages: int) -> tuple[str, ...]:
    return tuple(dht_key(run, place) for place in (*map(str, range(num_stages)), TRAINERS, MOVERS))


def _serves(found: Announcement, near: Collection[int] | None) -> bool:
    return near is None or any(status.stage in near for status in found.record.stages)
