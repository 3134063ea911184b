"""A member whose sums are lost with the ranks that held them: at whatever moment, every index is counted once."""

from __future__ import annotations

import pytest
from stage_table import TIMERS, Table, calls_of, certified, has, kind

from swarmnet.ids import PeerId
from swarmnet.messages import UNMEASURED, Commit, Committed, MemberState


def lose(table: Table, name: str) -> None:
    """The ranks of `name` die: what its accumulators held is gone before its machine hears of it.

    Whoever exchanges with it finds that its stream breaks whenever it is asked for.
    """
    table.sums[name].clear()
    table.later[name].clear()
    table.members[name].sums_lost()
    table.do(name)
    for other, member in table.members.items():
        if other != name:
            member.feel(UNMEASURED, None, {}, {PeerId(name): True})


def ends(table: Table) -> None:
    """The step is done again where it must be, and ends."""
    table.settle()
    table.work_until_summed()
    table.finish_all()


@pytest.mark.parametrize("name", ["A", "K"])
def test_what_was_only_granted_is_executed_again(name: str) -> None:
    table = Table("A", "K")
    table.claim(name, 0)
    table.settle()
    generation = table.members[name].oldest.claims.generation
    lose(table, name)
    assert table.members[name].oldest.claims.generation > generation and not table.members[name].oldest.claims.assigned
    ends(table)


@pytest.mark.parametrize("name", ["A", "K"])
def test_what_was_summed_is_executed_again(name: str) -> None:
    table = Table("A", "K", microbatches=3)
    table.execute(name, 0, 1)
    lose(table, name)
    ends(table)


def test_a_grant_under_way_counts_for_nobody() -> None:
    table = Table("A", "K")
    table.claim("A", 0)
    table.settle(lambda sender, receiver, message: receiver == "K")
    lose(table, "A")  # the grant of the old generation arrives later
    ends(table)


@pytest.mark.parametrize("name", ["A", "K"])
def test_a_round_without_it_follows(name: str) -> None:
    table = Table("A", "B", "K", microbatches=3)
    for member, index in (("A", 0), ("B", 1), ("K", 2)):
        table.execute(member, index)
    before = table.rounds[name]
    assert before is not None
    lose(table, name)
    assert table.rounds[name] is None, "it must contribute nothing to that round any more"
    ends(table)
    assert table.rounds[name] != before


@pytest.mark.parametrize("name", ["A", "K"])
def test_a_sum_that_most_have_signed_stands(name: str) -> None:
    table = Table("A", "B", "K", microbatches=3)
    for member, index in (("A", 0), ("B", 1), ("K", 2)):
        table.execute(member, index)
    others = [other for other in table.members if other != name]
    first, second = [table.finish(other) for other in others]
    assert first == second
    lose(table, name)
    table.settle()
    table.tick(TIMERS.suspect_s + 1.0)  # so long they wait for who lacks it
    table.collect(name)
    table.settle()
    assert {member.oldest.finished for member in table.members.values()} == {first}
    assert sorted(table.applies) == sorted(table.members)


@pytest.mark.parametrize("name", ["A", "K"])
def test_a_sum_that_too_few_have_signed_is_made_again(name: str) -> None:
    table = Table("A", "B", "K", microbatches=3)
    for member, index in (("A", 0), ("B", 1), ("K", 2)):
        table.execute(member, index)
    finished = table.finish("B")
    lose(table, name)
    table.settle()
    table.tick(TIMERS.suspect_s + 1.0)  # so long it might still have been whole elsewhere
    ends(table)
    assert finished not in {member.oldest.finished for member in table.members.values()}


@pytest.mark.parametrize("name", ["A", "K"])
def test_a_whole_sum_here_is_not_lost_with_what_it_came_from(name: str) -> None:
    """It waits for commits of other stages."""
    table = Table("A", "K", stages=2)
    table.execute("A", 0)
    table.execute("K", 1)
    (finished,) = {table.finish(each) for each in table.members}
    table.take(kind(MemberState))  # nobody has heard of it
    lose(table, name)
    table.settle()
    table.tick()
    commits = {member.oldest.barrier.of(0) for member in table.members.values()}
    assert {commit and commit.id for commit in commits} == {finished.id}
    assert not table.applies
    table.neighbour("Z")
    theirs = certified(Commit(1, 0, table.members["A"].chain, finished.id, b"", 2, 0.0, 1.0), "Z")
    for member in table.members.values():
        message = Committed(theirs, member.restart)
        member.receive(PeerId("Z"), message, now=table.now)
        table.do(str(member.me))
    assert sorted(table.applies) == ["A", "K"]


def test_while_weights_move_nothing_is_begun_again() -> None:
    table = Table("A", "K")
    table.execute("A", 0)
    table.execute("K", 1)
    table.finish_all()
    generation = table.members["A"].oldest.claims.generation
    table.members["A"].sums_lost()
    assert not table.members["A"].calls.calls
    assert table.members["A"].oldest.claims.generation == generation
    table.apply()
    assert {member.version for member in table.members.values()} == {1}


@pytest.mark.parametrize("name", ["A", "K"])
def test_where_steps_overlap_all_open_ones_begin_again(name: str) -> None:
    table = Table("A", "K", delay=1)
    first, second = (step.stamp.step for step in table.members[name].steps)
    table.execute("A", 0)
    table.execute("K", 1)
    table.execute(name, 0, 1, step=second)
    assert table.rounds[name] is not None
    lose(table, name)
    assert all(not step.claims.assigned for step in table.members[name].steps)
    ends(table)
    assert first == 0 and table.members[name].oldest.applying


def test_an_applying_step_leaves_the_next_one_to_begin_again() -> None:
    table = Table("A", "K", delay=1)
    table.execute("A", 0)
    table.execute("K", 1)
    table.execute("A", 0, step=1)
    table.finish_all()
    table.later["A"].clear()
    table.members["A"].sums_lost()
    assert [call.args for call in table.do("A") if call.name == "discard"] == [(1,)]
    table.settle()
    table.apply()
    ends(table)


def test_what_is_discard_says_whether_it_was_lost_or_does_not_count() -> None:
    """What a codec owes from earlier steps is discarded with the second only."""
    table = Table("A", "K", delay=1)
    table.execute("A", 0)
    member = table.members["A"]
    member.sums_lost()
    assert [call.args for call in calls_of(member.calls) if call.name == "discard"] == [(0,), (1,)]
    member.add(0, 1)  # nobody has granted it
    assert [call.args for call in calls_of(member.calls) if call.name == "discard"] == [(0,)]


def test_a_round_that_names_the_lost_generation_gets_nothing() -> None:
    """The leader opens it before it has heard."""
    table = Table("A", "K")
    table.execute("A", 0)
    table.claim("K", 1)
    table.settle()
    lose(table, "A")
    reports = table.take(lambda sender, receiver, message: isinstance(message, MemberState) and sender == "A")
    table.add("K", 1)
    table.settle(has("attempt"))
    assert table.rounds["A"] is None
    table.put(reports)
    ends(table)
