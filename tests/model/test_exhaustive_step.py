"""Every interleaving of a step between production machines, with one fault of each kind (`step_search`).

Two replicas are searched completely. Of three a slice, and under `--long` 200,000 states and 2,000 runs of each fault.
`pytest -s` prints how many states there are.
"""

from __future__ import annotations

from typing import Any

import pytest
from step_search import TIMERS, Broken, Faults, Search, Setup, search

from swarmnet.messages import Commit
from swarmnet.step.leader import Leader
from swarmnet.step.ledger import ClaimBook
from swarmnet.step.membership import Membership
from swarmnet.step.open_step import RoundPart

LIES_S = 5.0
"""Two replicas of which one lies may wait for as long as it lies: so far in time the search looks."""

ONE_OF_EACH = [Faults(), *(Faults(**{fault: 1}) for fault in Faults._fields if fault != "mutes")]


def searched(setup: Setup, *, cap: int = 100_000, runs: int = 0) -> Search:
    found = search(setup, cap=cap, runs=runs)
    print(found)
    return found


def name_of(faults: Faults) -> str:
    return " ".join(name for name, number in faults._asdict().items() if number) or "none"


@pytest.mark.parametrize("faults", ONE_OF_EACH, ids=name_of)
def test_two_replicas(faults: Faults):
    found = searched(Setup(faults=faults, horizon_s=LIES_S if faults.lies else 60.0))
    assert found.complete and found.ends > 0


@pytest.mark.parametrize("faults", ONE_OF_EACH, ids=name_of)
def test_three_replicas(faults: Faults):
    searched(Setup(replicas=3, steps_before=1, faults=faults), cap=200, runs=1)


@pytest.mark.parametrize("setup", [Setup(stages=2), Setup(together=False), Setup(classes=False)], ids=repr)
def test_other_stages(setup: Setup):
    searched(setup, cap=500)


@pytest.mark.parametrize("contributions", [1, 8, 31])
def test_a_key_that_goes_mute_before_it_votes_holds_up_a_step_for_a_moment(contributions: int):
    """One honest replica and one such key: with a vote of its own the key would cost a long silence in each step."""
    found = searched(Setup(steps_before=1, worked=((1, contributions),), faults=Faults(mutes=1)), cap=5_000)
    assert found.complete and found.longest_s <= 2 * TIMERS.suspect_s


def two_of_four(contributions: int) -> Setup:
    """Two honest replicas, and two keys that have contributed so often and may go mute."""
    stage = {"replicas": 4, "microbatches": 4, "claims": tuple((n, n) for n in range(4)), "steps_before": 1}
    return Setup(**stage, worked=((2, contributions), (3, contributions)), faults=Faults(mutes=2))


def test_as_many_mute_keys_as_honest_replicas_do_not_stop_a_stage():
    """In the search no member says that a stream stands still: a key that goes mute in a round costs a long silence."""
    found = searched(two_of_four(contributions=1), cap=60, runs=2)
    assert found.longest_s <= TIMERS.long_silence_s + TIMERS.settle_s


def test_as_many_mute_voters_as_honest_ones_stop_a_stage():
    with pytest.raises(Broken, match="the step stands still"):
        search(two_of_four(contributions=64), cap=60, runs=2)


def observing(**options: Any) -> Setup:
    """Three replicas, each of which would name another one late than the last leader did; of one numerics class."""
    parts = {"microbatches": 3, "claims": ((0, 0), (1, 1), (2, 2)), "observed": ((0, 1), (1, 2), (2, 0))}
    return Setup(replicas=3, steps_before=1, classes=False, **parts, **options)


@pytest.mark.parametrize("faults", [Faults(), Faults(crashes=1), Faults(suspicions=1)], ids=name_of)
def test_a_replica_with_a_made_up_table_signs_no_second_chain(faults: Faults):
    searched(Setup(replicas=3, steps_before=1, made_up=((0, 1),), faults=faults), cap=200, runs=1)


def test_leaders_that_name_different_peers_late_make_one_chain():
    searched(observing(faults=Faults(silences=1)), cap=200, runs=4)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("faults", ONE_OF_EACH, ids=name_of)
def test_leaders_that_name_different_peers_late_for_long(faults: Faults):
    searched(observing(faults=faults), cap=40_000, runs=500)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("faults", ONE_OF_EACH, ids=name_of)
def test_three_replicas_for_long(faults: Faults, steps_before: int):
    found = searched(Setup(replicas=3, steps_before=steps_before, faults=faults), cap=200_000, runs=2_000)
    assert found.complete or found.states >= 200_000


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "setup",
    [
        *(Setup(steps_before=1, faults=faults, horizon_s=20.0) for faults in ONE_OF_EACH),
        Setup(faults=Faults(crashes=1, silences=1)),
        Setup(stages=2, faults=Faults(crashes=1)),
        Setup(stages=2, faults=Faults(silences=1)),
        Setup(together=False, faults=Faults(crashes=1)),
    ],
    ids=repr,
)
def test_two_replicas_for_long(setup: Setup):
    searched(setup, cap=40_000, runs=200)


# ---------------------------------------------------------------- a rule taken away is found out


def test_a_contribution_that_is_not_checked_makes_a_wrong_aggregate(monkeypatch: pytest.MonkeyPatch):
    join = RoundPart.join

    def heedless(part: RoundPart, account: ClaimBook) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ClaimBook, "accumulated", ClaimBook.assigned)
            return join(part, account)

    monkeypatch.setattr(RoundPart, "join", heedless)
    with pytest.raises(Broken, match="an aggregate of"):
        search(Setup(), cap=20_000)


def test_one_vote_is_no_majority(monkeypatch: pytest.MonkeyPatch):
    def hasty(membership: Membership, commit: Commit, *, without: frozenset[str] = frozenset(), now: float) -> bool:
        return bool(membership._votes_of(commit).keys() - without)

    monkeypatch.setattr(Membership, "certified", hasty)
    with pytest.raises(Broken, match="two commits of one step") as told:
        search(Setup(faults=Faults(suspicions=1)), cap=20_000)
    assert "SUSPECTS" in str(told.value) and "says to" in str(told.value), "the way there, as a conversation"


def test_a_leader_that_never_asks_for_a_lost_report_waits_for_it(monkeypatch: pytest.MonkeyPatch):
    setup = Setup(faults=Faults(losses=1))
    longest_s = search(setup, cap=20_000).longest_s
    assert longest_s <= 2.0
    monkeypatch.setattr(Leader, "_ask", lambda *_: [])
    assert search(Setup(faults=Faults(losses=1)), cap=20_000).longest_s > 10 * longest_s
