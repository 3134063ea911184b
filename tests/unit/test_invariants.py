"""The audit: exactly once, equal digests, equal weights; and the comparison with one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.testing.invariants import FP32_TOLERANCE, InvariantChecker, compare, multiplicity

M = 8
GOOD: dict[str, Any] = {
    "event": "committed",
    "stage": 0,
    "step": 0,
    "loss_sum": 0.0,
    "num_tokens": 16,
    "digest": "d",
    "discarded": [],
    "contributions": [["a", [0, 2, 4, 6]], ["b", [1, 3, 5, 7]]],
}


def said(**changes: Any) -> dict[str, Any]:
    return GOOD | changes


def ended(weights: str) -> dict[str, Any]:
    return {"event": "finished", "stage": 0, "version": 1, "weights_sha256": weights}


def test_replicas_that_train_on_their_own_may_end_apart_and_need_only_be_finite() -> None:
    judge = InvariantChecker(stages=1, steps=1, microbatches=M, equal=False, repeats=False)
    for event in (GOOD, said(loss_sum=3.0), ended("w"), ended("other")):
        judge.on(event)
    judge.on(said(loss_sum=4.0), life=1)
    assert judge.report().problems == ()
    assert not compare([3.0, 2.0], [3.0, 1.0], exact=False, lossless=True, promised=False).problem
    assert compare([3.0, math.nan], [3.0, 1.0], exact=False, lossless=True, promised=False).problem


def audit(*events: dict[str, Any]) -> InvariantChecker:
    judge = InvariantChecker(stages=1, steps=1, microbatches=M)
    for event in events:
        judge.on(event)
    return judge


def test_a_good_commit_said_by_two_members() -> None:
    verdict = audit(GOOD, GOOD, ended("w"), ended("w")).report()
    assert (verdict.lost, verdict.doubled, verdict.discarded) == (0, 0, 0)
    assert verdict.problems == ()


@pytest.mark.parametrize(
    ("contributions", "discarded", "lost", "doubled"),
    [
        ((("a", (0, 1, 2, 3, 4, 5, 6)),), (), 1, 0),
        ((("a", tuple(range(8))), ("b", (3,))), (), 0, 1),
        ((("a", (0, 0, *range(1, 8))),), (), 0, 1),
        ((("a", (0, 0, 0, 2, 3, 4, 5, 6, 7)),), (), 1, 2),
        ((("a", tuple(range(7))),), (7,), 0, 0),
        ((("a", tuple(range(8))),), (7,), 0, 1),  # discarded, yet counted
        ((("a", tuple(range(9))),), (), 0, 1),  # no such index
        ((), (), 8, 0),
    ],
)
def test_multiplicity(
    contributions: tuple[tuple[str, tuple[int, ...]], ...], discarded: tuple[int, ...], lost: int, doubled: int
) -> None:
    commit = said(contributions=contributions, discarded=discarded)
    assert multiplicity(commit, M) == (lost, doubled)
    verdict = audit(commit).report()
    assert (verdict.lost, verdict.doubled, verdict.discarded) == (lost, doubled, len(discarded))
    assert bool(verdict.problems) == bool(lost or doubled)


@given(st.lists(st.integers(0, M - 1), min_size=M, max_size=M), st.sets(st.integers(0, M - 1)))
def test_any_split_among_peers_is_fine_and_any_duplicate_is_not(owners: list[int], doubled: set[int]) -> None:
    shares = tuple((str(owner), tuple(i for i in range(M) if owners[i] == owner)) for owner in set(owners))
    assert multiplicity(said(contributions=shares), M) == (0, 0)
    assert multiplicity(said(contributions=(*shares, ("x", tuple(doubled)))), M) == (0, len(doubled))


def test_members_who_disagree() -> None:
    assert audit(GOOD, said(digest="e")).report().conflicts == ((0, 0),)
    worse = said(contributions=(("a", (0,)),))
    assert audit(GOOD, worse).report().lost == 7
    assert audit(GOOD, ended("w"), ended("v")).report().split_stages == (0,)


def test_what_is_wrong_is_known_at_once() -> None:
    judge = audit(GOOD)
    assert not judge.wrong(0, 0) and set(judge.committed) == {(0, 0)}
    judge.on(said(digest="e"))
    assert judge.wrong(0, 0) == "stage 0 step 0: sums with different digests" and judge.forks == 1
    judge.bits = False
    assert not judge.wrong(0, 0) and not judge.report().problems and judge.forks == 1
    judge.on(said(contributions=(("a", (0, 0)),)))
    assert judge.wrong(0, 0) == "stage 0 step 0: 7 lost, 1 doubled"


def test_a_step_that_is_done_anew_without_false_work_has_other_sums() -> None:
    before, after = said(digest="false"), said(digest="true", loss_sum=9.0)
    tainted, back = {"event": "tainted", "step": 0, "stage": 0}, {"event": "restart", "number": 1, "version": 0}

    def judged(*told: tuple[str, dict[str, Any]]) -> tuple[str, ...]:
        judge = InvariantChecker(stages=1, steps=1, microbatches=M)
        for by, event in told:
            judge.on(event, by=by)
        return judge.report().problems

    went = (("a", before), ("b", tainted), ("a", back), ("b", before), ("a", after), ("b", back), ("b", after))
    assert judged(*went) == ()
    assert judged(*went[:-2], ("b", after)), "b has not gone back, and says both"
    assert judged(*(each for each in went if each[1] is not tainted))
    other = {"event": "tainted", "step": 4, "stage": 0}, back | {"version": 5}
    assert judged(*(("b", other[0]) if of is tainted else (by, other[1] if of is back else of) for by, of in went))


def test_a_step_without_a_commit_is_not_passed_over() -> None:
    verdict = audit().report()
    assert verdict.unaudited == ((0, 0),) and verdict.problems


def test_compare() -> None:
    curve = [3.0 - 0.01 * step for step in range(40)]
    nearly = [loss + 2e-6 for loss in curve]
    late = curve[:20] + [loss + 1e-3 for loss in curve[20:]]
    assert compare(curve, curve, exact=True, lossless=True).bit_equal
    assert compare(curve, curve, exact=True, lossless=True).problem == ""
    assert compare(nearly, curve, exact=True, lossless=True).problem
    assert not compare(nearly, curve, exact=False, lossless=True).problem
    assert not compare(late, curve, exact=False, lossless=True).problem
    assert compare([loss + 1e-4 for loss in curve], curve, exact=False, lossless=True).problem
    assert not compare([loss + 1e-4 for loss in curve], curve, exact=True, lossless=False).problem
    assert compare([*curve[:-1], curve[-1] * 1.02], curve, exact=False, lossless=True).problem
    assert compare([*curve[:-5], math.nan, *curve[-4:]], curve, exact=False, lossless=True).problem
    assert compare(curve[:-1], curve, exact=False, lossless=True).problem
    assert compare([], [], exact=True, lossless=True).problem
    assert compare(late, curve, exact=False, lossless=True).at_step >= 20


def test_a_mesh_is_judged_by_a_distance_which_is_said() -> None:
    near, far = (
        compare([1.0 + 1e-6, 1.0], [1.0, 1.0], exact=False, lossless=True),
        compare([1.0 + 1e-4, 1.0], [1.0, 1.0], exact=False, lossless=True),
    )
    assert near.problem == "" and near.within == FP32_TOLERANCE and not near.bit_equal
    assert "losses of the first 20 steps differ" in far.problem
    assert compare([1.0], [1.0], exact=True, lossless=True).within is None
    assert compare([1.0], [1.0], exact=False, lossless=False).within is None


def test_a_loss_that_is_no_number_is_a_word_in_the_file() -> None:
    judge = audit(said(loss_sum="nan"), GOOD | {"event": "evicted", "peer": "p"})
    assert judge.report().problems == ()


def test_a_suspension_of_a_correct_peer_by_a_correct_peer_is_told_and_no_other() -> None:
    names = {f"id of s{stage}-r{number}": f"s{stage}-r{number}" for stage in range(2) for number in range(2)}
    checker = InvariantChecker(2, 1, 4, names=names, liars={"s0-r1"})
    for name, by in (("s0-r1", "s0-r0"), ("s1-r0", "s1-r1"), ("s1-r0", "s1-r1")):
        checker.on({"event": "late", "peer": f"id of {name}", "reason": "does not show work"}, by=by)
    said = ("s1-r0 is a correct peer, and s1-r1 suspended it: it does not show work",)
    assert checker.report().suspended == said and not any("suspended" in line for line in checker.report().problems)
    # What was done to a process may be why it is silent, and why it takes another one for silent.
    for name in ("s1-r0", "s1-r1"):
        checker.faulted = {name}
        assert checker.report().suspended == ()
