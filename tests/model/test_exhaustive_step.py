"""Every interleaving of a step between production machines: no wrong sum, no fork without a fault, always a way out.

What a cap leaves open is said by the search (`pytest -s`), and a sample of it is run to its end.
"""

from __future__ import annotations

import pytest
from further import further
from step_search import Broken, Setup, search

from swarmnet.step.keeper import Keeper
from swarmnet.step.open_step import RoundPart


def test_two_replicas_every_interleaving():
    found = search(Setup(), cap=20_000)
    print(found)
    assert found.open == 0 and found.ends > 0
    assert (found.stuck, found.forks) == (0, 0), found.story


def test_two_replicas_and_a_crash_every_interleaving():
    found = search(Setup(crashes=1), cap=20_000)
    print(found)
    assert found.open == 0 and found.ends > 0
    assert (found.stuck, found.forks) == (0, 0), found.story


@pytest.mark.parametrize(
    "setup",
    [Setup(silences=1), *further(Setup(replicas=3)), Setup(stages=2), *further(Setup(together=False))],
    ids=["silence", "three replicas", "two stages", "each begins alone"],
)
def test_the_first_states(setup: Setup):
    found = search(setup, cap=1_000, follow=6)
    print(found)
    assert found.stuck == 0, found.story


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "setup",
    [
        Setup(silences=1),
        Setup(silences=1, crashes=1),
        Setup(replicas=3),
        Setup(replicas=3, crashes=1),
        Setup(stages=2),
        Setup(stages=2, crashes=1),
        Setup(stages=2, silences=1),
        Setup(together=False),
        Setup(together=False, crashes=1),
    ],
    ids=repr,
)
def test_many_states(setup: Setup):
    found = search(setup, cap=40_000, follow=200)
    print(found)
    assert found.stuck == 0, found.story


def test_a_contribution_that_is_not_checked_makes_a_wrong_sum(monkeypatch: pytest.MonkeyPatch):
    join = RoundPart.join

    def heedless(part, account):
        summed = account.summed
        account.summed = set(account.granted)
        try:
            return join(part, account)
        finally:
            account.summed = summed

    monkeypatch.setattr(RoundPart, "join", heedless)
    monkeypatch.setattr(Keeper, "_evict_lost", lambda keeper, live, now: [])
    with pytest.raises(Broken, match="a sum of"):
        search(Setup(), cap=20_000)
