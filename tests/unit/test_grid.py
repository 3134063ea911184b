"""Groups of a round: whatever their shape, every contribution reaches everybody, once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.averaging import parts
from swarmnet.averaging.grid import (
    Grid,
    Group,
    arrange,
    circles,
    groups,
    in_rows,
    partners,
    random_groups,
    rearranged,
    shape,
)
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.messages import Round, Stamp

STAMP = Stamp(3, 0, Chain("00" * 32))


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(parts, "LEAST_CHUNK", 4)
    yield
    patch.undo()


def peers(number: int) -> tuple[PeerId, ...]:
    return tuple(PeerId(f"p{place:03}") for place in range(number))


def round_of(grid: Grid, shares: dict[PeerId, frozenset[int]], bandwidths: tuple[int, ...] = ()) -> Round:
    ballot = Ballot(1, grid.rows[0][0])
    contributions = tuple((peer, Generation(1, 0), share) for peer, share in sorted(shares.items()))
    receivers = tuple(peer for row in grid.rows for peer in row)
    lengths = tuple(len(row) for row in grid.rows) if len(grid.rows) > 1 else ()
    return Round(
        STAMP,
        ballot,
        RoundId(ballot, 1),
        contributions,
        receivers,
        (),
        bandwidths=bandwidths,
        rows=lengths,
        columns=grid.columns if lengths else 0,
    )


Place = tuple[int, PeerId, parts.Range]


def carried_out(plans: dict[PeerId, list[Group]]) -> dict[PeerId, dict[parts.Range, Counter[int]]]:
    """What everybody ends up with, chunk by chunk: how often which microbatch is in it."""
    sums: dict[Place, Counter[int]] = {}

    def summed(hop: int, peer: PeerId, group: Group, chunk: parts.Range) -> Counter[int]:
        if (hop, peer, chunk) not in sums:
            total: Counter[int] = Counter()
            for speaker in group.speakers:
                said = Counter(index for _, _, indexes in speaker.counted for index in indexes)
                if hop:
                    plan = (g for g in plans[speaker.peer] if g.hop == hop - 1)
                    before = next(g for g in plan if reduces(speaker.peer, g, chunk))
                    assert summed(hop - 1, speaker.peer, before, chunk) == said, "it speaks for what it has summed"
                total += said
            sums[hop, peer, chunk] = total
        return sums[hop, peer, chunk]

    def reduces(peer: PeerId, group: Group, chunk: parts.Range) -> bool:
        return chunk in dict(group.chunks).get(peer, ())

    def result(peer: PeerId, chunk: parts.Range, hop: int) -> Counter[int]:
        """Follow the chunk to whoever sums it last, as a receiver does."""
        group = next(g for g in plans[peer] if g.hop == hop and any(chunk in cut for _, cut in g.chunks))
        reducer = next(who for who, cut in group.chunks if chunk in cut)
        if reducer != peer:
            return result(reducer, chunk, hop)
        return summed(hop, peer, group, chunk) if group.last else result(peer, chunk, hop + 1)

    return {
        peer: {chunk: result(peer, chunk, 0) for _, cut in plan[0].chunks for chunk in cut}
        for peer, plan in plans.items()
    }


@st.composite
def grids(draw: st.DrawFn) -> tuple[Grid, int]:
    """As a keeper makes them, and as losses leave them."""
    members, size = peers(draw(st.integers(1, 40))), draw(st.integers(2, 12))
    grid = in_rows(members, shape(len(members), size))
    lost = draw(st.sets(st.sampled_from(members), max_size=len(members) - 1)) if draw(st.booleans()) else set()
    rows = tuple(row for row in (tuple(p for p in row if p not in lost) for row in grid.rows) if row)
    return Grid(rows, grid.columns), size


@settings(max_examples=50)
@given(grids(), st.integers(1, 400), st.sampled_from([1, 4]), st.data())
def test_every_contribution_reaches_everybody_once(
    made: tuple[Grid, int], elements: int, block: int, data: st.DataObject
) -> None:
    grid, size = made
    members = [peer for row in grid.rows for peer in row]
    owners = data.draw(st.lists(st.sampled_from(members), min_size=1, max_size=8))
    shares: dict[PeerId, frozenset[int]] = {}
    for index, owner in enumerate(owners):
        shares[owner] = shares.get(owner, frozenset()) | {index}
    rates = tuple(data.draw(st.lists(st.sampled_from([1, 3, 20]), min_size=len(members), max_size=len(members))))
    current = round_of(grid, shares, data.draw(st.sampled_from([(), rates])))
    plans = {peer: groups(peer, current, (0, elements), group_size=size, block=block) for peer in members}

    found = carried_out(plans)
    want = Counter(range(len(owners)))
    for peer in members:
        chunks = sorted(found[peer])
        assert [start for start, _ in chunks] == [0, *(stop for _, stop in chunks[:-1])]
        assert chunks[-1][1] == elements and all(start % block == 0 for start, _ in chunks)
        assert all(counted == want for counted in found[peer].values())
    for hop in range(3):
        for row in {tuple(group.chunks) for plan in plans.values() for group in plan if group.hop == hop}:
            for _, cut in row:
                assert all(one[1] == two[0] for one, two in itertools.pairwise(cut)), "contiguous"


@given(st.integers(1, 400), st.integers(2, 32))
def test_rows_and_columns_are_about_equal_and_no_group_is_too_large(members: int, size: int) -> None:
    lengths = shape(members, size)
    assert sum(lengths) == members and max(lengths) - min(lengths) <= 1 and max(lengths) <= size
    assert (len(lengths) == 1) == (members <= size)
    if size < members <= size * size:
        assert len(lengths) <= size and len(lengths) <= max(lengths) <= len(lengths) + 2


def test_a_lost_member_changes_the_groups_of_its_own_row_only() -> None:
    members = peers(64)
    whole = in_rows(members, shape(64, 16))
    shares = {peer: frozenset({at}) for at, peer in enumerate(members)}
    left = rearranged(whole, [peer for peer in members if peer != members[19]], {}, 16)
    remaining = {**shares, members[20]: shares[members[20]] | shares.pop(members[19])}
    remaining.pop(members[19])
    before, after = round_of(whole, {p: frozenset({at}) for at, p in enumerate(members)}), round_of(left, remaining)
    changed = [
        peer
        for peer in members
        if peer != members[19]
        if groups(peer, before, (0, 1000), group_size=16)[0] != groups(peer, after, (0, 1000), group_size=16)[0]
    ]
    assert changed == [peer for peer in whole.rows[2] if peer != members[19]]


@given(st.integers(2, 80), st.integers(2, 20), st.data())
def test_everybody_is_arranged_once_whatever_is_known(members: int, size: int, data: st.DataObject) -> None:
    found = peers(members)
    pairs = st.tuples(st.sampled_from(found), st.sampled_from(found))
    trips = data.draw(st.dictionaries(pairs, st.integers(0, 10**6), max_size=60))
    grid = arrange(found, trips, size)
    assert grid == arrange(reversed(found), trips, size)
    assert sorted(peer for row in grid.rows for peer in row) == list(found)
    assert tuple(len(row) for row in grid.rows) == shape(members, size)
    gone = data.draw(st.sets(st.sampled_from(found), max_size=members - 1))
    again = rearranged(grid, set(found) - gone, trips, size)
    assert sorted(peer for row in again.rows for peer in row) == sorted(set(found) - gone)


def test_near_peers_share_a_row() -> None:
    members = peers(25)
    site = {peer: at % 5 for at, peer in enumerate(members)}
    trips = {
        (one, other): 1.0 if site[one] == site[other] else 40.0 + abs(site[one] - site[other])
        for one in members
        for other in members
        if one < other
    }
    grid = arrange(members, trips, 5)
    assert sorted(len(row) for row in grid.rows) == [5] * 5
    assert all(len({site[peer] for peer in row}) == 1 for row in grid.rows)
    rates = {peer: 100 - at for at, peer in enumerate(members)}
    assert all(list(row) == sorted(row) for row in arrange(members, trips, 5, rates).rows), "the fast stand first"


@given(st.integers(2, 70), st.integers(2, 9), st.text(max_size=5))
def test_nobody_gossips_alone(members: int, size: int, salt: str) -> None:
    found = peers(members)
    drawn = random_groups(found, size, salt)
    assert sorted(peer for group in drawn for peer in group) == list(found)
    assert all(size <= len(group) < 2 * size for group in drawn) or len(drawn) == 1
    assert drawn == random_groups(found[::-1], size, salt)


def test_partners_are_mutual_and_drawn_anew_every_round() -> None:
    members, met = peers(9), set()
    for number in range(40):
        round_id = RoundId(Ballot(1, members[0]), number)
        for peer in members:
            mine = partners(peer, members, 2, STAMP, round_id)
            assert peer in mine and len(mine) in (2, 3)
            assert all(partners(other, members, 2, STAMP, round_id) == mine for other in mine)
            met.add(mine)
    assert len({frozenset(pair) for pair in met}) > 30
    with pytest.raises(ValueError, match="no member"):
        partners(PeerId("stranger"), members, 2, STAMP, round_id)


def test_a_grid_of_three_axes() -> None:
    grid = in_rows(peers(60), shape(60, 4))
    current = round_of(grid, {peer: frozenset({at}) for at, peer in enumerate(peers(60))})
    plan = groups(peers(60)[0], current, (0, 5000), group_size=4)
    assert [group.hop for group in plan] == [0, 1, 2] and [group.last for group in plan] == [False, False, True]
    assert all(len(group.speakers) <= 4 for group in plan)


@pytest.mark.parametrize(("number", "group_size"), [(7, 16), (30, 16), (27, 3), (60, 4), (64, 4), (40, 2)])
def test_circles_are_those_who_share_a_group_in_some_hop(number: int, group_size: int) -> None:
    members = peers(number)
    grid = in_rows(members, shape(number, group_size))
    current = round_of(grid, {peer: frozenset({place}) for place, peer in enumerate(members)})
    found = {frozenset(circle) for circle in circles(grid, group_size)}
    assert max(map(len, found)) <= group_size
    for me in members:
        for group in groups(me, current, (0, 64 * number), group_size=group_size):
            together = {*(speaker.peer for speaker in group.speakers), *(peer for peer, _ in group.chunks)}
            assert any(together <= circle for circle in found)
