"""Who was started again is excused for what it lost; who only says so is not for long."""

from __future__ import annotations

from swarmnet.audit.excuses import EVERY, Excuses
from swarmnet.ids import PeerId

PEER = PeerId("a")


def test_what_a_process_that_has_ended_contributed_is_excused_and_nothing_later() -> None:
    excuses = Excuses()
    assert excuses.holds(PEER, 1, 10, 12) and excuses.holds(PEER, 1, 12, 13) and excuses.holds(PEER, 1, 4, 99)
    assert not excuses.holds(PEER, 1, 13, 15), "it has contributed since it ended"


def test_one_process_of_a_peer_ends_in_sixteen_versions() -> None:
    excuses = Excuses()
    assert excuses.holds(PEER, 1, 10, 12) and excuses.holds(PeerId("b"), 1, 10, 12)
    assert not excuses.holds(PEER, 2, 12, 12 + EVERY - 1)
    assert excuses.holds(PEER, 2, 12 + EVERY - 2, 12 + EVERY)
