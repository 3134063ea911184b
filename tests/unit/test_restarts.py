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


def cases(rate: float = 1.0) -> Cases:
    return Cases(
        PeerId("me"),
        STAGE,
        Identity.generate(),
        cast(Any, Host()),
        microbatches=0.0,
        contributions=rate,
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


def test_a_peer_that_twice_does_not_show_drawn_work_is_late_for_a_while() -> None:
    """The fewer contributions are audited, the fewer absences have drawn work, and the longer each is remembered."""
    for rate in (1.0, 0.25):
        for between, late in ((int(APART / rate) - 1, True), (int(APART / rate), False)):
            mine = cases(rate)
            for step in (10, 12, 25):
                mine.unshown(PEER, step)
            assert not mine.away_often(26), "once"
            mine.unshown(PEER, 10 + between)
            assert mine.away_often(11 + between) == mine.away_often(9 + between + KEPT_OUT) == [PEER] * late
            assert not mine.away_often(10 + between + KEPT_OUT)


def test_a_process_that_has_ended_is_excused_and_counted() -> None:
    mine = cases()
    assert mine.is_excused(PEER, 1, 10, 12) and mine.is_excused(PEER, 2, 40, 44)
    assert mine.away_often(45) == [PEER]


def test_a_rollback_forgets_who_was_away_and_whose_process_had_ended() -> None:
    mine = cases()
    for process in (1, 2, 3):
        assert mine.is_excused(PEER, process, 20 * process, 20 * process + 1)
    assert mine.away_often(61) == [PEER]
    apply(mine, 5, {PEER: 1}, rollback=1)
    assert not mine.away_often(6) and mine.is_excused(PEER, 1, 7, 9) and not mine.is_excused(PEER, 1, 10, 11)
