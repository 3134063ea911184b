"""Who feeds what: shares cover a step once, and who brings nothing has none for a while."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.ids import PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.trainer.shares import FedShares

ALL = [PeerId(f"trainer{number}") for number in range(4)]
ME, OTHER, PHANTOM = ALL[:3]
TIMERS = Timers()


def shares(me: PeerId = ME) -> FedShares:
    return FedShares(me, TIMERS)


@given(st.integers(1, 4), st.integers(0, 1000), st.integers(1, 40))
def test_shares_cover_a_step_once(count: int, step: int, size: int) -> None:
    trainers = ALL[:count]
    fed = [index for me in trainers for index in shares(me).of(trainers, step, size, now=0.0)]
    assert sorted(fed) == list(range(size))


def test_a_step_is_late_after_twice_its_usual_time() -> None:
    mine = shares()
    assert mine.patience_s() == TIMERS.suspect_s
    for took_s in (10.0, 2.0, 4.0):
        mine.brought([OTHER], took_s=took_s)
    assert mine.patience_s() == 8.0
    for _ in range(9):
        mine.brought([OTHER], took_s=0.1)
    assert mine.patience_s() == TIMERS.beat_s


def test_who_leaves_two_steps_undone_has_no_share_for_a_minute_and_then_for_two() -> None:
    mine, trainers = shares(), [ME, OTHER]
    assert mine.missed([OTHER], now=0.0) == []
    mine.brought([OTHER], took_s=1.0)
    assert mine.missed([OTHER], now=1.0) == [], "not two in a row"
    assert mine.missed([OTHER], now=2.0) == [OTHER]
    assert mine.feeding(trainers, now=61.9) == [ME]
    assert sorted(mine.of(trainers, 7, 9, now=61.9)) == list(range(9))
    assert mine.feeding(trainers, now=62.0) == trainers
    assert mine.missed([OTHER], now=70.0) == [OTHER]
    assert mine.feeding(trainers, now=189.9) == [ME] and mine.feeding(trainers, now=190.0) == trainers
    mine.brought([OTHER], took_s=1.0)
    for now in (1e6, 1e6 + 1):
        mine.missed([OTHER], now=now)
    assert mine.feeding(trainers, now=1e6 + 61) == trainers, "it has fed since: a minute again"


def test_identities_of_a_liar_are_forgotten() -> None:
    mine = shares()
    for number in range(2000):
        mine.missed([PeerId(f"phantom{number}")] * 2, now=float(number))
    assert len(mine._misses) == len(mine._left_out) == 256


def test_two_that_leave_each_other_out_begin_with_their_own() -> None:
    """With a phantom beside them neither knows who is missing, and both feed all."""
    orders = []
    for me, other in ((ME, OTHER), (OTHER, ME)):
        mine = shares(me)
        for _ in range(2):
            mine.missed([other, PHANTOM], now=0.0)
        orders.append(mine.of([ME, OTHER, PHANTOM], 3, 60, now=1.0))
    one, two = orders
    assert sorted(one) == sorted(two) == list(range(60))
    assert not set(one[:10]) & set(two[:10])
