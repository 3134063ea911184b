"""One Kademlia node: hivemind's `DHTNode` over our own p2pd, in our event loop (arXiv: Maymounkov, Mazieres 2002).

What is private, fragile or exception-happy in hivemind is met here and nowhere else. The node takes in what passes
`RecordGate`, and keeps it in `BoundedStorage`. Lookups and stores are driven from here instead of by
`DHTNode.get/store`: those forget what was already found when a deadline passes, and fail as a whole on one crafted
answer.

`import hivemind` imports its averaging, optimizers and experts, and scipy with them: a seventh of the CPU time of a
starting peer and 40 MB of its memory, none of which it uses. So the package is registered here with its body unread.
The body is read when another module asks the package for a name of its own, such as `hivemind.Optimizer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import math
import random
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from swarmnet.bounds import Recent
from swarmnet.clock import CLOCK, WallClock, loop_time, wall_time
from swarmnet.errors import BadMessage, UsageError
from swarmnet.ids import PeerId
from swarmnet.manifest.extension import Extension
from swarmnet.net.address import peer_in
from swarmnet.net.admission import Bans
from swarmnet.net.dht_daemon import Daemon, DaemonFailed, Listen
from swarmnet.net.identity import Identity, verify
from swarmnet.net.limits import DHT_CALLS, DHT_KEYS
from swarmnet.net.records import MAX_AHEAD_S, Announcement, bans_key, gives_way, notice_key, verified
from swarmnet.pacing import Budgets
from swarmnet.statement import SignedMessage
from swarmnet.wire.signed import from_bytes

_SPEC = None if "hivemind" in sys.modules else importlib.util.find_spec("hivemind")
if _SPEC is not None:
    sys.modules["hivemind"] = importlib.util.module_from_spec(_SPEC)

from hivemind.dht.crypto import DHTRecord, RecordValidatorBase  # noqa: E402
from hivemind.dht.node import DHTNode  # noqa: E402
from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.dht.storage import DHTLocalStorage  # noqa: E402
from hivemind.p2p import P2P, PeerID  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, P2PDaemonError, P2PHandlerError  # noqa: E402
from hivemind.proto import dht_pb2  # noqa: E402
from hivemind.utils import MSGPackSerializer  # noqa: E402
from hivemind.utils.logging import use_hivemind_log_handler  # noqa: E402
from hivemind.utils.multiaddr import Multiaddr  # noqa: E402

# Of each of its modules that has a name of its own for the time: they expire entries, and answer pings, by it.
for _module in [module for name, module in sys.modules.items() if name.startswith("hivemind.")]:
    if hasattr(_module, "get_dht_time"):
        setattr(_module, "get_dht_time", wall_time)  # noqa: B010


def _read_body(name: str) -> Any:
    package = sys.modules["hivemind"]
    del package.__getattr__
    assert _SPEC is not None and _SPEC.loader is not None
    _SPEC.loader.exec_module(package)
    return getattr(package, name)


if _SPEC is not None:  # only now: hivemind's modules may look for each other in the package first
    sys.modules["hivemind"].__getattr__ = _read_body  # type: ignore[method-assign]


# ---------------------------------------------------------------- what a node takes in, and what it keeps


GRACE_S = 30.0  # others' clocks: one stale entry must not discard all that came with it
MAX_KEYS = 4096
MAX_ENTRIES_PER_KEY = 1024
ORDINARY_BYTES, MAX_LARGE_BYTES = 1280, 1 << 20  # of an entry; of all larger ones under a key together
MAX_REMEMBERED = 4096
MAX_WORDS = 256


OwnersWord = SignedMessage[Any]
"""`Bans` or an `Extension`: what a run's owner signs for all its peers."""


def word_key(word: OwnersWord) -> str:
    """The DHT key of this statement."""
    return bans_key(word.value.run) if isinstance(word.value, Bans) else notice_key(word.value.run)


_ENDLESS_S = 1e12
"""Unix seconds that no entry comes to; a float beyond may have no milliseconds."""


