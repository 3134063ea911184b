"""A round id names one set of contributions, whatever becomes of its leader: parts know their round by nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from stage_table import CHAIN, Table

from swarmnet.messages import StateHeader
from swarmnet.step.ledger import round_numbers


def _takes_state_of_its_own_version(table: Table, name: str) -> None:
    """Where steps overlap, who lost a fork of the newest weights begins the oldest step again under the same stamp."""
    table.sums[name] = []
    table.members[name].restored(StateHeader(0, CHAIN, CHAIN, CHAIN), None, (), now=table.now)
    table.do(name)


def _starts_again(table: Table, name: str) -> None:
    table.start(name)


@pytest.mark.parametrize("begin_again", [_takes_state_of_its_own_version, _starts_again])
@pytest.mark.parametrize("leader", ["K", "S"])  # S comes first in order and stands at once, K would wait for its turn
def test_a_leader_that_begins_its_step_again_opens_new_rounds(
    leader: str, begin_again: Callable[[Table, str], None]
) -> None:
    table = Table("A", "B", leader, microbatches=3)
    table.execute("A", 0)
    table.execute(leader, 1, 2)
    before = table.rounds["B"]
    assert before is not None

    begin_again(table, leader)  # while A and B exchange: they have promised its ballot, and see it alive
    table.settle()
    table.tick(1.0)
    assert table.leader == leader, "the others wait for it"
    table.execute("A", 1)
    table.execute(leader, 2)
    table.tick(1.0)

    after = list(table.rounds.values())
    assert all(current is not None and len(current.contributions) == 2 for current in after)
    assert before.id not in {current.id for current in after if current is not None}
    table.finish_all()


def test_numbers_of_two_starts_of_one_identity_differ() -> None:
    one, other = (round_numbers(incarnation) for incarnation in (17, 18))
    assert not {next(one) for _ in range(1000)} & {next(other) for _ in range(1000)}
