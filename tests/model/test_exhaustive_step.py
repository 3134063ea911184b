"""Every interleaving of a step between production machines, with one fault of each kind (`step_search`).

Two replicas are searched completely. Of three a slice, and under `--long` 200,000 states and 2,000 runs of each fault.
`pytest -s` prints how many states there are.
"""

from __future__ import annotations

from typing import Any

import pytest
from step_search import Broken, Faults, Search, Setup, search

from swarmnet.messages import Commit
from swarmnet.step.leader import Leader
from swarmnet.step.ledger import ClaimBook
from swarmnet.step.membership import Membership
from swarmnet.step.open_step import RoundPart

LIES_S = 5.0
"""Two replicas of which one lies may wait for as long as it lies: so far in time the search looks."""

ONE_OF_EACH = [Faults(), *(Faults(**{fault: 1}) for fault in Faults._fields)]


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
