"""Who was started again is excused for what it lost; who only says so is not for long."""

from __future__ import annotations

from typing import Any, cast

from swarmnet.audit.cases import EVERY, Cases
from swarmnet.ids import PeerId
from swarmnet.net.identity import Identity

PEER = PeerId("a")


def cases() -> Cases:
    return Cases(
        PeerId("me"),
        0,
        Identity.generate(),
        cast(Any, None),
        microbatches=0.1,
        contributions=0.1,
        numerics=str,
        operator=str,
        voters=lambda stage: frozenset(),
    )


def test_what_a_process_that_has_ended_contributed_is_excused_and_nothing_later() -> None:
    mine = cases()
    assert mine.is_excused(PEER, 1, 10, 12) and mine.is_excused(PEER, 1, 12, 13) and mine.is_excused(PEER, 1, 4, 99)
    assert not mine.is_excused(PEER, 1, 13, 15), "it has contributed since it ended"


def test_one_process_of_a_peer_ends_in_sixteen_versions() -> None:
    mine = cases()
    assert mine.is_excused(PEER, 1, 10, 12) and mine.is_excused(PeerId("b"), 1, 10, 12)
    assert not mine.is_excused(PEER, 2, 12, 12 + EVERY - 1)
    assert mine.is_excused(PEER, 2, 12 + EVERY - 2, 12 + EVERY)