class RecordGate(RecordValidatorBase):  # type: ignore[misc]
    """Passes `{key: {peer id: sealed record}}` entries if the seal fits key, subkey and expiry; never raises.

    on_word(word, expiry) is called with the signed statements of owners, of any run. welcome(what): may this node
    store it? A run's own nodes refuse what is not admitted to their run; what they read they only ignore, since to
    hivemind an entry that does not pass invalidates all that came with it.
    """

    def __init__(
        self,
        on_record: Callable[[Announcement], None],
        *,
        clock: Callable[[], float] = wall_time,
        on_word: Callable[[OwnersWord, float], None] = lambda word, expiry: None,
        welcome: Callable[[Announcement | OwnersWord], bool] = lambda found: True,
    ) -> None:
        self._on_record, self._clock, self._on_word, self._welcome = on_record, clock, on_word, welcome
        # Renewals are read many times: each is verified once.
        self._verified: dict[bytes, Announcement] = {}
        self._words: Recent[bytes, OwnersWord] = Recent(MAX_WORDS)

    def validate(self, record: DHTRecord) -> bool:
        """Whether `record` may be stored or believed."""
        # A stranger's entry may hold any type.
        if not isinstance(record.value, bytes) or not isinstance(record.expiration_time, int | float):
            return False
        if not 0 <= record.expiration_time < _ENDLESS_S:
            return False
        try:
            found = self._known(record.value) or from_bytes(record.value, Announcement, Bans, Extension)
            if isinstance(found, SignedMessage) and not isinstance(found.value, Announcement):
                return self._validate_word(record, found)
            found = self._fresh(record.value, found)
        except BadMessage:
            return False
        genuine = (
            record.key == DHTID.generate(source=found.key).to_bytes()
            and record.subkey == MSGPackSerializer.dumps(found.record.peer)
            and round(record.expiration_time * 1000) == found.expiry_ms
        )
        if genuine:
            self._on_record(found)
        return genuine

    def admits(self, value: object) -> bool:
        """Whether this node keeps what passed."""
        found = self._known(value) if isinstance(value, bytes) else None
        return found is None or self._welcome(found)

    def _known(self, value: bytes) -> Announcement | OwnersWord | None:
        return self._verified.get(value) or self._words.get(value)

    def _validate_word(self, record: DHTRecord, word: OwnersWord) -> bool:
        now = self._clock()
        genuine = (
            record.key == DHTID.generate(source=word_key(word)).to_bytes()
            and record.subkey == MSGPackSerializer.dumps(word.key)
            and now - GRACE_S < record.expiration_time <= now + MAX_AHEAD_S
            and (record.value in self._words or word.is_genuine(verify))
        )
        if genuine:
            self._words[record.value] = word
            self._on_word(word, record.expiration_time)
        return genuine

    def _fresh(self, data: bytes, found: Announcement | SignedMessage[Announcement]) -> Announcement:
        now = self._clock()
        if isinstance(found, Announcement) and not now - GRACE_S < found.expiry_ms / 1000 <= now + MAX_AHEAD_S:
            found = from_bytes(data, Announcement)
        if isinstance(found, SignedMessage):
            found = verified(found, now=now, grace_s=GRACE_S)
            # Keys are read in turn: without the oldest, the next reading would find none of them.
            if len(self._verified) >= MAX_REMEMBERED:
                self._verified.popitem()
            self._verified[data] = found
            # Expired ones are not read again: a node that runs for weeks should hold only what is valid.
            while self._verified and self._expired(oldest := next(iter(self._verified)), now):
                del self._verified[oldest]
        return found

    def _expired(self, data: bytes, now: float) -> bool:
        return self._verified[data].expiry_ms / 1000 <= now - GRACE_S


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """A node's share of the DHT: full means refused, so a flood cannot push out what is there.

    `favoured` keys (this node's own run) are stored even when strangers' keys fill the storage. admits(value): whether
    it is stored at all; in a full key of ours a new one replaces the newest that would not be stored any more.
    A reader of a key reads all of it: large entries have a bound of their own, so they displace no ordinary ones.
    me: this node's own entries are always stored, so that it can answer for itself.
    """

    def __init__(
        self,
        favoured: Callable[[DHTID], bool],
        *,
        max_keys: int = MAX_KEYS,
        max_entries: int = MAX_ENTRIES_PER_KEY,
        admits: Callable[[object], bool] = lambda value: True,
        me: PeerId | None = None,
    ) -> None:
        super().__init__()
        self._favoured, self._admits, self._me = favoured, admits, me
        self._max_keys, self._max_entries = max_keys, max_entries

    def store_subkey(self, key: DHTID, subkey: object, value: object, expiration_time: float) -> bool:
        """As hivemind's, within the bound. (Nothing without a subkey passes the gate.)"""
        # A run's own nodes keep nothing for whom the run does not admit.
        if not self._admits(value):
            return False
        held = self.get(key)
        # A full node takes no strangers' keys, but always those of its own run.
        if held is None:
            if len(self) >= self._max_keys and not self._favoured(key):
                return False
        else:
            while not self._fits(held.value, subkey, value):
                # A dictionary keeps the order in which entries came, however often they are renewed.
                there = {each: kept.value for each, kept in held.value.data.items()}
                loser = gives_way(there, self._admits) if self._favoured(key) else None
                if loser is None:
                    return False
                del held.value[loser]
        stored: bool = super().store_subkey(key, subkey, value, expiration_time)
        return stored

    def _fits(self, held: Any, subkey: object, value: Any) -> bool:
        # A flood may be quicker than a peer that starts.
        if subkey == self._me:
            return True
        if subkey not in held and len(held) >= self._max_entries:
            return False
        if len(value) <= ORDINARY_BYTES:
            return True
        sizes = [len(kept.value) for each, kept in held.data.items() if each != subkey]
        return sum(size for size in sizes if size > ORDINARY_BYTES) + len(value) <= MAX_LARGE_BYTES


