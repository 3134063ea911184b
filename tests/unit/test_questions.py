"""Commits are asked of one peer at a time, and handed out to a few at a time."""

from __future__ import annotations

from swarmnet.ids import PeerId
from swarmnet.step.questions import MOST_GIVEN, Questions

A, B, C = map(PeerId, "ABC")


def test_each_commit_is_asked_of_one_peer_at_a_time() -> None:
    mine = Questions(PeerId("me"), 0.5)
    (first,) = mine.whom({3, 4}, {A: {3, 4}, B: {3, 4}}, last=None, now=1.0)
    assert mine.whom({3, 4}, {C: {3, 4}}, last=None, now=1.4) == {}, "that is being asked"
    ((second, stages),) = mine.whom({3, 4}, {A: {3, 4}, B: {3, 4}}, last=None, now=1.5).items()
    assert {first, second} == {A, B} and stages == {3, 4}, "who has not answered is asked last"
    mine.begin(1)
    assert mine.whom({3}, {C: {3}}, last=None, now=1.6) == {C: {3}}, "another step's is another one"


def test_the_leader_of_a_large_stage_is_asked_last_but_asked() -> None:
    mine = Questions(PeerId("me"), 0.5)
    assert mine.whom({3}, {A: {3}, B: {3}}, last=A, now=0.0) == {B: {3}}
    mine.answered(B)
    assert mine.whom({3}, {A: {3}}, last=A, now=0.5) == {A: {3}}


def test_what_only_some_have_is_asked_of_those() -> None:
    asked = Questions(PeerId("me"), 0.5).whom({1, 2, 3}, {A: {1}, B: {2}}, last=None, now=0.0)
    assert asked == {A: {1}, B: {2}}


def test_one_asker_gets_a_commit_once_at_a_time_and_in_a_large_stage_few_do() -> None:
    mine = Questions(PeerId("me"), 0.5)
    assert mine.give(A, 7, {1, 2}, few=False, now=0.0) == {1, 2}
    assert mine.give(A, 7, {2, 3}, few=False, now=0.1) == {3}, "its question was doubled on the way"
    assert mine.give(A, 7, {2}, few=False, now=0.25) == {2}, "the answer was lost"
    askers = [PeerId(f"n{number}") for number in range(MOST_GIVEN + 1)]
    assert [bool(mine.give(asker, 8, {1}, few=True, now=1.0)) for asker in askers] == [True] * MOST_GIVEN + [False]
    assert mine.give(askers[-1], 8, {1}, few=True, now=1.25) == {1}


def test_whoever_never_answers_is_known_for_it() -> None:
    mine = Questions(PeerId("me"), 0.5)
    assert mine.whom({1}, {A: {1}}, last=None, now=0.0) == {A: {1}} and mine.owes(A)
    assert mine.whom({1}, {A: {1}, B: {1}}, last=None, now=1.0) == {B: {1}}
    mine.answered(A)
    assert not mine.owes(A) and mine.owes(B)
