"""Where a newcomer goes: the neediest stage, and many newcomers at once to many stages."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.ids import PeerId
from swarmnet.peer.placement import Choice, Serving, choose

peers = st.integers(0, 10**6).map(lambda number: PeerId(f"peer-{number}"))
newcomers = st.lists(peers, min_size=1, max_size=20, unique=True)
swarms = st.integers(1, 6).flatmap(
    lambda stages: st.tuples(
        st.just(stages),
        st.lists(
            st.builds(
                Serving,
                peers.map(lambda peer: PeerId(f"old-{peer}")),
                st.integers(0, stages - 1),
                st.booleans(),
                st.booleans(),
                st.floats(0, 4),
            ),
            max_size=25,
            unique_by=lambda each: each.peer,
        ),
    )
)


def counts(num_stages: int, serving: list[Serving]) -> list[int]:
    found = Counter(each.stage for each in serving if not each.leaving)
    return [found[stage] for stage in range(num_stages)]


def replica(name: str, stage: int, **more) -> Serving:
    return Serving(PeerId(name), stage, **{"has_state": True, **more})


@given(swarms, peers)
def test_a_newcomer_goes_where_the_fewest_are(swarm: tuple[int, list[Serving]], me: PeerId) -> None:
    num_stages, serving = swarm
    chosen = choose(me, range(num_stages), serving)
    assert counts(num_stages, serving)[chosen.stage] == min(counts(num_stages, serving))
    assert chosen.reason and chosen == choose(me, range(num_stages), serving[::-1])


@given(swarms, newcomers)
def test_newcomers_one_after_the_other_even_out(swarm: tuple[int, list[Serving]], joining: list[PeerId]) -> None:
    num_stages, serving = swarm
    serving = list(serving)
    for me in joining:
        before = counts(num_stages, serving)
        serving.append(Serving(me, choose(me, range(num_stages), serving).stage, has_state=False))
        after = counts(num_stages, serving)
        assert min(after) > min(before) or before.count(min(before)) > after.count(min(after))


@given(swarms, newcomers)
def test_newcomers_at_the_same_moment_even_out_as_well(swarm: tuple[int, list[Serving]], joining: list[PeerId]) -> None:
    """All see each other choosing, nobody hears what the others took: as even as one after the other."""
    num_stages, serving = swarm
    at_once = [*serving, *(Serving(me, 0, has_state=False, choosing=True) for me in joining)]
    taken = [Serving(me, choose(me, range(num_stages), at_once).stage, has_state=False) for me in joining]
    in_turn = list(serving)
    for me in joining:
        in_turn.append(Serving(me, choose(me, range(num_stages), in_turn).stage, has_state=False))
    assert sorted(counts(num_stages, [*serving, *taken])) == sorted(counts(num_stages, in_turn))


@given(swarms, peers)
def test_what_i_announced_before_does_not_count(swarm: tuple[int, list[Serving]], me: PeerId) -> None:
    num_stages, serving = swarm
    for choosing in (True, False):
        mine = [Serving(me, stage, has_state=True, choosing=choosing) for stage in range(num_stages)]
        assert choose(me, range(num_stages), [*mine, *serving]) == choose(me, range(num_stages), serving)


@given(swarms, peers, st.sets(st.integers(0, 5)))
def test_the_only_copy_of_a_state_goes_where_it_belongs(
    swarm: tuple[int, list[Serving]], me: PeerId, held: set[int]
) -> None:
    num_stages, serving = swarm
    held = {stage for stage in held if stage < num_stages}
    lost = held - {each.stage for each in serving if each.has_state}
    chosen = choose(me, range(num_stages), serving, held=held).stage
    assert chosen in lost if lost else counts(num_stages, serving)[chosen] == min(counts(num_stages, serving))


@given(st.integers(2, 6), peers)
def test_many_lots_fall_on_every_stage(num_stages: int, me: PeerId) -> None:
    drawn = {choose(PeerId(f"{me}-{number}"), range(num_stages), []).stage for number in range(200)}
    assert drawn == set(range(num_stages))


def test_the_reasons() -> None:
    me = PeerId("me")
    pair = [replica("a", 0), replica("b", 1)]
    assert choose(me, range(2), pair[:1]) == Choice(1, "no peer serves stage 1")
    assert choose(me, range(2), [*pair, replica("c", 0)]) == Choice(1, "stage 1 has the fewest replicas, 1")
    assert choose(me, range(2), [replica("a", 0), replica("b", 1, load=2.0)]) == Choice(
        1, "no stage has fewer replicas than its 1, and it has most to do"
    )
    assert choose(me, range(2), pair).reason == "drawn from 2 stages with 1 replica each"
    assert choose(me, range(2), pair, held={0}) == Choice(
        0, "its checkpoint is here, and no stage has fewer replicas than its 1"
    )
    assert choose(me, range(2), [replica("a", 0), replica("b", 0, has_state=False)], held={1}) == Choice(
        1, "its checkpoint is here, and no other peer has the state of stage 1"
    )
    assert choose(me, range(1), [replica("a", 0)]) == Choice(0, "the only stage")
    assert choose(me, range(2), [replica("a", 0, leaving=True), replica("b", 1)]) == Choice(0, "no peer serves stage 0")


def test_rates_count_and_not_heads() -> None:
    """Two slow replicas are less than one fast one; of whom nothing is measured the stage's median is believed."""
    slow = [replica("a", 0, rate=0.5), replica("b", 0, rate=0.5)]
    fast = [replica("c", 1, rate=4.0)]
    assert choose(PeerId("me"), range(2), [*slow, *fast]).stage == 0
    assert choose(PeerId("me"), range(2), [*slow, replica("d", 0), *fast]).stage == 0
    assert choose(PeerId("me"), range(2), [replica("a", 0, rate=4.0), replica("d", 0), *fast]).stage == 1


def test_who_is_on_the_way_counts_where_it_goes() -> None:
    there = [replica("a", 0), replica("b", 0, going=1, surely=True), replica("c", 2)]
    assert choose(PeerId("me"), range(3), [*there, replica("d", 2)]).stage in (0, 1)
    assert choose(PeerId("me"), range(3), [*there, replica("d", 0)]).stage in (1, 2)


def test_a_stage_that_does_not_fit_is_not_taken_however_much_it_is_missed() -> None:
    there = [replica("a", 1), replica("b", 1), replica("c", 2)]
    assert choose(PeerId("me"), [1, 2], there) == Choice(2, "stage 2 has the fewest replicas, 1")
    assert choose(PeerId("me"), [1], there, held={0}).stage == 1
    moving = replica("d", 0, going=2, surely=True)
    assert choose(PeerId("me"), [1, 2], [*there, moving, replica("e", 2)]).stage == 1
