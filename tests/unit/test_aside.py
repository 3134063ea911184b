"""Who is asked for nothing for a while: liars at all, those who were late only while there is somebody else."""

from __future__ import annotations

from swarmnet.ids import PeerId
from swarmnet.state.snapshot_fetch import ASIDE_S, Aside

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def test_who_was_late_is_skipped_for_a_minute() -> None:
    aside = Aside()
    aside.late(B, now=100.0)
    assert aside.asked([A, B, C, A], now=100.0) == [A, C]
    assert aside.asked([A, B, C], now=99.9 + ASIDE_S) == [A, C]
    assert aside.asked([A, B, C], now=100.0 + ASIDE_S) == [A, B, C]


def test_if_nobody_else_is_left_those_who_were_late_are_asked() -> None:
    aside = Aside()
    aside.late(A, now=0.0)
    aside.late(B, now=0.0)
    assert aside.asked([A, B], now=1.0) == [A, B]


def test_who_answers_again_is_late_no_more() -> None:
    aside = Aside()
    aside.late(A, now=0.0)
    aside.answered(A)
    assert aside.asked([A, B], now=1.0) == [A, B]


def test_a_liar_is_not_asked_even_if_nobody_else_is_left() -> None:
    aside = Aside()
    aside.lied(A, now=0.0)
    aside.late(B, now=0.0)
    assert aside.asked([A], now=1.0) == []
    assert aside.asked([A, B], now=1.0) == [B]
    assert aside.asked([A, B], now=ASIDE_S) == [A, B]
