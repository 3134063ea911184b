"""Two open steps in one stage's machines: each is claimed, counted and kept by itself, only the oldest is averaged."""

from __future__ import annotations

import pytest
from stage_table import CHAIN, Table, calls_of, certified, has, kind

from swarmnet.ids import Ballot, Chain, PeerId, RoundId
from swarmnet.messages import Commit, Committed, Heartbeat, MemberState, StagePlan, Stamp
from swarmnet.step.member import Member


def overlapping(*names: str, **more: int) -> Table:
    return Table(*names, delay=1, **more)


def through(table: Table, *, of: str = "A", and_of: str = "K") -> None:
    """The oldest step to its end, if its indexes are not at work yet."""
    table.execute(of, 0)
    table.execute(and_of, 1)
    table.finish_all()
    table.apply()


def test_one_index_is_counted_in_each_open_step_by_whoever_claims_it_first():
    table = overlapping("A", "K")
    table.execute("A", 0, step=0)
    table.execute("K", 0, step=1)
    table.execute("A", 1, step=1)
    oldest, newest = table.members["A"].steps
    assert (oldest.claims.accumulated, newest.claims.accumulated) == ({0}, {1})
    assert table.members["K"].steps[1].claims.accumulated == {0}
    assert table.sums == {"A": [0], "K": []} and table.later == {"A": [1], "K": [0]}


def test_a_step_carries_the_chain_of_the_weights_it_is_computed_on():
    table = overlapping("A", "K")
    for version in range(3):
        member = table.members["A"]
        oldest, newest = (step.stamp for step in member.steps)
        assert (oldest.step, newest.step) == (version, version + 1)
        assert (oldest.chain, newest.chain) == (member.before, member.chain)
        assert version > 1 or oldest.chain == CHAIN  # steps 0 and 1 are both computed on what the run begins with
        through(table)


def test_a_ledger_that_is_complete_early_opens_its_round_when_its_step_is_the_oldest():
    table = overlapping("A", "K")
    table.execute("A", 0, 1, step=1)
    table.tick(2.0)
    assert table.rounds == {"A": None, "K": None}
    through(table)
    assert {current.stamp.step for current in table.rounds.values() if current is not None} == {1}
    table.finish_all()
    table.apply()
    assert {member.version for member in table.members.values()} == {2}


def test_what_is_idle_in_the_newest_step_is_ordered_only_when_it_is_the_oldest():
    table = overlapping("A", "K")
    table.execute("A", 0, step=0)
    table.execute("K", 1, step=0)
    table.tick(20.0)
    assert not table.orders()
    table.finish_all()
    table.apply()
    table.tick(4.5)
    assert not table.orders()  # it has as long as any other: from now on
    table.tick(1.5)
    assert sorted(index for _, index in table.orders()) == [0, 1]


def test_a_step_that_is_applied_leaves_the_other_one_as_it_was():
    table = overlapping("A", "K")
    table.claim("A", 0, step=1)
    table.claim("K", 1, step=1)
    table.settle()
    table.add("A", 0, step=1)
    before = table.members["A"].steps[1].claims
    through(table)
    assert table.members["A"].oldest.claims is before and before.accumulated == {0} and table.sums["A"] == [0]
    table.add("K", 1)
    table.settle()
    table.finish_all()


def test_an_eviction_of_one_step_does_not_touch_the_other():
    table = overlapping("A", "K")
    table.execute("A", 0, step=0)
    table.execute("A", 0, step=1)
    member = table.members["A"]
    oldest, newest = member.steps
    closed, before = oldest.claims.generation, newest.claims.generation
    member.receive(PeerId("K"), StagePlan(oldest.stamp, oldest.promised, closed, evicted="discard"), now=table.now)
    table.do("A")
    assert table.sums["A"] == [] and table.later["A"] == [0]
    assert oldest.claims.generation > closed and newest.claims.generation == before
    member.receive(PeerId("K"), StagePlan(newest.stamp, newest.promised, before, evicted="closed"), now=table.now)
    table.do("A")
    assert newest.claims.generation > oldest.claims.generation and table.later["A"] == [0]


