"""A full key, and a full table, keep who was there first, and make room for who is admitted."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.routing import DHTID
from hivemind.utils import MSGPackSerializer
from test_records import ME, NOW, RUN, announcement

from swarmnet.clock import CLOCK, wall_time
from swarmnet.ids import PeerId
from swarmnet.net import dht_node
from swarmnet.net.dht_node import GRACE_S, MAX_LARGE_BYTES, ORDINARY_BYTES, BoundedStorage, RecordGate
from swarmnet.net.identity import Identity
from swarmnet.net.records import RecordTable, seal
from swarmnet.statement import MAX_PAYLOAD_BYTES

KEY, OTHER_KEY = DHTID.generate(source="ours"), DHTID.generate(source="another run's")
ENTRIES = 8


class Guests:
    """Everybody is a guest until it is known who is invited."""

    def __init__(self) -> None:
        self.known = False

    def admits(self, value: object) -> bool:
        return not self.known or bytes(value).startswith(b"friend")


def storage(guests: Guests) -> BoundedStorage:
    return BoundedStorage(lambda key: key == KEY, admits=guests.admits, max_entries=ENTRIES)


def store(into: BoundedStorage, peer: str, *, key: DHTID = KEY, ahead_s: float = 30.0) -> bool:
    return into.store_subkey(key, peer, peer.encode(), time.time() + ahead_s)


def held(by: BoundedStorage, key: DHTID = KEY) -> list[str]:
    return list(by.get(key).value.data)


def test_a_flood_does_not_push_out_who_was_there() -> None:
    here = storage(Guests())
    assert store(here, "early")
    for number in range(20):
        store(here, f"bogus {number}")
    assert store(here, "early", ahead_s=40.0), "it renews"
    assert held(here) == ["early", *(f"bogus {number}" for number in range(ENTRIES - 1))]


def test_a_node_finds_room_for_its_own_record_in_a_key_that_was_full_before() -> None:
    here = BoundedStorage(lambda key: key == KEY, max_entries=ENTRIES, me=ME.peer)
    for number in range(ENTRIES):
        assert store(here, f"bogus {number}")
    assert not store(here, "late") and store(here, ME.peer) and store(here, ME.peer, ahead_s=40.0)
    assert held(here) == [*(f"bogus {number}" for number in range(ENTRIES)), ME.peer]


@pytest.mark.parametrize("by_s", [-3600.0, 3600.0])
def test_entries_last_by_the_corrected_time(by_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    here = storage(Guests())
    monkeypatch.setattr(CLOCK, "began", CLOCK.began + by_s)
    assert here.store_subkey(KEY, "early", b"early", wall_time() + 30.0)
    assert not here.store_subkey(KEY, "expired", b"expired", wall_time() - 30.0)
    assert held(here) == ["early"]


def test_the_admitted_find_room_in_a_full_key_and_the_newest_others_go() -> None:
    guests = Guests()
    here = storage(guests)
    for peer in ("early", *(f"bogus {number}" for number in range(ENTRIES - 1))):
        assert store(here, peer)
    assert store(here, "early", ahead_s=60.0)
    assert not store(here, "friend 0"), "nothing tells them apart yet"
    guests.known = True
    for number in range(ENTRIES - 1):
        assert store(here, f"friend {number}")
    assert held(here) == ["early", *(f"friend {number}" for number in range(ENTRIES - 1))]
    assert store(here, "friend 98") and "early" not in held(here)
    assert not store(here, "friend 99") and not store(here, "late"), "of equals the first stay"


def test_large_entries_fill_their_own_part_of_a_key_and_no_more() -> None:
    guests = Guests()
    here = BoundedStorage(lambda key: key == KEY, admits=guests.admits)
    expiry = itertools.count(time.time() + 30.0, 0.1)

    def put(peer: str, size: int, key: DHTID = KEY) -> bool:
        return here.store_subkey(key, peer, peer.encode().ljust(size), next(expiry))

    assert put("grows", ORDINARY_BYTES)
    large = [put(f"large {number}", MAX_PAYLOAD_BYTES) for number in range(200)]
    assert large == [number < MAX_LARGE_BYTES // MAX_PAYLOAD_BYTES for number in range(200)]
    assert put("ordinary", ORDINARY_BYTES) and put("large 3", MAX_PAYLOAD_BYTES), "nobody else feels it"
    assert not put("grows", ORDINARY_BYTES + 1)
    assert put("large 3", 1500) and put("grows", 1501), "what one gives up another may have"
    assert put("large", MAX_PAYLOAD_BYTES, OTHER_KEY)
    guests.known = True
    assert put("friend", MAX_PAYLOAD_BYTES) and "large 127" not in held(here) and "large 126" in held(here)


def test_of_another_run_we_know_nobody() -> None:
    guests = Guests()
    here = storage(guests)
    for number in range(ENTRIES):
        assert store(here, f"bogus {number}", key=OTHER_KEY)
    guests.known = True
    assert not store(here, "friend", key=OTHER_KEY)


def test_a_full_table_of_records_does_the_same() -> None:
    people = [Identity.generate() for _ in range(6)]
    friends = {people[4].peer, people[5].peer}
    table = RecordTable(RUN, admits=lambda found: found.record.peer in friends, max_peers=3)
    told = [table.offer(announcement(who=who), now=NOW) for who in people]
    assert told == [True, True, True, False, True, True]
    kept = {found.record.peer for found in table.fresh(now=NOW)}
    assert kept == {people[0].peer, *friends}
    assert table.offer(announcement(who=people[0], ahead_s=40.0), now=NOW) is False, "it is known already"
    assert table.get(people[0].peer, now=NOW) is not None and table.get(PeerId("nobody"), now=NOW) is None
    assert table.get(people[0].peer, now=NOW + 41.0) is None


def test_a_node_forgets_what_it_has_verified_once_that_has_expired() -> None:
    now, lasts_s = NOW, 30
    gate = RecordGate(lambda found: None, clock=lambda: now)
    for second in range(300):
        now = NOW + second
        found = announcement(ahead_s=second + lasts_s)
        subkey = MSGPackSerializer.dumps(ME.peer)
        key = DHTID.generate(source=found.key).to_bytes()
        assert gate.validate(DHTRecord(key, subkey, seal(found, ME.sign), found.expiry_ms / 1000))
    assert lasts_s < len(gate._verified) <= lasts_s + GRACE_S


def test_who_reads_more_than_is_remembered_again_verifies_little_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    most, seen = 8, []
    verify = dht_node.verified
    monkeypatch.setattr(dht_node, "MAX_REMEMBERED", most)
    monkeypatch.setattr(dht_node, "verified", lambda found, **how: seen.append(found) or verify(found, **how))
    gate = RecordGate(lambda found: None, clock=lambda: NOW)
    people = [Identity.generate() for _ in range(most + 2)]
    records = [(who, replace(announcement(who=who), dht=())) for who in people]
    sealed = [(found, MSGPackSerializer.dumps(who.peer), seal(found, who.sign)) for who, found in records]
    for _ in range(2):
        for found, subkey, data in sealed:
            key = DHTID.generate(source=found.key).to_bytes()
            assert gate.validate(DHTRecord(key, subkey, data, found.expiry_ms / 1000)) and gate.admits(data)
    assert len(people) < len(seen) <= len(people) + 3 and len(gate._verified) == most


def test_only_where_no_other_node_is_known_a_late_one_is_waited_for_longer() -> None:
    reader, table = dht_node._Reader.__new__(dht_node._Reader), {"late": 1}
    reader.protocol = SimpleNamespace(routing_table=SimpleNamespace(peer_id_to_uid=table))
    reader.patience_s = 4 * dht_node.RPC_TIMEOUT_S
    assert reader.limit_s == 4 * dht_node.RPC_TIMEOUT_S
    table["another"] = 2
    assert reader.limit_s == dht_node.RPC_TIMEOUT_S
