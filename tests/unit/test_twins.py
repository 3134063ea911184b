"""Two processes under one identity: which of them ends, and which of them other peers serve."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from swarmnet.errors import UsageError
from swarmnet.ids import PeerId
from swarmnet.net import twins
from swarmnet.net.limits import REPEATS
from swarmnet.net.twins import SILENT_S, Lives, Twins, gives_way, new_boot_id

PEER = PeerId("peer")
boot_ids = st.integers(1, (1 << 62) - 1)


@given(boot_ids, boot_ids, st.booleans(), st.booleans())
def test_exactly_one_of_two_ends_though_both_decide_alone(a: int, b: int, a_starts: bool, b_starts: bool) -> None:
    assume(a != b)
    ends = [
        gives_way(a, b, clocks_agree=True, starting=a_starts),
        gives_way(b, a, clocks_agree=True, starting=b_starts),
    ]
    assert sorted(ends) == [False, True]


def test_with_clocks_that_differ_only_a_start_ends() -> None:
    for mine, theirs in ((5, 9), (9, 5)):
        assert gives_way(mine, theirs, clocks_agree=False, starting=True)
        assert not gives_way(mine, theirs, clocks_agree=False, starting=False)


def test_a_release_without_boot_ids_started_earlier() -> None:
    assert gives_way(new_boot_id(), 0, clocks_agree=True, starting=True)


def test_a_later_start_has_a_greater_boot_id(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1.8e9]
    monkeypatch.setattr(twins, "wall_time", lambda: now[0])
    first, again = new_boot_id(), new_boot_id()
    now[0] += 1.0
    assert max(first, again) < new_boot_id() < 1 << 62
    assert first != again


def test_the_process_that_has_to_end_says_what_to_do() -> None:
    mine = Twins(9, Path("state/identity.key"))
    mine.met(9, "192.0.2.7:4000")  # itself, by its own address
    mine.check()
    mine.met(5, "192.0.2.7:4000")
    with pytest.raises(UsageError, match=r"at 192\.0\.2\.7:4000 .*another --dir, or delete state/identity\.key"):
        mine.check()


def test_the_process_that_stays_says_so_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    mine = Twins(5, clock=lambda: now[0])
    with caplog.at_level(logging.WARNING, logger="swarmnet"):
        for _ in range(3):
            mine.met(9, "192.0.2.7")
        assert len(caplog.records) == 1 and "identity_in_use" in caplog.text
        now[0] += REPEATS.burst_s
        mine.met(9, "192.0.2.7")
        assert len(caplog.records) == 2
    mine.check()


def test_the_process_that_is_heard_keeps_its_place_until_it_is_silent() -> None:
    lives = Lives()
    assert not lives.another(PEER, 9, 0.0)
    lives.seen(PEER, 5, 0.0)
    assert lives.another(PEER, 9, 1.0) and lives.another(PEER, 0, 1.0) and not lives.another(PEER, 5, 1.0)
    lives.seen(PEER, 9, 1.0)  # the place is taken
    assert lives.another(PEER, 9, SILENT_S) and not lives.another(PEER, 9, SILENT_S + 0.1)
    lives.seen(PEER, 9, SILENT_S + 0.1)
    assert lives.another(PEER, 5, SILENT_S + 1.0)


def test_a_restart_takes_the_place_of_a_process_whose_connection_ended_at_once() -> None:
    lives = Lives()
    lives.seen(PEER, 5, 0.0)
    lives.ended(PEER, 9)  # a link of another process, which had lost its place
    assert lives.another(PEER, 9, 0.0)
    lives.ended(PEER, 5)
    assert not lives.another(PEER, 9, 0.0)


def test_a_release_without_boot_ids_takes_no_place() -> None:
    lives = Lives()
    lives.seen(PEER, 0, 0.0)
    assert not lives.another(PEER, 9, 0.0)
