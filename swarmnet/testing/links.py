"""What is between simulated processes: noise, cuts, slow pairs and narrow uplinks. It knows no messages.

A cut is silence, not refusal: a peer behind it looks like a stopped process. Bandwidth limits of a peer are
shared by all its transfers, chunk by chunk, in both directions apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from swarmnet.ids import PeerId

_CHUNKS, _LEAST_CHUNK_BYTES = 32, 16 << 10
"""A transfer is cut into so many chunks (of so many bytes at least): as fine as a peer shares its line."""


@dataclass(frozen=True, slots=True)
class Links:
    """The noise between any two peers."""

    latency_s: float = 0.005
    """One way, plus up to as much jitter."""
    loss: float = 0.0
    double: float = 0.0
    """Shares of one-way messages that are lost, and that arrive twice."""
    late: float = 0.0
    """Share of messages that are held up for up to a second, so that others overtake them."""
    broken: float = 0.0
    """Share of calls with a connection that breaks."""
    bytes_per_s: float = 1e9
    stall_s: float = 10.0
    """A callee that shows no life for so long, stopped or cut off, has timed out."""


class LinkCut(NamedTuple):
    """Groups between which nothing passes; one_way: only what the first sends to the others is lost."""

    group_of: dict[PeerId, int]
    one_way: bool = False

    def loses(self, sender: PeerId, receiver: PeerId) -> bool:
        """Does what `sender` sends not reach `receiver`? A peer that is in no group reaches every other one."""
        mine, theirs = self.group_of.get(sender), self.group_of.get(receiver)
        return mine is not None and theirs is not None and mine != theirs and not (self.one_way and mine)


class LinkDirection:
    """One direction of one peer's line."""

    def __init__(self, bytes_per_s: float) -> None:
        if bytes_per_s <= 0:
            raise ValueError(f"a link needs bandwidth, got {bytes_per_s}")
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def reserve(self, num_bytes: int, *, now: float) -> float:
        """When `num_bytes` more, asked for now, will have passed."""
        self._free_at = max(now, self._free_at) + num_bytes / self.bytes_per_s
        return self._free_at


