"""Nobody is left out of a step on one voice of three or more; who holds up a round is left out all the same."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from stage_table import CHAIN

from swarmnet.ids import Ballot, Generation, PeerId, RoundId
from swarmnet.messages import NONE, Late, Report, Stamp, Trouble
from swarmnet.step.lines import BrokenLines
from swarmnet.step.rounds import CutAgain, Leave, Stragglers

EIGHT = A, B, C, D, E, F, G, H = tuple(PeerId(name) for name in "ABCDEFGH")
BALLOT = Ballot(1, A)
PATIENCE_S = 3.0


def number(place: int) -> RoundId:
    return RoundId(BALLOT, place)


class Court:
    """A keeper's ear, A's, and the members of its one group, who have all summed what they own."""

    def __init__(self, *members: PeerId) -> None:
        self.members = frozenset(members)
        self.lines = BrokenLines()
        self.dispute = Stragglers(A, patience_s=PATIENCE_S, lines=self.lines)
        self.rounds = itertools.count()
        self.open(0.0)
        for member in members:
            self.says(member, now=0.0)

    def open(self, now: float) -> None:
        self.round = number(next(self.rounds))
        self.dispute.opened(self.round, now=now)

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
        report = Report(Stamp(3, 0, CHAIN), BALLOT, Generation(1, 0), owned, NONE, None, None, 0, trouble=trouble)
        self.dispute.hear(peer, report, now=now)

    def verdict(self, now: float) -> Leave | CutAgain | None:
        return self.dispute.verdict([self.members], now=now)


def test_whom_most_wait_for_is_left_out_once_it_has_had_its_time() -> None:
    court = Court(A, B, C, D)
    court.says(B, late=(D,), now=11.0)
    assert court.verdict(11.0) is None and court.verdict(14.5) is None, "one voice"
    court.says(C, late=(D,), now=14.5)
    assert court.verdict(14.5) == Leave(D, "late")


def test_who_still_computes_owes_nothing() -> None:
    court = Court(A, B, C)
    court.says(C, now=5.0, owned=frozenset({1}))
    for peer in (A, B):
        court.says(peer, late=(C,), now=60.0)
    assert court.verdict(60.0) is None and court.verdict(64.0) is None
    court.says(C, now=61.0)
    assert court.verdict(70.0) is None, "its time begins when it is done"
    assert court.verdict(71.5) == Leave(C, "late")


def test_a_reducer_that_waits_alone_for_one_that_owes_it_something_is_alone() -> None:
    """B and C reduce nothing and wait for A, who waits for D; so does nobody else."""
    court = Court(A, B, C, D)
    for peer in (B, C, D):
        court.says(peer, late=(A,), owes=False, now=11.0)
    court.says(A, late=(D,), now=11.0)
    assert court.verdict(11.0) is None and court.verdict(14.5) == Leave(A, "alone", frozenset({D}))


def test_a_reducer_that_waits_for_one_for_whom_most_wait_is_excused() -> None:
    court = Court(A, B, C, D)
    for peer in (B, C, D):
        court.says(peer, late=(A,), owes=False, now=11.0)
    for peer in (A, B, C):
        court.says(peer, late=(D,), now=11.0)
    assert court.verdict(11.0) is None and court.verdict(14.5) == Leave(D, "late")


def test_one_voice_of_three_has_the_round_cut_again_and_then_stands_alone() -> None:
    court = Court(A, B, C)
    court.says(B, refused=(C,), now=1.0)
    assert court.verdict(1.0) is None and court.verdict(4.5) == CutAgain()
    court.open(4.5)
    assert court.verdict(20.0) is None, "nobody complains of the second round"
    court.says(B, refused=(C,), now=21.0)
    assert court.verdict(21.0) is None and court.verdict(24.5) == Leave(B, "alone")


def test_two_that_refused_something_of_one_member_in_different_rounds_are_two_and_the_rest_is_asked() -> None:
    court = Court(A, B, C, D)
    court.says(B, refused=(D,), now=1.0)
    court.open(5.0)
    court.says(A, refused=(D,), now=6.0)
    assert court.verdict(6.0) is None, "C may say otherwise, or the same"
    assert court.verdict(9.5) == CutAgain()
    court.open(9.5)
    assert court.verdict(20.0) is None, "nobody complains of the third round"
    court.says(B, refused=(D,), now=21.0)
    assert court.verdict(21.0) == Leave(D, "refused")


def test_what_all_refuse_needs_no_second_round() -> None:
    court = Court(A, B, C, D)
    for peer in (A, B, C):
        assert court.verdict(1.0) is None
        court.says(peer, refused=(D,), now=1.0)
    assert court.verdict(1.0) == Leave(D, "refused")


def test_as_long_as_each_cut_finds_another_accuser_the_round_is_cut_again_up_to_a_majority() -> None:
    """Of eight members one sends nonsense in one place: in each cut one other member has to reduce that."""
    court = Court(*EIGHT)
    *honest, spoiled = EIGHT
    now = 0.0
    for reducer in honest[:3]:
        court.says(reducer, refused=(spoiled,), now=now)
        assert court.verdict(now) is None
        now += 4.0
        assert court.verdict(now) == CutAgain()
        court.open(now)
    court.says(honest[3], refused=(spoiled,), now=now)
    assert court.verdict(now) == Leave(spoiled, "refused"), "four of seven"


def test_who_names_so_many_that_nobody_could_outvote_them_is_odd() -> None:
    court = Court(*EIGHT)
    for liar in (G, H):
        court.says(liar, refused=EIGHT[:6], late=EIGHT[:6], now=11.0)
    assert court.verdict(11.0) is None and court.verdict(15.0) == CutAgain()
    court.open(15.0)
    for liar in (G, H):
        court.says(liar, refused=EIGHT[:6], now=16.0)
    assert court.verdict(16.0) is None and court.verdict(20.0) == Leave(G, "alone")


def test_who_reduces_nothing_and_names_all_reducers_is_not_odd_if_they_wait_themselves() -> None:
    """D and E collude and exchange nothing; C reduces nothing, so it waits for what A and B cannot reduce."""
    court = Court(A, B, C, D, E)
    for peer in (A, B):
        court.says(peer, late=(D, E), now=11.0)
    court.says(C, late=(A, B, D, E), owes=False, now=11.0)
    court.says(D, late=(A, B, E), now=11.0)
    court.says(E, late=(A, B, D), now=11.0)
    assert court.verdict(11.0) is None and court.verdict(14.5) == Leave(D, "late")


def test_who_names_reducers_that_wait_for_nobody_is_odd_all_the_same() -> None:
    court = Court(A, B, C, D, E)
    court.says(E, late=(A, B, C, D), owes=False, now=11.0)
    court.says(D, late=(A,), owes=False, now=11.0)
    assert court.verdict(11.0) is None and court.verdict(14.5) is None
    assert court.verdict(18.0) == CutAgain(), "and not yet A, by two words of four"


def test_who_hears_nobody_is_late_like_anybody_else() -> None:
    """D's line brings nothing in: it waits for all, so what it reduces never comes. That is no excuse."""
    court = Court(A, B, C, D)
    court.says(D, late=(A, B, C), now=11.0)
    for peer in (A, B, C):
        court.says(peer, late=(D,), owes=False, now=11.0)
    assert court.verdict(11.0) is None and court.verdict(14.5) == Leave(D, "late")


