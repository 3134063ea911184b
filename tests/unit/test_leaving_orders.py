"""A keeper hands idle work to whoever stays, and to those who leave only if nobody else is there."""

from __future__ import annotations

import pytest
from test_keeper import ME, STAMP, B, C, Office

from swarmnet.ids import PeerId
from swarmnet.messages import Heartbeat, StagePlan
from swarmnet.step.actions import Send


@pytest.mark.parametrize(
    ("leaving", "expected"),
    [(set(), {ME, B, C}), ({B}, {ME, C}), ({ME}, {B, C}), ({ME, B}, {C}), ({ME, B, C}, {ME, B, C})],
)
def test_orders_go_to_those_who_stay(leaving: set[PeerId], expected: set[PeerId]) -> None:
    office = Office(B, C, microbatches=6)
    office.everybody_reports(B, C)
    office.view.draining = ME in leaving
    for mate in (B, C):
        office.view.hear(mate, Heartbeat(STAMP, 1, True, None, draining=mate in leaving), now=9.0)
    actions = office.keeper.advance(now=10.0, resend=False)  # nothing has flowed for long
    plans = [(action.peer, action.message) for action in actions if isinstance(action, Send)]
    orders = [peer for peer, plan in plans if isinstance(plan, StagePlan) for _ in plan.execute]
    assert len(orders) == 6 and set(orders) == expected
