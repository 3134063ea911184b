"""Who beats whom in a stage: connected, bounded, symmetric, and the same for most when one comes or goes."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.ids import PeerId, mark_of
from swarmnet.step.graph import DENSE, Graph, lots, mates, ring

MOST_COUNT = 61


def replicas(number: int, salt: int = 0) -> frozenset[PeerId]:
    return frozenset(PeerId(f"peer {salt}/{at}") for at in range(number))


def counting_of(names: frozenset[PeerId]) -> frozenset[PeerId]:
    return frozenset(sorted(names, key=mark_of)[:MOST_COUNT])


def links(names: frozenset[PeerId]) -> dict[PeerId, set[PeerId]]:
    """Whom each hears: those whom it has chosen, and those who have chosen it."""
    counting = counting_of(names)
    found: dict[PeerId, set[PeerId]] = {peer: set(mates(peer, names - {peer}, counting)) for peer in names}
    for peer, chosen in list(found.items()):
        for other in chosen:
            found[other].add(peer)
    return found


def hops(found: dict[PeerId, set[PeerId]]) -> int:
    """From the first peer to all; raises if it does not reach somebody."""
    reached, edge, count = {min(found)}, {min(found)}, 0
    while len(reached) < len(found):
        edge = {other for peer in edge for other in found[peer]} - reached
        assert edge, "somebody is cut off"
        reached |= edge
        count += 1
    return count


sizes = st.integers(1, 300)


@settings(deadline=None, max_examples=40)
@given(sizes, st.integers(0, 5))
def test_all_hear_of_all_over_few_links(number: int, salt: int) -> None:
    names = replicas(number, salt)
    found = links(names)
    assert hops(found) <= 4
    assert all(peer not in found[peer] for peer in names)
    if number <= DENSE:
        assert all(found[peer] == names - {peer} for peer in names)
        return
    others = names - counting_of(names)
    assert all(len(found[peer]) <= 8 + 2 for peer in others)
    assert sum(map(len, found.values())) <= MOST_COUNT**2 + 12 * number


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 200), st.integers(0, 5))
def test_the_ring_is_symmetric(number: int, salt: int) -> None:
    names = replicas(number, salt)
    chosen = {peer: ring(peer, names) for peer in names}
    assert all(peer in chosen[other] for peer in names for other in chosen[peer])
    assert all(len(chosen[peer]) == min(8, number - 1) for peer in names)


@settings(deadline=None, max_examples=30)
@given(st.integers(DENSE + 2, 250), st.integers(0, 249))
def test_when_one_comes_or_goes_few_links_change(number: int, which: int) -> None:
    names = replicas(number)
    gone = sorted(names)[which % number]
    counting = counting_of(names - {gone})  # who counts is decided by commits, and changes later
    after = {peer: mates(peer, names - {peer, gone}, counting) for peer in names - {gone}}
    before = {peer: mates(peer, names - {peer}, counting) for peer in names - {gone}}
    changed = [peer for peer in after if after[peer] != before[peer] - {gone}]
    if number - 1 > DENSE:
        assert len(changed) <= 8


@given(st.integers(0, 100))
def test_lots_spread_over_those_who_count(number: int) -> None:
    counting = counting_of(replicas(200))
    found = lots(PeerId(f"member {number}"), counting)
    assert len(found) == 2 and found <= counting


def test_of_two_stages_beside_each_other_both_ends_find_few_neighbours() -> None:
    stages = {0: replicas(40), 1: replicas(200, 1), 2: replicas(10, 2)}
    heard: dict[PeerId, int] = dict.fromkeys((peer for names in stages.values() for peer in names), 0)
    for stage, names in stages.items():
        for peer in names:
            graph = Graph(peer, stage)
            near = {at: found - {peer} for at, found in stages.items() if abs(at - stage) <= 1}
            counting = {at: counting_of(found) for at, found in near.items()}
            graph.choose(near, counting, {}, leader=None)
            large = {at for at in near if max(len(stages[at]), len(names)) > DENSE}
            assert graph.sparse == large
            beside = [other for at in near if at != stage for other in graph.chosen & stages[at]]
            assert len(beside) == 8 * (len(near) - 1)
            for other in beside:
                heard[other] += 1
    most = {stage: max(heard[peer] for peer in names) for stage, names in stages.items()}
    assert most[1] <= 3 * 8 and most[0] <= 8 * math.ceil(200 / 40) * 3


def test_who_has_chosen_me_is_answered_as_long_as_it_does() -> None:
    names, me = replicas(100), PeerId("me")
    graph = Graph(me, 0)
    graph.choose({0: names}, {0: counting_of(names)}, {}, leader=None)
    stranger = min(names - graph.chosen)
    graph.asked(stranger, chosen=True, now=0.0)
    assert stranger in graph.neighbours(for_s=9.0, now=9.0)
    assert stranger not in graph.neighbours(for_s=9.0, now=9.1)
    graph.asked(stranger, chosen=True, now=10.0)
    graph.asked(stranger, chosen=False, now=11.0)
    assert stranger not in graph.neighbours(for_s=9.0, now=12.0)


def test_the_leader_is_heard_by_all_and_hears_all() -> None:
    names, me = replicas(100), PeerId("me")
    member, leader = Graph(me, 0), Graph(me, 0)
    far = min(names - ring(me, names) - lots(me, counting_of(names)))
    member.choose({0: names}, {0: counting_of(names)}, {}, leader=far)
    assert far in member.chosen
    leader.choose({0: ring(me, names)}, {0: counting_of(names)}, {0: names}, leader=me)
    assert leader.chosen == names


def test_identities_that_have_contributed_nothing_make_no_stage_large() -> None:
    """A record in the DHT costs nothing, and in a large stage heartbeats are rare."""
    names, me = replicas(4), PeerId("me")
    graph = Graph(me, 0)
    strangers = replicas(300, 1)
    graph.choose({0: names | strangers}, {0: names}, {0: names}, leader=None)
    assert not graph.sparse and names <= graph.chosen and len(graph.chosen & strangers) == DENSE
