"""How often records are read, and in how many parts those of a large stage lie."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from swarmnet import directory
from swarmnet.directory import LONGEST_S, READ_BYTES_PER_S, RECORD_BYTES, SMALL_RUN, ReadPace, Record, StageStatus
from swarmnet.ids import PeerId, RunId, first_chain, mark_of
from swarmnet.net import records as stored
from swarmnet.net.records import MAX_PARTS, Announcement, part_of, parts_seen, places_in, places_of

RUN = RunId("ab" * 32)


def reads(records: int, *, at_once: bool, whole: bool = False, hours: float = 1.0) -> list[float]:
    """When somebody who asks twice a second reads so many records."""
    pace, found = ReadPace(2.0), []
    for tick in range(int(hours * 7200)):
        now = tick / 2
        if pace.may_read(whole=whole, at_once=at_once, records=records, now=now):
            pace.has_read(whole=whole, records=records, jitter=1.0, now=now)
            found.append(now)
    return found


@given(st.integers(0, 120), st.booleans())
def test_what_is_near_is_read_at_a_bounded_rate_and_often_enough(records: int, at_once: bool) -> None:
    found = reads(records, at_once=at_once, hours=0.5)
    longest = max(after - before for before, after in itertools.pairwise(found))
    assert longest <= LONGEST_S + 1.0
    burst = directory.BURST_BYTES if at_once else 0
    most = max(READ_BYTES_PER_S * 1800, records * RECORD_BYTES * 1800 / LONGEST_S) + burst
    assert (len(found) - 1) * records * RECORD_BYTES <= most


def test_a_small_run_is_read_every_few_seconds_and_a_large_one_costs_no_more() -> None:
    assert len(reads(4, at_once=False)) == 1800
    per_hour = [len(reads(records, at_once=True, whole=True)) * records for records in (1000, 10000)]
    assert per_hour[1] <= 1.5 * per_hour[0]
    assert len(reads(SMALL_RUN, at_once=False, whole=True)) == 360


def test_who_asks_at_once_is_answered_at_once_as_long_as_something_is_spared() -> None:
    pace = ReadPace(2.0)
    for second in (0.0, 2.0, 4.0, 6.0):
        assert pace.may_read(whole=True, at_once=True, records=200, now=second)
        pace.has_read(whole=True, records=200, jitter=1.0, now=second)
        assert pace.complete(second + 10.0) and not pace.complete(second + 30.0)
    assert not pace.may_read(whole=True, at_once=True, records=200, now=6.4)
    assert not pace.may_read(whole=True, at_once=False, records=200, now=9.0)


# ---------------------------------------------------------------- parts


def announcement(number: int, bits: int) -> Announcement:
    peer = PeerId(f"peer {number}")
    record = Record(RUN, peer, 1, (), (StageStatus(3, 0, first_chain(RUN, 3), True),))
    return Announcement(record, "3", 1, 4, parts=(bits,))


@given(st.integers(0, 10**6), st.integers(0, MAX_PARTS))
def test_a_record_lies_in_one_part_and_the_first_part_at_the_stages_own_key(number: int, bits: int) -> None:
    peer = PeerId(f"peer {number}")
    parts = [part_of(part << (64 - bits), 3, bits) if bits else "3" for part in range(1 << bits)]
    places = places_in(peer, 3, bits)
    assert places[0] in parts and set(places) - {"3"} <= set(parts) and len(set(parts)) == 1 << bits
    assert ("3" in places) == (not bits or mark_of(peer) >> (64 - bits) == 0)
    assert places[0] == part_of(mark_of(peer), 3, bits)


def settled(replicas: int, *, bits: int = 0) -> int:
    """In how many parts the records of so many replicas lie, once all have looked a few times."""
    for _ in range(2 * MAX_PARTS):
        found = [announcement(number, bits) for number in range(replicas)]
        at = [each for each in found if "3" in places_of(each.record, each.parts)]
        seen = parts_seen(at, 3)
        if seen in (None, bits):
            break
        bits = seen
    return bits


def test_parts_are_neither_large_nor_many() -> None:
    assert [settled(replicas) for replicas in (0, 1, 12, 24)] == [0, 0, 0, 0]
    for replicas in (64, 100, 200, 1000, 4000):
        bits = settled(replicas)
        assert stored.FEW / 2 < replicas / 2**bits <= 1.5 * stored.MANY
        assert abs(settled(replicas, bits=bits + 2) - bits) <= 1, "a stage that lost most of its replicas"


def test_a_replica_is_announced_in_its_part_and_as_a_mover() -> None:
    record = announcement(1, 2).record
    leaf = part_of(mark_of(record.peer), 3, 2)
    assert leaf in places_of(record, (2,)) and stored.WHOLE_RUN in places_of(record, (2,))
    going = Record(RUN, record.peer, 1, (), record.stages, trainer=True, going=1)
    assert {stored.MOVERS, stored.TRAINERS, leaf} <= set(places_of(going, (2,)))
    assert stored.MOVERS not in places_of(record, (2,))
