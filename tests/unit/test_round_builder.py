"""How a leader opens rounds: who stands with whom, what it says when it is alone, and who makes good a loss."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable

import pytest

from swarmnet.averaging.grid import grid_of
from swarmnet.ids import Ballot, Chain, Generation, PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.messages import Heartbeat, LineQuality, Stamp
from swarmnet.step.ledger import Ledger
from swarmnet.step.rounds import RoundBuilder, left_alone
from swarmnet.step.view import View

ME = PeerId("p00")
STAMP = Stamp(3, 0, Chain("00" * 32))
PEERS = tuple(PeerId(f"p{place:02}") for place in range(20))


def opening_of(num: int, group_size: int) -> tuple[RoundBuilder, Ledger]:
    ledger = Ledger(num)
    for index, peer in enumerate(PEERS[:num]):
        ledger.claim((peer, Generation(1, 0)), index)
    return RoundBuilder(STAMP, Ballot(1, ME), group_size, itertools.count()), ledger


def test_up_to_group_size_members_are_one_group_in_order() -> None:
    opening, ledger = opening_of(4, 4)
    current = opening.open(PEERS[:4][::-1], ledger)
    assert (current.receivers, current.rows) == (PEERS[:4], ())


@pytest.mark.parametrize("measures", [operator.ne, operator.lt, operator.gt])  # both ends of a pair, or one of them
def test_beyond_it_they_stand_in_a_grid_near_ones_in_a_row(measures: Callable[[PeerId, PeerId], bool]) -> None:
    opening, ledger = opening_of(20, 5)
    site = {peer: place % 4 for place, peer in enumerate(PEERS)}
    for peer in PEERS:
        others = (other for other in PEERS if measures(peer, other))
        trips = tuple((other, 1000 if site[other] == site[peer] else 80_000) for other in others)
        opening.measured(peer, LineQuality(0, trips))
    current = opening.open(PEERS, ledger)
    assert current.rows == (5, 5, 5, 5)
    assert all(len({site[peer] for peer in row}) == 1 for row in grid_of(current).rows)


def test_who_has_come_meanwhile_makes_it_another_grid() -> None:
    opening, ledger = opening_of(16, 4)
    opening.open(PEERS[:16], ledger)
    assert len(grid_of(opening.open(PEERS[:18], ledger)).rows) == 6, "of three, on three axes"


def beat(version: int = 3, *, synced: bool = True, chain: str = "00" * 32) -> Heartbeat:
    return Heartbeat(Stamp(version, 0, Chain(chain)), 1, synced, None)


@pytest.mark.parametrize(
    ("heard", "reason"),
    [
        (beat(synced=False), "p01 has no state yet"),
        (beat(2), "p01 is at version 2"),
        (beat(chain="11" * 32), "p01 is on another chain"),
        (beat(), "p01 has not reported since it was evicted"),
    ],
)
def test_a_sum_with_nobody_is_said_with_its_reason(heard: Heartbeat, reason: str) -> None:
    view = View(ME, 0, Timers())
    assert left_alone(view, STAMP, [ME], now=0.1) is None, "there is nobody"
    view.hear(PEERS[1], heard, now=0.0)
    assert left_alone(view, STAMP, [ME], now=0.1) == reason
    assert left_alone(view, STAMP, [ME, PEERS[1]], now=0.1) is None
    assert left_alone(view, STAMP, [ME], now=60.0) is None, "it is not alive any more"
