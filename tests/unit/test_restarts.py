"""A process that has ended need not show its work, so a peer whose processes end too often contributes no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from audit_stage import STAGE, finished_of, stamp_of

from swarmnet.audit.cases import APART, KEPT_OUT, Cases
from swarmnet.ids import NO_CHAIN, Generation, PeerId, Restart
from swarmnet.net.identity import Identity

PEER, OTHER = PeerId("a"), PeerId("b")


class Host:
    def vouch(self, decided: object) -> None:
        pass


def cases() -> Cases:
    return Cases(
        PeerId("me"),
        STAGE,
        Identity.generate(),
        cast(Any, Host()),
        microbatches=0.1,
        contributions=0.1,
        numerics=str,
        operator=str,
        voters=lambda stage: frozenset(),
    )


def apply(mine: Cases, step: int, processes: Mapping[PeerId, int], *, rollback: int = 0) -> None:
    """All have contributed to that step, each in the process of that number."""
    finished = finished_of(step, processes)
    shares = tuple((peer, Generation(processes[peer], 0), indexes) for peer, _, indexes in finished.contributions)
    stamp = replace(stamp_of(step), restart=Restart(number=rollback, version=0))
    mine.applied(stamp, replace(finished, contributions=shares), (), NO_CHAIN, frozenset())


def test_work_that_a_process_contributed_before_its_end_is_excused_and_later_work_is_not() -> None:
    mine = cases()
    assert mine.is_excused(PEER, 1, 10, 12) and mine.is_excused(PEER, 1, 12, 13) and mine.is_excused(PEER, 1, 4, 99)
    assert not mine.is_excused(PEER, 1, 13, 15), "it has contributed since it ended"


def test_a_peer_that_restarts_twice_within_some_steps_is_late_for_a_while() -> None:
    mine = cases()
    apply(mine, 0, {PEER: 1, OTHER: 1})
    apply(mine, 20, {PEER: 2, OTHER: 1})
    assert not mine.restart_often(21)
    apply(mine, 19 + APART, {PEER: 3, OTHER: 2})
    assert mine.restart_often(19 + APART + KEPT_OUT - 1) == [PEER]
    assert not mine.restart_often(19 + APART + KEPT_OUT)


def test_a_peer_that_restarts_less_often_is_never_late() -> None:
    mine = cases()
    for process in range(6):
        for step in (process * APART, process * APART + 1, (process + 1) * APART - 1):
            apply(mine, step, {PEER: process, OTHER: 1})
            assert not mine.restart_often(step + 1)


def test_a_rollback_forgets_restarts() -> None:
    mine = cases()
    for process in (1, 2, 3):
        apply(mine, 10 * process, {PEER: process})
    assert mine.restart_often(31) == [PEER]
    apply(mine, 5, {PEER: 4}, rollback=1)
    assert not mine.restart_often(6)