def test_two_that_hang_among_four_are_left_out_by_the_other_two() -> None:
    court = Court(A, B, C, D)
    for peer in (A, B):
        court.says(peer, late=(C, D), now=11.0)
    assert court.verdict(11.0) is None and court.verdict(14.5) == Leave(C, "late")


def test_only_the_words_of_those_that_exchange_with_somebody_count() -> None:
    court = Court(*EIGHT)
    rows = [frozenset(EIGHT[:4]), frozenset(EIGHT[4:])]
    for peer in (F, G, H):
        court.says(peer, refused=(A,), late=(A,), now=11.0)
    assert court.dispute.verdict(rows, now=11.0) is None
    assert court.dispute.verdict(rows, now=15.0) == CutAgain()
    for peer in (B, C, D):
        court.says(peer, refused=(A,), now=15.0, of=court.round)
    assert court.dispute.verdict(rows, now=15.0) == Leave(A, "refused")


def test_of_two_the_keeper_believes_itself_about_a_refusal_and_the_other_about_lateness() -> None:
    court = Court(A, B)
    court.says(B, refused=(A,), now=1.0)
    assert court.verdict(1.0) is None
    court = Court(A, B)
    court.says(A, refused=(B,), now=1.0)
    assert court.verdict(1.0) == Leave(B, "refused")
    court = Court(A, B)
    court.says(B, late=(A,), now=11.0)
    assert court.verdict(11.0) is None and court.verdict(14.5) == Leave(A, "late")
    court.says(A, late=(B,), now=11.0)
    assert court.verdict(14.5) == Leave(B, "late"), "each waits for the other: the keeper stays"