def laggard(*others: str) -> Table:
    """A has all of step 1; K and the others have applied step 0, A has not."""
    table = overlapping("A", *others, "K")
    table.execute("A", 0, 1, step=1)
    table.execute("A", 0, step=0)
    table.execute("K", 1, step=0)
    for name in table.members:
        table.finish(name)
    table.settle()
    table.apply(*others, "K")
    return table


def test_a_round_waits_for_a_member_that_has_not_applied_the_step_before():
    table = laggard()
    table.tick(2.0)
    assert table.members["K"].oldest.leader is not None and table.members["K"].oldest.leader.round is None
    table.apply("A")
    assert table.rounds["A"] is not None and table.rounds["A"].stamp.step == 1
    table.finish_all()


def test_a_member_that_stays_behind_for_very_long_is_left_there():
    table = laggard("B")
    table.tick(17.0)
    assert table.notes().count("evicted") == 1
    assert {name for name, _ in table.orders()} <= {"B", "K"} and table.later["A"] == []
    table.execute("K", 0, 1)  # A reports all the while, and owns nothing any more
    table.finish("B")
    table.finish("K")
    table.settle()
    table.apply("B", "K")
    assert table.members["K"].version == 2 and table.members["A"].version == 0
    table.apply("A")
    table.tick(0.5)
    table.collect("A")
    table.settle()
    table.apply("A")
    assert table.members["A"].chain == table.members["K"].chain


def test_of_two_the_one_that_went_on_alone_waits_a_long_silence_for_a_word_of_the_other():
    """A lives, and so may hold another sum of the step; whoever does not say so for so long does not."""
    table = laggard()
    table.tick(17.0)
    table.execute("K", 0, 1)
    table.finish("K")
    table.settle()
    table.members["K"].membership.patience_s = 0.0  # as where steps are short
    table.tick(14.0)
    assert "K" not in table.applies
    table.tick(2.0)
    assert "K" in table.applies


def test_a_laggard_hears_the_commits_of_both_its_steps_and_applies_one_after_the_other():
    table = overlapping("A", "K", stages=2)
    member = table.members["A"]
    table.execute("A", 0, step=0)
    table.execute("K", 1, step=0)
    table.finish("A")
    table.finish("K")
    table.settle()
    mine = member.oldest.barrier.of(0)
    assert mine is not None and not table.applies
    table.neighbour("X")
    later = certified(Commit(1, 1, CHAIN, RoundId(Ballot(0, PeerId("X")), 0), b"x" * 32, 2, 0.0, 1.0), "X")
    member.receive(PeerId("X"), Committed(later), now=table.now)
    table.do("A")
    assert member.steps[1].barrier.of(1) == later
    first = certified(Commit(1, 0, CHAIN, later.id, b"y" * 32, 2, 0.0, 1.0), "X")
    member.receive(PeerId("X"), Committed(first), now=table.now)
    table.do("A")
    table.apply("A")
    assert member.version == 1 and member.oldest.barrier.of(1) == later and not member.oldest.applying


def test_a_leader_of_a_step_that_opens_next_is_remembered():
    table = overlapping("A", "B")
    member = table.members["A"]
    table.execute("A", 0, step=0)
    table.execute("B", 1, step=0)
    table.finish_all()
    table.apply("B")
    early = table.members["B"].steps[1].stamp
    member.receive(PeerId("B"), StagePlan(early, Ballot(5, PeerId("B"))), now=table.now)
    table.do("A")
    assert early.step == 2
    table.apply("A")
    assert member.steps[1].promised == Ballot(5, PeerId("B"))


