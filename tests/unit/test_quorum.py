"""The arithmetic of majorities (`swarmnet.quorum`)."""

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.quorum import blocks, has_quorum, minority, quorum, reached_by_half, reached_by_most

SETS = st.frozensets(st.integers(0, 9), max_size=8)


@given(SETS, SETS, SETS)
def test_two_quorums_share_a_voter(voters: frozenset[int], one: frozenset[int], other: frozenset[int]) -> None:
    if has_quorum(one, voters) and has_quorum(other, voters):
        assert one & other & voters


@given(SETS, SETS)
def test_votes_of_peers_that_are_no_voters_do_not_count(votes: frozenset[int], voters: frozenset[int]) -> None:
    assert has_quorum(votes, voters) == has_quorum(votes & voters, voters)


@given(SETS, SETS)
def test_half_blocks_and_a_quorum_decides(votes: frozenset[int], voters: frozenset[int]) -> None:
    assert has_quorum(votes, voters) == (2 * len(votes & voters) > len(voters))
    assert blocks(votes, voters) == (2 * len(votes & voters) >= len(voters))


@given(SETS)
def test_the_rest_of_a_minority_is_a_quorum(voters: frozenset[int]) -> None:
    few = minority(voters)
    assert minority(len(voters)) == few
    assert not voters or len(voters) - few >= quorum(voters)
    assert len(voters) - (few + 1) < quorum(voters), "one more would be too many"


def test_nothing_is_decided_by_nobody() -> None:
    assert not has_quorum(frozenset(), frozenset()) and blocks(frozenset(), frozenset())
    assert (quorum(0), minority(0)) == (1, 0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9))
def test_what_most_have_reached(values: list[int]) -> None:
    most, half = reached_by_most(values), reached_by_half(values)
    at_least = {value: sum(each >= value for each in values) for value in values}
    assert most == max(value for value in values if at_least[value] >= quorum(values))
    assert half == max(value for value in values if 2 * at_least[value] >= len(values))