class SimulatedLinks:
    """Who reaches whom, and how fast."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.cuts: dict[object, LinkCut] = {}
        """Those that hold, each under the key by which it ends."""
        self._undialled: set[tuple[PeerId, PeerId]] = set()
        self._pairs: dict[frozenset[PeerId], tuple[float | None, float | None]] = {}
        self._relays: dict[frozenset[PeerId], PeerId] = {}
        self.regions: dict[PeerId, int] = {}
        self.between: tuple[tuple[float, ...], ...] = ()
        """Latency from region to region, of peers that have one."""
        self.held_s: dict[PeerId, float] = {}
        """Added to the latency of all that this peer sends and receives."""
        self.relayed_bytes = 0
        self._up: dict[PeerId, LinkDirection] = {}
        self._down: dict[PeerId, LinkDirection] = {}

    # ------------------------------------------------------------ faults

    def cut(self, key: object, groups: Iterable[Iterable[PeerId]], *, one_way: bool = False) -> None:
        """Nothing passes between these groups until `heal(key)`, whatever other cuts begin and end meanwhile.

        one_way: what the first group sends is lost, the other way is open. Who is in two groups is in the first.
        """
        group_of: dict[PeerId, int] = {}
        for number, group in enumerate(groups):
            for peer in group:
                group_of.setdefault(peer, number)
        self.cuts[key] = LinkCut(group_of, one_way)

    def block_dial(self, sender: PeerId, receiver: PeerId) -> None:
        """`sender` cannot open connections to `receiver`: silence. What `receiver` opens works in full."""
        self._undialled.add((sender, receiver))

    def heal(self, key: object = None) -> None:
        """End this cut; None: every cut, and all peers can dial."""
        if key is None:
            self.cuts, self._undialled = {}, set()
        self.cuts.pop(key, None)

    def slow(self, one: PeerId, other: PeerId, bytes_per_s: float | None, latency_s: float | None) -> None:
        """Override speed and latency between two peers, both ways; None: as everywhere."""
        self._pairs[frozenset((one, other))] = (bytes_per_s, latency_s)

    def limit(self, peer: PeerId, up_bytes_per_s: float | None, down_bytes_per_s: float | None) -> None:
        """Limit what a peer sends and receives in all; None: without limit."""
        for directions, rate in ((self._up, up_bytes_per_s), (self._down, down_bytes_per_s)):
            before = directions.pop(peer, None)
            if rate is not None:
                # What is under way at this rate goes on.
                same = before is not None and before.bytes_per_s == rate
                directions[peer] = before if before is not None and same else LinkDirection(rate)

    def relay_by(self, one: PeerId, other: PeerId, relay: PeerId) -> None:
        """These two reach each other through `relay` alone, and what passes between them crosses its line twice."""
        self._relays[frozenset((one, other))] = relay

    # ------------------------------------------------------------ what passes

    def relay(self, one: PeerId, other: PeerId) -> PeerId | None:
        """Through whom these two reach each other; None: directly."""
        return self._relays.get(frozenset((one, other))) if self._relays else None

    def reaches(self, sender: PeerId, receiver: PeerId) -> bool:
        """Does a message pass?"""
        return not self.cuts or not any(cut.loses(sender, receiver) for cut in self.cuts.values())

    def connected(self, one: PeerId, other: PeerId) -> bool:
        """Do messages pass both ways, as a connection needs?"""
        return self.reaches(one, other) and self.reaches(other, one)

    def blocked(self, sender: PeerId, receiver: PeerId) -> bool:
        """Is `receiver` behind a firewall, for `sender`?"""
        return bool(self._undialled) and (sender, receiver) in self._undialled

    def dials(self, sender: PeerId, receiver: PeerId) -> bool:
        """Can `sender` open a connection to `receiver`?"""
        return not self.blocked(sender, receiver) and self.connected(sender, receiver)

    def latency_s(self, sender: PeerId, receiver: PeerId) -> float:
        """One way, without jitter."""
        if self._relays and (relay := self.relay(sender, receiver)) is not None:
            return self.latency_s(sender, relay) + self.latency_s(relay, receiver)
        found: float | None = None
        if self._pairs:
            found = self._pairs.get(frozenset((sender, receiver)), (None, None))[1]
        if found is None and self.between and sender in self.regions and receiver in self.regions:
            found = self.between[self.regions[sender]][self.regions[receiver]]
        if found is None:
            found = self.links.latency_s
        if self.held_s:
            found += self.held_s.get(sender, 0.0) + self.held_s.get(receiver, 0.0)
        return found

    def meeting_s(self, peers: Collection[PeerId], num_bytes: float) -> float:
        """How long it takes that all of these have the sum of vectors of so many bytes, by the slowest line and the
        longest way: each shard goes to its reducer, and back."""
        rates = [lines[peer].bytes_per_s for lines in (self._up, self._down) for peer in peers if peer in lines]
        regions = {self.regions[peer] for peer in peers if peer in self.regions} if self.between else set()
        way_s = max((self.between[one][other] for one in regions for other in regions), default=self.links.latency_s)
        return 2 * (num_bytes / min([self.links.bytes_per_s, *rates]) + 2 * 1.5 * way_s)

    async def carry(self, sender: PeerId, receiver: PeerId, num_bytes: int) -> None:
        """Return when the bytes have passed: at the pair's own speed, through what both peers share of their lines."""
        if not num_bytes:
            return
        loop = asyncio.get_running_loop()
        rate = self._pairs.get(frozenset((sender, receiver)), (None, None))[0] or self.links.bytes_per_s
        crossed = [self._up.get(sender), self._down.get(receiver)]
        if (relay := self.relay(sender, receiver)) is not None:
            crossed += [self._down.get(relay), self._up.get(relay)]
            self.relayed_bytes += num_bytes
        directions = [direction for direction in crossed if direction is not None]
        # Without a limited link there is no peer to share it with.
        chunk = num_bytes if not directions else max(-(-num_bytes // _CHUNKS), _LEAST_CHUNK_BYTES)
        passed = 0
        while passed < num_bytes:
            size = min(chunk, num_bytes - passed)
            now = loop.time()
            ends = max([now + size / rate, *(direction.reserve(size, now=now) for direction in directions)])
            await asyncio.sleep(ends - now)
            passed += size