def test_messages_find_their_step_by_the_whole_stamp():
    table = overlapping("A", "K")
    member = table.members["A"]
    newest = member.steps[1]
    wrong = (Stamp(1, 0, CHAIN.replace("1", "2")), Stamp(2, 0, CHAIN), Stamp(1, 1, CHAIN))
    for stamp in wrong:
        member.receive(PeerId("K"), StagePlan(stamp, newest.promised, execute=frozenset({0})), now=table.now)
        table.do("A")
    assert not table.orders()
    member.receive(PeerId("K"), StagePlan(newest.stamp, newest.promised, execute=frozenset({0})), now=table.now)
    table.do("A")
    assert [call.args for _, call in table.did if call.name == "execute"] == [(1, 0)]


def resyncs(member: Member) -> bool:
    return any(call.name == "resync" for call in calls_of(member.calls))


def test_forks_share_the_step_that_is_computed_on_what_they_share():
    """Replicas that applied different sums of step 0 still count step 1 together: its weights are the same."""
    table = overlapping("A", "B", "K")
    through(table)
    member = table.members["A"]
    fork = Heartbeat(Stamp(1, 0, CHAIN.replace("1", "f")), 7, True, None, before=CHAIN)
    yields = []
    for mate in ("F", "B", "K"):
        member.receive(PeerId(mate), fork, now=table.now)
        yields.append(resyncs(member))
    assert yields == [False, False, True], "F does not count, and B alone is no more than A and K"
    for place, shared in enumerate((True, False)):
        (name,) = [name for name, member in table.members.items() if member.steps[place].leader is not None]
        table.members[name].receive(PeerId("F"), fork, now=table.now)
        at_step = table.members[name].steps[place].leader._at_step
        at_step.look(table.now)
        assert ("F" in at_step.live) is shared


def test_who_loses_a_fork_keeps_the_sum_of_the_shared_step_until_it_is_applied():
    """Its leader has counted on that sum being here, and may have told other stages so."""
    table = overlapping("A", "B", "K")

    def hears_of_a_fork(*, before: str) -> bool:
        beat = Heartbeat(Stamp(table.members["A"].version, 0, Chain("f" * 64)), 7, True, None, before=Chain(before))
        for mate in ("B", "K"):
            table.members["A"].receive(PeerId(mate), beat, now=table.now)
        return resyncs(table.members["A"])

    through(table)
    table.execute("A", 0)
    table.execute("K", 1)
    table.finish("A")
    assert not hears_of_a_fork(before=CHAIN)
    table.settle()
    table.finish("B")
    table.finish("K")
    table.settle()
    table.apply()
    assert table.members["A"].version == 2 and hears_of_a_fork(before="e" * 64)


def test_work_on_the_older_step_is_progress_of_the_newer():
    table = overlapping("A", "K")
    table.execute("A", 0, step=0)
    assert [step.progress for step in table.members["A"].steps] == [1, 1]
    table.execute("A", 0, step=1)
    assert [step.progress for step in table.members["A"].steps] == [1, 2]


@pytest.mark.parametrize("finished", [False, True])
def test_state_of_a_version_opens_both_its_steps(finished: bool):
    """A sum that its stage has not committed is not taken with it: the donor may have made it up."""
    table = overlapping("A", "K")
    through(table)
    kept = table.members["K"]
    table.execute("A", 0)
    table.execute("K", 1)
    whole = table.finish("K") if finished else None
    table.start("A")
    member = table.members["A"]
    member.restored(kept.header, whole, (), now=table.now)
    table.do("A")
    assert [step.stamp for step in member.steps] == [step.stamp for step in kept.steps]
    assert member.oldest.finished is None and member.steps[1].finished is None


def test_reports_of_each_step_go_to_its_leader():
    table = overlapping("A", "K")
    table.tick(0.5)
    beats = table.take(lambda *entry: kind(MemberState)(*entry) or has("attempt")(*entry))
    assert beats == []
    table.members["A"].tick(now=table.now)
    table.do("A")
    told = [message for _, peer, message in table.take(kind(MemberState)) if peer == "K"]
    assert sorted(message.stamp.step for message in told) == [0, 1]
