"""How long a run stands still after a fault (docs/protocol.md has the table), by `benchmarks/standstill.py`."""

from __future__ import annotations

import pytest
from benchmark_modules import load
from further import further

standstill = load("standstill")
ROWS = {row.name: row for row in standstill.ROWS}

SMALL = [name for name, row in ROWS.items() if row.replicas <= 3]


@pytest.mark.parametrize(
    ("name", "leader", "moment", "seed"),
    [
        # The round is open, and names what the leader had to itself.
        ("kill, three replicas", True, 5 / 6, 5),
        ("hang, three replicas", True, 5 / 6, 6),
        # The stage after asks the hung replica for inputs.
        ("hang, three replicas", False, 1 / 2, 4),
        ("lost machine, two replicas", True, 5 / 6, 6),
        # The replica that wakes says that it is in the step that the others have left.
        ("wake, two replicas", True, 1 / 2, 4),
        *further(
            *(
                (name, leader, number / 3, 1 + number)
                for name in SMALL
                for leader in (True, False)
                for number in range(3)
            )
        ),
    ],
)
def test_a_fault_stops_the_run_no_longer_than_the_table_says(name: str, leader: bool, moment: float, seed: int) -> None:
    row = ROWS[name]
    if row.leader is not None and leader != row.leader:
        pytest.skip("the fault strikes no single replica")
    _, stood_s = standstill.standstill(row, leader=leader, moment=moment, seed=seed)
    assert stood_s <= row.bound_s