# ---------------------------------------------------------------- the node


RPC_TIMEOUT_S = 1.0  # a silent node costs a lookup this once, then it is left alone for a while
MAX_READ_TIMEOUT_S = 8.0  # where no other node is known: full keys on a busy machine, or by a slow line
DIAL_TIMEOUT_S = 3.0
OPEN_TIMEOUT_S = 30.0  # the daemon is on this machine, but that may be busy
NUM_COPIES = 5
BUCKET_SIZE = 20

HOLDERS_S = 120.0
"""How long the nodes nearest to a key are taken to be so, without another traversal."""

_EMPTY_S = 10.0
"""How often all nodes near a key are asked that seems to hold nothing."""

_KEYS_PER_S, _READS_PER_S = 100, 4
"""How many keys one caller may touch a second, at the least, and how often every key of this node's own run: an honest
one reads a key for each stage at once."""

_CLOCKS = 5
"""Neighbours that are asked for the time, at once."""

_RPC_ERRORS = (P2PHandlerError, P2PDaemonError, ControlFailure, TimeoutError, OSError, asyncio.IncompleteReadError)


class NoPeerAnswered(UsageError):
    """None of the given bootstrap addresses answered."""


@dataclass(frozen=True, slots=True)
class Met:
    """A node that answered when we joined. clock_ahead_s: its clock against ours."""

    peer: PeerId
    address: str
    clock_ahead_s: float


@dataclass(frozen=True, slots=True)
class Entry:
    """What to store: sealed bytes under a key and, if several peers store there, the peer's id. expiry: Unix
    seconds."""

    key: str
    subkey: PeerId
    value: bytes
    expiry: float


class _Reader(DHTNode):  # type: ignore[misc]
    """Hivemind's, which waits twice as long for the only node that it knows, once that was late: a full key may take
    any time. Where others are known no node may be slow: a hostile one would slow down every reading."""

    patience_s = RPC_TIMEOUT_S

    @property
    def limit_s(self) -> float:
        """For how long an answer is waited for."""
        return self.patience_s if len(self.protocol.routing_table.peer_id_to_uid) <= 1 else RPC_TIMEOUT_S

    async def _call_find_with_blacklist(self, peer_id: PeerID, keys: Sequence[DHTID]) -> Any:
        began, limit_s = loop_time(), self.limit_s
        # It is read before the first wait in there.
        self.protocol.wait_timeout = limit_s
        asyncio.get_running_loop().call_soon(setattr, self.protocol, "wait_timeout", RPC_TIMEOUT_S)
        answer = await super()._call_find_with_blacklist(peer_id, keys)
        if answer is None and loop_time() - began >= limit_s:
            self.patience_s = min(2 * limit_s, MAX_READ_TIMEOUT_S)
        return answer