def test_nobody_is_late_before_the_time_that_the_keeper_gives_it_itself() -> None:
    court = Court(A, B)
    court.lines.allowed = {A: 60.0}
    court.says(B, late=(A,), now=1.0, allowed_s=0.0)
    assert court.verdict(1.0) is None and court.verdict(9.0) is None and court.verdict(59.0) is None
    assert court.verdict(61.0) == Leave(A, "late")
    court = Court(A, B)
    court.says(B, late=(A,), now=1.0, allowed_s=0.0)
    assert court.verdict(1.0) is None and court.verdict(5.0) is None, "it has not begun to exchange itself"
    assert court.verdict(11.0) == Leave(A, "late")


def test_of_two_that_only_name_each_other_one_goes_and_it_is_known_why() -> None:
    court = Court(A, B, C, D)
    for patience, expected in ((11.0, CutAgain()), (30.0, Leave(C, "alone", frozenset({D})))):
        court.says(C, late=(D,), now=patience)
        court.says(D, late=(C,), now=patience)
        assert court.verdict(patience) is None and court.verdict(patience + 3.5) is None
        assert court.verdict(patience + 7.0) == expected
        court.open(patience + 7.0)


def test_who_cannot_take_its_own_contribution_says_so_and_is_believed() -> None:
    court = Court(A, B, C)
    court.says(B, refused=(B,), now=1.0)
    assert court.verdict(1.0) == Leave(B, "refused")


def test_words_about_another_round_or_about_strangers_do_not_count() -> None:
    court = Court(A, B, C)
    for peer in (A, B):
        court.says(peer, late=(C,), refused=(C,), now=20.0, of=number(99))
        assert court.verdict(30.0) is None
        court.says(peer, late=(D,), refused=(D,), now=20.0)
        assert court.verdict(30.0) is None


voices = st.lists(st.tuples(st.sampled_from([B, C, D]), st.booleans(), st.floats(0.0, 100.0)), max_size=30)


@given(voices)
def test_no_single_member_can_have_anybody_but_itself_left_out(said: list[tuple[PeerId, bool, float]]) -> None:
    """One liar of four, whatever it says and however often rounds are cut again."""
    court = Court(A, B, C, D)
    left: list[PeerId] = []
    now = 0.0
    for accused, refusal, pause in said:
        now += pause
        names = (accused,) if accused != B else (A,)
        court.says(B, refused=names if refusal else (), late=() if refusal else names, now=now)
        match court.verdict(now):
            case Leave(peer, _):
                left.append(peer)
                break
            case CutAgain():
                court.open(now)
    assert left in ([], [B])


lies = st.lists(
    st.tuples(st.sampled_from([E, F, G]), st.sets(st.sampled_from(EIGHT[:7])), st.booleans(), st.floats(0.0, 20.0)),
    max_size=40,
)


@given(lies)
def test_no_minority_can_have_anybody_but_its_own_left_out(said: list[tuple[PeerId, set[PeerId], bool, float]]) -> None:
    """Three liars of seven, whatever they say."""
    court = Court(*EIGHT[:7])
    now = 0.0
    for liar, accused, refusal, pause in said:
        now += pause
        names = tuple(sorted(accused - {liar}))
        court.says(liar, refused=names if refusal else (), late=() if refusal else names, now=now)
        match court.verdict(now):
            case Leave(peer, _):
                assert peer in (E, F, G)
                break
            case CutAgain():
                court.open(now)


def test_strangers_are_not_remembered_however_many_are_named() -> None:
    court = Court(A, B, C)
    for number in range(100):
        court.says(B, refused=tuple(PeerId(f"{number}-{place}") for place in range(64)), now=1.0)
    assert not court.dispute._refused and court.verdict(60.0) is None
