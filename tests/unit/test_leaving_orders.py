"""A leader hands idle work to whoever stays, and to those who leave only if nobody else is there."""

from __future__ import annotations

import pytest
from test_leader import ME, STAMP, B, C, Office

from swarmnet.ids import PeerId
from swarmnet.messages import Heartbeat, StagePlan


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
    calls = office.advance(now=10.0)  # nothing has flowed for long
    sent = [call.args for call in calls if call.name == "send"]
    orders = [peer for peer, plan in sent if isinstance(plan, StagePlan) for _ in plan.execute]
    assert len(orders) == 6 and set(orders) == expected