class DhtNode:
    """A DHT node. `maddrs`: where others can reach it (empty for a client)."""

    def __init__(
        self, daemon: Daemon, p2p: P2P, dht: DHTNode, maddrs: tuple[str, ...], own: set[DHTID], clock: WallClock = CLOCK
    ) -> None:
        self.daemon, self.maddrs, self._clock = daemon, maddrs, clock
        self._neighbours_began: dict[PeerID, float] = {}
        """When our machine was booted, by the clock of each neighbour that has answered: our own may be set since."""
        self._p2p, self._dht, self._own = p2p, dht, own
        self._near: Recent[DHTID, tuple[float, dict[DHTID, PeerID]]] = Recent(MAX_KEYS)  # when found, by key
        self._all_asked_at: Recent[DHTID, float] = Recent(MAX_KEYS)
        self._rng = random.Random()

    @classmethod
    async def open(
        cls,
        identity: Identity,
        gate: RecordValidatorBase,
        listen: Listen,
        *,
        own_keys: Iterable[str],
        admits: Callable[[object], bool] = lambda value: True,
        clock: WallClock = CLOCK,
        only_asks: bool = False,
    ) -> DhtNode:
        """Start daemon and node; it knows no peer yet. admits: see BoundedStorage. only_asks: until `serve`.

        Raises UsageError, DaemonFailed.
        """
        _quiet()
        daemon = await Daemon.start(identity, listen)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                p2p = await PacedP2P.replicate(Multiaddr(f"/unix{daemon.control}"))
                p2p._client.control._pending_calls = _PendingCalls()
                dht = await _Reader.create(
                    p2p=p2p,
                    client_mode=listen.client or only_asks,
                    record_validator=gate,
                    bucket_size=BUCKET_SIZE,
                    num_replicas=NUM_COPIES,
                    wait_timeout=RPC_TIMEOUT_S,
                    # No caches: an answer may be stale a moment later, so it is asked for again.
                    cache_locally=False,
                    cache_nearest=0,
                    cache_on_store=False,
                    cache_refresh_before_expiry=0,
                    reuse_get_requests=False,
                )
                maddrs = () if listen.client else tuple(str(address) for address in await p2p.get_visible_maddrs())
        except TimeoutError as error:
            daemon.kill()
            raise DaemonFailed("the libp2p daemon does not answer", within_s=OPEN_TIMEOUT_S) from error
        except BaseException:
            daemon.kill()
            raise
        own: set[DHTID] = set()
        dht.protocol.storage = BoundedStorage(own.__contains__, admits=admits, me=identity.peer)
        dht.protocol.cache = BoundedStorage(own.__contains__, admits=admits)
        p2p.own, p2p.held = own, dht.protocol.storage
        node = cls(daemon, p2p, dht, maddrs, own, clock)
        node.own(own_keys)
        return node

    async def serve(self) -> bool:
        """Answer others from now on, and have the neighbours know this node: until now it only asked.

        False: the daemon does not take that, because it has died or not answered in `rest`; it has to be replaced.
        """
        protocol = self._dht.protocol
        try:
            async with asyncio.timeout(RPC_TIMEOUT_S):
                await protocol.add_p2p_handlers(self._p2p)
        except _RPC_ERRORS:
            return False
        protocol.client_mode = False
        protocol.node_info = dht_pb2.NodeInfo(node_id=self._dht.node_id.to_bytes())

        async def greet(peer: PeerID) -> None:
            with contextlib.suppress(*_RPC_ERRORS, ValueError, AssertionError):
                async with asyncio.timeout(RPC_TIMEOUT_S):
                    await self._ping(peer)

        async with asyncio.TaskGroup() as calls:
            for peer in tuple(protocol.routing_table.peer_id_to_uid):
                calls.create_task(greet(peer))
        await self.lookup_near_us()
        return True

    async def rest(self) -> None:
        """Only ask again: the daemon refuses what others ask at once, so that they do not wait for an answer."""
        protocol = self._dht.protocol
        protocol.client_mode, protocol.node_info = True, dht_pb2.NodeInfo()
        with contextlib.suppress(*_RPC_ERRORS):
            async with asyncio.timeout(RPC_TIMEOUT_S):
                await protocol.remove_p2p_handlers(self._p2p)

    def own(self, keys: Iterable[str]) -> None:
        """These are keys of this node's run, too: it stores all of them, and its callers read them all."""
        self._own.update(DHTID.generate(source=key) for key in keys)

    async def close(self) -> None:
        """Leave: the daemon ends, whatever was under way fails."""
        self._dht.is_alive = False
        self._p2p._terminate()  # not `shutdown`: it asks a daemon that may be dead, and has no deadline
        await self.daemon.stop()

    @property
    def broken(self) -> bool:
        """The daemon died, or hivemind's reader of its answers did."""
        return self.daemon.exited.is_set() or self._p2p._client.control._read_task.done()

    def neighbours(self) -> frozenset[PeerId]:
        """Peers in the routing table."""
        return frozenset(PeerId(peer.to_base58()) for peer in self._dht.protocol.routing_table.peer_id_to_uid)

    async def neighbour_addresses(self) -> tuple[str, ...]:
        """Multiaddrs of neighbours that are connected right now, for finding them again."""
        neighbours = self.neighbours()
        try:
            async with asyncio.timeout(RPC_TIMEOUT_S):
                connected = await self._p2p.list_peers()
        except _RPC_ERRORS:
            return ()
        return tuple(
            f"{address}/p2p/{peer}"
            for info in connected
            if (peer := info.peer_id.to_base58()) in neighbours
            for address in info.addrs
        )

    async def join(self, addresses: Sequence[str]) -> tuple[Met, ...]:
        """Dial `addresses` in parallel; each node that answers becomes a neighbour, and then the nodes near us that it
        knows."""
        met: list[Met] = []
        async with asyncio.TaskGroup() as dials:
            for address in addresses:
                dials.create_task(self._meet(address, met))
        # Alone with a bootstrap node we would know one neighbour; its neighbours are near us, too.
        if met:
            await self.lookup_near_us()
        return tuple(met)

    async def _meet(self, address: str, met: list[Met]) -> None:
        named = peer_in(address)
        # Without a peer id no node could prove that it is the right one.
        if named is None:
            return
        peer = PeerID.from_base58(named)
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await self._p2p._client.connect(peer, [Multiaddr(address).decapsulate(Multiaddr(f"/p2p/{named}"))])
                node_id, ahead_s = await self._ping(peer)
        # A node with an invalid answer is no neighbour.
        except (*_RPC_ERRORS, ValueError, AssertionError):
            return
        self._dht.blacklist.register_success(peer)
        await self._dht.protocol.update_routing_table(node_id, peer, responded=True)
        met.append(Met(named, address, ahead_s))

    async def _ping(self, peer: PeerID) -> tuple[DHTID, float]:
        """The peer's node id, and how far its clock is ahead of ours."""
        protocol, began = self._dht.protocol, self._clock.time()
        request = dht_pb2.PingRequest(peer=protocol.node_info, validate=not protocol.client_mode)
        answer = await protocol.get_stub(peer).rpc_ping(request, timeout=None)
        # A node that answers without a time, or with none that is one, agrees with us.
        ahead_s = answer.dht_time - (began + self._clock.time()) / 2
        return DHTID.from_bytes(answer.peer.node_id), ahead_s if answer.dht_time and math.isfinite(ahead_s) else 0.0

    async def clocks_ahead_s(self, members: Container[PeerId] | None) -> tuple[float, ...]:
        """How far the neighbours' clocks are ahead of ours, as each answered last. Asks a few of them again.

        members: the neighbours to ask; None: all of them.
        """
        table = frozenset(self._dht.protocol.routing_table.peer_id_to_uid)
        if members is not None:
            table = frozenset(peer for peer in table if PeerId(peer.to_base58()) in members)
        told = self._neighbours_began = {peer: at for peer, at in self._neighbours_began.items() if peer in table}

        async def ask(peer: PeerID) -> None:
            with contextlib.suppress(*_RPC_ERRORS, ValueError, AssertionError):
                async with asyncio.timeout(RPC_TIMEOUT_S):
                    told[peer] = self._clock.began + (await self._ping(peer))[1]

        async with asyncio.TaskGroup() as calls:
            for peer in sorted(table, key=lambda peer: (peer in told, self._rng.random()))[:_CLOCKS]:
                calls.create_task(ask(peer))
        return tuple(at - self._clock.began for at in told.values())

    async def lookup_near_us(self) -> None:
        """Fill the routing table around our own id."""
        await self._nearest([self._dht.node_id], deadline=self._read_deadline())

    def _read_deadline(self) -> float:
        limit_s: float = self._dht.limit_s
        return loop_time() + 2 * limit_s

    async def lookup(self, keys: Sequence[str], *, deadline: float | None = None) -> bool:
        """Ask the nodes nearest to `keys`; the gate gets what they hold. False if the deadline cut it short."""
        ids = [DHTID.generate(source=key) for key in keys]
        for key_id in ids:
            self._all_asked_at[key_id] = loop_time()
        return await self._nearest(ids, deadline=deadline or self._read_deadline()) is not None

    async def read(self, known: Mapping[str, Mapping[PeerId, int]]) -> bool:
        """Ask one node about each key, and all of those nearest to it if that one lacks what is known here or if no
        node was asked yet. The gate gets what they hold. False if a deadline cut it short.

        known: by key, the entries that it should hold at least, and when they expire (Unix milliseconds).
        """
        now, deadline, asked, unsure = loop_time(), self._read_deadline(), dict[PeerID, list[str]](), list[str]()
        for key in known:
            key_id = DHTID.generate(source=key)
            found = self._fresh_near(key_id, now)
            holders = [peer for node, peer in self._candidates(key_id, found) if node != self._dht.node_id]
            if not found or not holders:
                unsure.append(key)
                continue
            # Keys that one node holds are one call.
            holder = next((peer for peer in asked if peer in holders), None) or self._rng.choice(holders[:NUM_COPIES])
            asked.setdefault(holder, []).append(key)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline), asyncio.TaskGroup() as calls:
                for holder, keys in asked.items():
                    calls.create_task(self._read_at(holder, {key: known[key] for key in keys}, unsure))
        return not unsure or await self.lookup(unsure, deadline=deadline)

    async def _read_at(self, holder: PeerID, known: Mapping[str, Mapping[PeerId, int]], unsure: list[str]) -> None:
        ids = {key: DHTID.generate(source=key) for key in known}
        answer = await self._dht._call_find_with_blacklist(holder, list(ids.values()))
        now = loop_time()
        for key, entries in known.items():
            value, _ = (answer or {}).get(ids[key], (None, None))
            told = dict(_expiries(value))
            if answer is None:
                self._near.pop(ids[key], None)
            # The holder of an empty key may have just begun.
            empty = not told and now - self._all_asked_at.get(ids[key], -math.inf) > _EMPTY_S
            if answer is None or empty or any(told.get(peer, 0) < expiry for peer, expiry in entries.items()):
                unsure.append(key)

    def _fresh_near(self, key_id: DHTID, now: float) -> dict[DHTID, PeerID]:
        """The nodes that a traversal found to be nearest to a key, not long ago; {}: none did."""
        at, found = self._near.get(key_id, (-math.inf, {}))
        return found if now - at <= HOLDERS_S else {}

    async def store(self, entries: Sequence[Entry], *, deadline: float) -> int:
        """Keep each entry at the nodes nearest to its key. Returns how many are kept somewhere."""
        now = loop_time()
        ids = [DHTID.generate(source=entry.key) for entry in entries]
        nearest = {key_id: found for key_id in ids if (found := self._fresh_near(key_id, now))}
        # A node that is asked about a key returns all that it stores there; no node stores anything under the sibling
        # id.
        siblings = {DHTID(int(key_id) ^ 1): key_id for key_id in ids if key_id not in nearest}
        if siblings:
            for key_id, found in (await self._nearest(list(siblings), deadline=(now + deadline) / 2) or {}).items():
                nearest[siblings[key_id]] = found
                self._near[siblings[key_id]] = now, found
        kept: set[int] = set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline), asyncio.TaskGroup() as stores:
                for number, (key_id, entry) in enumerate(zip(ids, entries, strict=True)):
                    for node_id, peer in self._candidates(key_id, nearest.get(key_id, {})):
                        stores.create_task(self._store_at(node_id, peer, key_id, entry, number, kept))
        return len(kept)

    def _candidates(self, key_id: DHTID, found: dict[DHTID, PeerID]) -> list[tuple[DHTID, PeerID]]:
        """The nodes nearest to a key, found just now or known; with this node, unless it is a client."""
        table = self._dht.protocol.routing_table.get_nearest_neighbors(key_id, k=NUM_COPIES)
        known = {**found, **dict(table)}
        known[self._dht.node_id] = self._dht.peer_id
        if self._dht.protocol.client_mode:
            del known[self._dht.node_id]
        return sorted(known.items(), key=lambda item: key_id.xor_distance(item[0]))[: NUM_COPIES + 1]

    async def _store_at(
        self, node_id: DHTID, peer: PeerID, key_id: DHTID, entry: Entry, number: int, kept: set[int]
    ) -> None:
        # We are among the nearest ourselves: no call needed.
        if node_id == self._dht.node_id:
            stored = self._dht.protocol.storage.store_subkey(key_id, entry.subkey, entry.value, entry.expiry)
        else:
            answer = await self._dht.protocol.call_store(peer, [key_id], [entry.value], [entry.expiry], [entry.subkey])
            stored = bool(answer and answer[0])
            # It is gone: another one is nearest now.
            if answer is None:
                self._near.pop(key_id, None)
        if stored:
            kept.add(number)

    async def _nearest(self, ids: list[DHTID], *, deadline: float) -> dict[DHTID, dict[DHTID, PeerID]] | None:
        try:
            async with asyncio.timeout_at(deadline):
                found: dict[DHTID, dict[DHTID, PeerID]] = await self._dht.find_nearest_nodes(ids)
                for key_id, near in found.items():
                    self._near[key_id] = loop_time(), near
                return found
        except (TimeoutError, AssertionError):  # the traversal asserts when an answer made one of its tasks fail
            return None


