"""Which member a leader goes on without, by the graph of suspect reports (`step.suspects`)."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.ids import Ballot, PeerId, RoundId
from swarmnet.messages import NONE, Late, Trouble
from swarmnet.step.lines import BrokenLines
from swarmnet.step.suspects import CutAgain, Leave, SuspectGraph

EIGHT = A, B, C, D, E, F, G, H = tuple(PeerId(name) for name in "ABCDEFGH")
BALLOT = Ballot(1, A)
PATIENCE_S = 3.0


def number(place: int) -> RoundId:
    return RoundId(BALLOT, place)


class Stage:
    """The leader A and the members of its one group, who have all summed what they own."""

    def __init__(self, *members: PeerId, lines: BrokenLines | None = None, step: int = 3) -> None:
        self.members, self.step = frozenset(members), step
        self.lines = lines or BrokenLines()
        self.graph = SuspectGraph(A, patience_s=lambda _: PATIENCE_S, links=self.lines)
        self.rounds = itertools.count()
        self.open(0.0)
        for member in members:
            self.says(member, now=0.0)

    def open(self, now: float) -> None:
        self.round = number(next(self.rounds))
        self.graph.opened(self.round, now=now)

    def says(
        self,
        peer: PeerId,
        *,
        late: tuple[PeerId, ...] = (),
        refused: tuple[PeerId, ...] = (),
        owes: bool = True,
        now: float,
        owned: frozenset[int] = NONE,
        of: RoundId | None = None,
        allowed_s: float = 10.0,
    ) -> None:
        found = tuple(Late(each, owes, allowed_s) for each in late)
        trouble = Trouble(of or self.round, found, refused) if late or refused else None
        self.graph.hear(peer, trouble, len(owned), now=now)

    def decision(self, now: float) -> Leave | CutAgain | None:
        return self.graph.decide([self.members], step=self.step, now=now)


def test_the_member_of_most_edges_is_left_out_once_it_has_had_its_time() -> None:
    stage = Stage(A, B, C, D)
    for peer in (B, C):
        stage.says(peer, late=(D,), now=9.0)
    assert stage.decision(9.0) is None, "its link explains ten seconds"
    assert stage.decision(11.0) is None, "whoever is reported may report others"
    assert stage.decision(14.5) == Leave(D, "late")


def test_a_member_that_computes_owes_nothing() -> None:
    stage = Stage(A, B, C)
    stage.says(C, now=5.0, owned=frozenset({1}))
    for peer in (A, B):
        stage.says(peer, late=(C,), now=60.0)
    assert stage.decision(60.0) is None and stage.decision(64.0) is None
    stage.says(C, now=61.0)
    assert stage.decision(70.0) is None, "its time begins when it is done"
    assert stage.decision(71.5) is None and stage.decision(75.0) == Leave(C, "late")


def test_a_member_that_owes_its_own_contribution_is_named_before_those_that_wait_for_it() -> None:
    """B, C and D wait for what A reduces, and A for what D owes."""
    stage = Stage(A, B, C, D)
    for peer in (B, C, D):
        stage.says(peer, late=(A,), owes=False, now=11.0)
    for peer in (A, B, C):
        stage.says(peer, late=(D,), now=11.0)
    assert stage.decision(11.0) is None and stage.decision(14.5) == Leave(D, "late")


def test_one_refusal_has_the_round_cut_again_before_one_end_is_left_out() -> None:
    stage = Stage(A, B, C)
    stage.says(B, refused=(C,), now=1.0)
    assert stage.decision(1.0) is None and stage.decision(4.5) == CutAgain(((B, C),))
    stage.open(4.5)
    assert stage.decision(20.0) is None, "no member reports anything of the second round"
    stage.says(B, refused=(C,), now=21.0)
    assert stage.decision(21.0) is None and stage.decision(24.5) == Leave(B, "alone", frozenset({C}))


def test_refusals_of_different_rounds_are_edges_of_one_graph() -> None:
    """Of eight members one sends nonsense in one place: in each cut one other member has to reduce that."""
    stage = Stage(*EIGHT)
    first, second, *_, spoiled = EIGHT
    stage.says(first, refused=(spoiled,), now=0.0)
    assert stage.decision(0.0) is None and stage.decision(4.0) == CutAgain(((first, spoiled),))
    stage.open(4.0)
    stage.says(second, refused=(spoiled,), now=4.0)
    assert stage.decision(4.0) is None and stage.decision(8.0) == Leave(spoiled, "refused")


def test_what_all_others_refuse_needs_no_patience() -> None:
    stage = Stage(A, B, C, D)
    for peer in (A, B, C):
        assert stage.decision(1.0) is None
        stage.says(peer, refused=(D,), now=1.0)
    assert stage.decision(1.0) == Leave(D, "refused")


def test_what_all_others_of_one_group_of_a_grid_refuse_needs_no_patience() -> None:
    stage = Stage(*EIGHT)
    groups = [frozenset(EIGHT[:4]), frozenset(EIGHT[4:]), *(frozenset(EIGHT[place::4]) for place in range(4))]
    for peer in (E, F, G):
        assert stage.graph.decide(groups, step=3, now=1.0) is None
        stage.says(peer, refused=(H,), now=1.0)
    assert stage.graph.decide(groups, step=3, now=1.0) == Leave(H, "refused")


def test_members_that_report_nearly_all_others_have_the_most_edges() -> None:
    stage = Stage(*EIGHT)
    for liar in (G, H):
        stage.says(liar, refused=EIGHT[:6], late=EIGHT[:6], now=11.0)
    assert stage.decision(11.0) is None
    assert stage.decision(15.0) == CutAgain()
    stage.open(15.0)
    for liar in (G, H):
        stage.says(liar, refused=EIGHT[:6], now=16.0)
    assert stage.decision(16.0) is None
    left = stage.decision(20.0)
    assert isinstance(left, Leave) and left.peer in (G, H)


def test_a_member_that_receives_nothing_is_late_like_any_other() -> None:
    """D waits for all, so what it reduces never comes. That is no excuse."""
    stage = Stage(A, B, C, D)
    stage.says(D, late=(A, B, C), now=11.0)
    for peer in (A, B, C):
        stage.says(peer, late=(D,), owes=False, now=11.0)
    assert stage.decision(11.0) is None and stage.decision(14.5) == Leave(D, "late")


def test_two_that_hang_among_four_are_left_out_by_the_other_two() -> None:
    stage = Stage(A, B, C, D)
    for peer in (A, B):
        stage.says(peer, late=(C, D), now=11.0)
    assert stage.decision(11.0) is None and stage.decision(14.5) == Leave(C, "late")


def test_two_that_say_whom_they_wait_for_do_not_silence_those_who_wait_for_them() -> None:
    stage = Stage(A, B, C, D, E)
    for liar, other in ((D, E), (E, D)):
        stage.says(liar, late=(other, B), now=10.1)
    for member in (A, B, C):
        stage.says(member, late=(D, E), owes=False, now=10.1)
    assert stage.decision(10.1) is None
    assert stage.decision(13.2) in (Leave(D, "late"), Leave(E, "late"))


def test_of_two_that_report_each_other_the_leader_stays() -> None:
    stage = Stage(A, B)
    stage.says(B, late=(A,), now=11.0)
    assert stage.decision(11.0) is None and stage.decision(14.5) == Leave(A, "late"), "its own stream stands still"
    stage.says(A, late=(B,), now=14.5)
    assert stage.decision(14.5) == Leave(B, "late")


def test_no_member_is_late_before_the_time_that_the_leader_gives_it() -> None:
    stage = Stage(A, B)
    stage.lines.allowed = {A: 60.0}
    stage.says(B, late=(A,), now=1.0, allowed_s=0.0)
    assert stage.decision(1.0) is None and stage.decision(59.0) is None and stage.decision(61.0) is None
    assert stage.decision(64.5) == Leave(A, "late")


def test_a_broken_link_costs_one_end_and_is_remembered() -> None:
    stage = Stage(A, B, C, D)
    stage.says(C, late=(D,), now=11.0)
    stage.says(D, late=(C,), now=11.0)
    assert stage.decision(11.0) is None and stage.decision(14.5) == Leave(C, "alone", frozenset({D}))


def test_a_member_that_refuses_its_own_contribution_is_left_out() -> None:
    stage = Stage(A, B, C)
    stage.says(B, refused=(B,), now=1.0)
    assert stage.decision(1.0) == Leave(B, "refused")


def test_reports_of_another_round_or_of_strangers_do_not_count() -> None:
    stage = Stage(A, B, C)
    for peer in (A, B):
        stage.says(peer, late=(C,), refused=(C,), now=20.0, of=number(99))
        assert stage.decision(30.0) is None
        stage.says(peer, late=(D,), refused=(D,), now=20.0)
        assert stage.decision(30.0) is None
    stage.says(D, late=(C,), refused=(C,), now=20.0)
    assert stage.decision(60.0) is None, "D exchanges with none of them"


reports = st.lists(st.tuples(st.sampled_from([A, C, D]), st.booleans()), max_size=12)


def end_of(stage: Stage, reporter: PeerId, *suspects: PeerId, refusal: bool = False) -> Leave:
    """What ends a round in which one member alone reports these, however often it is cut again."""
    for now in range(11, 60, 4):
        names = tuple(peer for peer in suspects if peer != reporter)
        stage.says(reporter, refused=names if refusal else (), late=() if refusal else names, now=float(now))
        match stage.decision(float(now)):
            case Leave() as left:
                stage.lines.broken(left.peer, left.others, step=stage.step)
                return left
            case CutAgain():
                stage.open(float(now))
    raise AssertionError("the round never ends")


@given(reports)
def test_one_member_has_no_other_left_out_in_any_number_of_steps(said: list[tuple[PeerId, bool]]) -> None:
    lines = BrokenLines()
    for step, (suspect, refusal) in enumerate(said):
        assert end_of(Stage(A, B, C, D, lines=lines, step=step), B, suspect, refusal=refusal).peer == B


def test_the_leader_spares_itself_where_one_edge_accuses_it_or_a_member() -> None:
    """It knows what it waits for itself. Of two edges it is the member of most, as any other."""
    for reporter, suspect in ((A, D), (D, A)):
        stage = Stage(A, B, C, D)
        stage.says(reporter, late=(suspect,), now=9.0)
        assert stage.decision(11.0) is None and stage.decision(14.5) == Leave(D, "alone", frozenset({A}))
    stage = Stage(A, B, C, D)
    stage.says(A, late=(C, D), now=9.0)
    assert stage.decision(11.0) is None and stage.decision(14.5) == Leave(A, "late")


def test_who_alone_refuses_one_after_the_other_is_at_fault_and_who_is_refused_is_not() -> None:
    lines = BrokenLines()
    assert not lines.refused(B, C, step=0) and not lines.refused(B, C, step=9), "the same sender"
    assert not lines.refused(D, C, step=10) and not lines.refused(A, C, step=11), "C may lie, or two of the others"
    assert not lines.refused(B, D, step=74), "that is long ago"
    assert lines.refused(B, A, step=80) and not lines.ends(80)


def test_a_member_that_sends_nothing_to_one_member_at_a_time_loses_the_second_tie() -> None:
    lines = BrokenLines()
    assert end_of(Stage(A, B, C, D, lines=lines, step=0), B, D) == Leave(B, "alone", frozenset({D}))
    assert end_of(Stage(A, B, C, D, lines=lines, step=1), C, D) == Leave(D, "alone", frozenset({C}))


def test_strangers_are_not_remembered_however_many_are_named() -> None:
    stage = Stage(A, B, C)
    for number in range(100):
        stage.says(B, refused=tuple(PeerId(f"{number}-{place}") for place in range(64)), now=1.0)
        assert stage.decision(1.0) is None
    assert not stage.graph._refusals and stage.decision(60.0) is None
