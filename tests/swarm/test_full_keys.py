"""A newcomer that knows the address of one peer gets in although every DHT key that it reads is full of strangers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from running import PATIENCE_S, Running
from test_dht import Gullible
from test_hostile_flood import Victim, victim

from swarmnet.clock import wall_time
from swarmnet.directory import Record, StageStatus
from swarmnet.ids import first_chain
from swarmnet.net.dht_daemon import Listen
from swarmnet.net.dht_node import MAX_ENTRIES_PER_KEY, DhtNode
from swarmnet.net.identity import Identity
from swarmnet.net.records import MAX_AHEAD_S, MOVERS, TRAINERS, WHOLE_RUN, Announcement, Place, dht_key, seal

PLACES: tuple[Place, ...] = ("0", TRAINERS, MOVERS, WHOLE_RUN)
FOREIGN, AT_ONCE = MAX_ENTRIES_PER_KEY, 64


@contextlib.contextmanager
def deaf() -> Iterator[int]:
    """A port of this machine at which connections are neither accepted nor refused."""
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen(0)
        yield listener.getsockname()[1]


def strangers(of: Victim, port: int) -> list[tuple[Identity, Record]]:
    """Genuine records that lie: each serves the run's only stage, further than anybody, trains, and would move."""
    status = StageStatus(0, 1000, first_chain(of.run, 0), synced=True, slots=64)
    found = []
    for number in range(FOREIGN):
        who, address = Identity.generate(), f"/ip4/127.1.{number // 256}.{number % 256}/tcp/{port}"
        found.append((who, Record(of.run, who.peer, 1, (address,), (status,), trainer=True, going=0)))
    return found


async def fill(of: Victim, place: Place, liars: Sequence[tuple[Identity, Record]]) -> int:
    """Store their records, and junk, under the key of a place at the node of `of`. Returns how many of them it took."""
    evil = await DhtNode.open(Identity.generate(), Gullible(), Listen(client=True), own_keys=())
    try:
        while not await evil.join(of.dht):
            pass  # a busy machine may be later than a dial waits
        # On a busy machine an answer takes longer than hivemind waits: the same records were sent again for ever.
        evil._dht.protocol.wait_timeout = PATIENCE_S
        return sum([await _stored(evil, of, place, liars[at : at + AT_ONCE]) for at in range(0, len(liars), AT_ONCE)])
    finally:
        await evil.close()


async def _stored(evil: DhtNode, of: Victim, place: Place, liars: Sequence[tuple[Identity, Record]]) -> int:
    target, key = PeerID.from_base58(of.peer), DHTID.generate(source=dht_key(of.run, place))
    while True:
        # Newer with each attempt: what was stored although no answer came counts the next time.
        expiry_ms = int((wall_time() + MAX_AHEAD_S - 5.0) * 1000)
        sealed = [(seal(Announcement(record, place, expiry_ms, 1), who.sign), who.peer) for who, record in liars]
        junk, liar = sealed[0][0][::-1], sealed[0][1]
        values, peers = map(list, zip(*sealed, (junk, liar), strict=True))
        many = len(values)
        answer = await evil._dht.protocol.call_store(target, [key] * many, values, [expiry_ms / 1000] * many, peers)
        if answer is not None:
            return sum(map(bool, answer))
        # It refuses for a while: this caller's allowance is spent.
        await asyncio.sleep(0.2)


def test_a_newcomer_is_soon_in_sync_although_all_keys_are_full(tmp_path: Path) -> None:
    with victim(tmp_path) as known, deaf() as port:
        records = strangers(known, port)

        async def flood() -> list[int]:
            async with asyncio.timeout(PATIENCE_S):
                return await asyncio.gather(*(fill(known, place, records) for place in PLACES))

        assert min(asyncio.run(flood())) >= FOREIGN - 1, "the peer's own record was there first"
        link = f"swarm:{known.run}@{known.dht[0]}"
        with Running(tmp_path / "newcomer", "join", link, "--device", "cpu") as newcomer:
            newcomer.says("synced", stage=0, how="snapshot")  # after 36 s; by asking all strangers after minutes
        assert known.alive, known.log