def _expiries(value: Any) -> Iterator[tuple[PeerId, int]]:
    """Who has an entry in what a key holds, and when it expires (Unix milliseconds); a stranger may hold anything."""
    entries = getattr(getattr(value, "value", None), "data", None)
    for subkey, entry in entries.items() if isinstance(entries, dict) else ():
        if isinstance(subkey, str) and 0 <= entry.expiration_time < _ENDLESS_S:
            yield PeerId(subkey), round(entry.expiration_time * 1000)


class _PendingCalls(dict[UUID, asyncio.Future[Any]]):
    """Calls that wait for the daemon. Hivemind's reader of its answers ends when it answers one that has just been
    cancelled, and with it the node: on a busy machine every few seconds."""

    def __contains__(self, call: object) -> bool:
        return super().__contains__(call) and not self[call].done()  # type: ignore[index]


class PacedP2P(P2P):  # type: ignore[misc]
    """Serves each caller at a bounded rate: a record costs a signature's check, and the peer's event loop does it."""

    def __init__(self) -> None:
        super().__init__()
        self.own: Sized = ()
        """Keys of this node's run."""
        self.held: Sized = ()
        """Keys that this node keeps."""
        self._calls, self._keys = Budgets[PeerID](DHT_CALLS), Budgets[PeerID](DHT_KEYS)

    async def add_protobuf_handler(self, name: str, handler: Any, *of: Any, **how: Any) -> None:
        """Register `handler` behind that: it runs later, or not if its caller would have given up by then."""

        async def paced(request: Any, context: Any) -> Any:
            now = loop_time()
            # A node without a run keeps others' keys; each costs its author a signature, so that few are made up.
            keys_per_s = max(_KEYS_PER_S, _READS_PER_S * len(self.own) or len(self.held))
            keys_s = len(getattr(request, "keys", ())) / keys_per_s
            caller = context.remote_id
            pause_s = max(self._calls.of(caller).take(now), self._keys.of(caller).take(now, keys_s))
            # It would give up before we answer, and ask again.
            if pause_s >= RPC_TIMEOUT_S:
                raise RuntimeError("too many keys from one caller")
            await asyncio.sleep(pause_s)
            return await handler(request, context)

        await super().add_protobuf_handler(name, paced, *of, **how)


class _NotOurs(logging.Filter):
    """Drops asyncio's warnings about hivemind's unowned tasks: a stranger's crafted packet can make one fail, and a
    lookup that is cut short leaves some to the garbage collector."""

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        # A lookup starts a task for each request that waits for its end, and forgets it.
        left = "destroyed but it is pending" in said and "coro=<Event.wait()" in said
        return not left and "/hivemind/" not in said


_NOT_OURS = _NotOurs()


def _quiet() -> None:
    """Not a word from hivemind unless we are debugging."""
    use_hivemind_log_handler("nowhere")
    debugging = logging.getLogger("swarmnet").isEnabledFor(logging.DEBUG)
    logging.getLogger("hivemind").setLevel(logging.WARNING if debugging else logging.CRITICAL)
    if not debugging:
        logging.getLogger("asyncio").addFilter(_NOT_OURS)
