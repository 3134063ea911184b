"""A line that is broken between two members costs one step: in the next ones neither reduces anything."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage_table import CHAIN

from swarmnet.averaging.grid import cutting_of, groups
from swarmnet.averaging.parts import shares
from swarmnet.ids import Ballot, Generation, PeerId
from swarmnet.messages import LineQuality, Round, Stamp
from swarmnet.step.ledger import Ledger
from swarmnet.step.lines import BrokenLines, broken_lines
from swarmnet.step.rounds import RoundBuilder

PEERS = A, B, C, D = tuple(PeerId(name) for name in "ABCD")


def opened(members: tuple[PeerId, ...], bandwidths: dict[PeerId, int], apart: frozenset[PeerId], turns: int) -> Round:
    ballot, ledger = Ballot(1, members[0]), Ledger(len(members))
    for place, peer in enumerate(members):
        ledger.enter((peer, Generation(1, 0)), frozenset({place}))
    opening = RoundBuilder(Stamp(3, 0, CHAIN), ballot, 16, itertools.count())
    for peer, bandwidth in bandwidths.items():
        opening.measured(peer, LineQuality(bandwidth))
    for _ in range(turns):
        opening.turn()
    return opening.open(members, ledger, apart)


def test_a_broken_line_is_remembered_for_some_steps() -> None:
    lines = BrokenLines()
    assert lines.apart(PEERS, {}, step=3) == frozenset()
    lines.broken(C, [D], step=3)
    assert lines.apart(PEERS, {}, step=3) == lines.apart(PEERS, {}, step=67) == {C, D}
    assert lines.apart(PEERS, {}, step=68) == frozenset(), "it is tried again"
    assert lines.apart((A, B, C), {}, step=4) == frozenset(), "who is not there keeps nobody apart"
    assert lines.apart((A, C, D), {}, step=4) == {C, D} and lines.apart((C, D), {}, step=4) == frozenset()


def test_a_line_that_breaks_again_is_remembered_for_twice_as_long() -> None:
    lines = BrokenLines()
    for step, lasts in ((0, 64), (65, 128), (200, 256), (500, 256), (2000, 64)):
        lines.broken(A, [B], step=step)
        lines.broken(A, [B], step=step)
        assert lines.apart(PEERS, {}, step=step + lasts) == {A, B}
        assert lines.apart(PEERS, {}, step=step + lasts + 1) == frozenset(), (step, lasts)


def test_of_two_ends_the_one_with_more_broken_lines_is_at_fault() -> None:
    lines = BrokenLines()
    assert lines.broken(A, [B], step=0) is None, "either may be"
    assert lines.broken(A, [B], step=1) is None, "the same line says no more"
    assert lines.broken(C, [B], step=2) == B
    assert lines.broken(A, [C, D], step=300) == A, "who names two at once"
    assert lines.broken(B, [D], step=900) is None, "what was before is forgotten"


def test_a_broken_line_counts_for_both_ends_and_who_names_many_for_itself_alone() -> None:
    a, b, d = (PeerId(name) for name in "abd")

    def broken(*, without: str = "", until: float = 5.0, **said: str) -> dict[PeerId, int]:
        claims = {PeerId(one): {PeerId(other): 5.0 for other in others} for one, others in said.items()}
        return dict(broken_lines(claims, frozenset(map(PeerId, without)), until))

    assert broken(a="b", b="a", c="") == {a: 1, b: 1}, "one line, by the word of both"
    assert broken(a="d", b="d", d="ab") == broken(a="d", b="d") == {a: 1, b: 1, d: 2}
    assert broken(a="d", b="d", d="ab", without="d") == {}, "d sits out: its lines put nobody behind"
    assert broken(d="abc") == {d: 3}, "a liar that names all comes last itself"
    assert broken(a="d", until=4.9) == {}, "not all have heard it yet"


def test_a_quarter_of_the_members_reduces_whatever_is_said_and_the_latest_pairs_count() -> None:
    lines = BrokenLines()
    for step, (one, other) in enumerate(itertools.combinations(PEERS, 2)):
        lines.broken(one, [other], step=step)
    assert lines.apart(PEERS, {}, step=6) == {B, C, D}
    for number in range(100):
        lines.broken(A, [PeerId(f"p{number}")], step=7)
    assert len(lines._broken) <= 64 and lines.apart(PEERS, {}, step=8) == frozenset()


def test_who_cannot_call_a_mate_says_so_and_neither_reduces() -> None:
    lines = BrokenLines()
    assert lines.apart(PEERS, {A: (B,)}, step=3) == lines.apart((A, B, C), {A: (B,)}, step=3) == {A, B}
    assert lines.apart((A, B), {A: (B,)}, step=3) == frozenset(), "somebody must reduce"
    assert lines.apart(PEERS, {A: (B, C, D), C: (D,)}, step=3) == {C, D}, "who names many is at fault itself"
    assert lines.apart(PEERS, {A: (B,), D: (A,)}, step=3) == {A, B, D}
    lines.broken(B, [C], step=3)
    assert lines.apart(PEERS, {A: (D,)}, step=3) == {B, C}, "what broke in a round comes first"


@given(st.lists(st.integers(1, 10**9), min_size=3, max_size=16), st.booleans(), st.data())
def test_members_that_are_kept_apart_exchange_nothing(rates: list[int], measured: bool, data: st.DataObject) -> None:
    members = tuple(PeerId(f"p{place:02}") for place in range(len(rates)))
    most = max(2, len(members) // 2)
    apart = frozenset(data.draw(st.sets(st.sampled_from(members), min_size=2, max_size=most)))
    rates = [max(rate, 100) for rate in rates]
    current = opened(members, dict(zip(members, rates, strict=True)) if measured else {}, apart, 0)
    cut = dict(zip(current.receivers, shares(current.bandwidths), strict=True))
    assert {peer for peer in apart if cut[peer]} == set() and sum(cut.values()) == 1
    span = 0, 1 << 20
    for group in groups(members[0], current, span, cutting_of(current, members, span, 16, 1, 8.0)):
        assert not apart & {peer for peer, _ in group.chunks} and len(group.speakers) == len(members)


@pytest.mark.parametrize("turns", [1, 3])
def test_a_round_that_is_cut_again_in_a_dispute_is_cut_evenly(turns: int) -> None:
    assert not opened(PEERS, {}, frozenset({C, D}), turns).bandwidths
    assert set(opened(PEERS, {A: 500}, frozenset({C, D}), turns).bandwidths) == {500}
