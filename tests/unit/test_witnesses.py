"""Whom a joining replica believes about a state, by what sources tell of the commits around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from swarmnet.fetch.driver import HolderCalls
from swarmnet.ids import NO_CHAIN, NO_RESTART, Ballot, Chain, PeerId, RoundId, next_chain
from swarmnet.manifest.schema import NO_DELAY
from swarmnet.messages import Answer, Commit, StateHeader, TrailStep, Vote, roll_of
from swarmnet.peer.witnesses import Witnesses
from swarmnet.step.commits import evidence
from swarmnet.testing.doubles import FakeTransport

pytestmark = pytest.mark.virtual_time

A, B, C, X, Y = (PeerId(name) for name in "ABCXY")


def witnesses(classes: dict[PeerId, str] | None = None) -> Witnesses:
    """Of stage 0 of one. A vote is good if its signature is the voter's name."""
    seen = classes or {}
    member = SimpleNamespace(
        restart=NO_RESTART,
        shape=SimpleNamespace(num_stages=1, delay=NO_DELAY),
        view=SimpleNamespace(get=lambda peer, stage: SimpleNamespace(numerics=seen[peer]) if peer in seen else None),
        membership=SimpleNamespace(
            signers=lambda commit, among: {
                vote.peer for vote in commit.votes if vote.peer in among and vote.signature == vote.peer.encode()
            }
        ),
    )
    return Witnesses(0, member, equal_bits=True)  # type: ignore[arg-type]


def commit(step: int, chain: Chain, *contributors: PeerId, signed: str) -> Commit:
    votes = tuple(Vote(PeerId(name), name.encode()) for name in signed)
    of = RoundId(Ballot(0, A), 0)
    return Commit(
        0, step, chain, of, b"sum", 8, 1.0, 1.0, roll=roll_of(contributors), contributors=contributors, votes=votes
    )


BEFORE = commit(4, Chain("11" * 32), A, B, C, signed="AB")
STATE = StateHeader(5, next_chain(NO_CHAIN, evidence([BEFORE])), NO_CHAIN, NO_CHAIN)
NEXT = commit(5, STATE.chain, A, B, C, signed="BC")


def at_state(of: Commit) -> TrailStep:
    return TrailStep(None, (), (of,))


def beyond(of: Commit) -> TrailStep:
    return TrailStep(None, (of,))


def forged(*names: PeerId, signed: str = "") -> Commit:
    """The commit before the state, with other contributors."""
    votes = commit(4, NO_CHAIN, signed=signed).votes
    return replace(BEFORE, roll=roll_of(names), contributors=names, votes=votes)


def believed(*told: TrailStep) -> frozenset[PeerId] | None:
    found = witnesses().of(STATE, told)
    return found and frozenset(found.witnesses)


def test_those_who_contributed_are_believed_whether_the_donor_is_at_the_state_or_beyond() -> None:
    for told in ([at_state(BEFORE)], [beyond(NEXT)], [at_state(BEFORE), beyond(NEXT)]):
        assert believed(*told) == {A, B, C}, "a quorum of signatures speaks for the whole list"
    assert believed(TrailStep(None, ())) == frozenset(), "without commits nobody is known"


def test_who_forges_a_list_is_outweighed() -> None:
    """Keys that sign the commit as their own are no more than the contributors of the next step. A list that nobody
    has signed counts nothing, and a tie in one step tells nothing."""
    assert believed(at_state(forged(X, Y, signed="XY")), beyond(NEXT)) == {A, B, C}
    assert believed(at_state(forged(X, Y)), at_state(BEFORE)) == {A, B, C}
    assert believed(at_state(forged(X, Y, PeerId("Z"), signed="XYZ")), at_state(BEFORE)) is None


def test_of_several_classes_the_usual_one_is_asked() -> None:
    found = witnesses({A: "one", B: "one", C: "two"}).of(STATE, [at_state(BEFORE)])
    assert found is not None and (found.witnesses, found.usual) == ({A, B}, "one")


async def test_a_source_that_only_promises_what_led_to_its_state_is_waited_for_once_and_left_out() -> None:
    async def serve(peer: PeerId, request: object) -> AsyncGenerator[Answer, None]:
        await asyncio.sleep(0.0 if peer == A else 1e9)
        yield at_state(BEFORE)

    late: list[PeerId] = []
    calls = HolderCalls(FakeTransport(serve), lambda peer, error: late.append(peer))
    told = await witnesses().told(calls, {A: STATE, B: replace(STATE, version=9)})
    assert told == {A: at_state(BEFORE)} and calls.usable([A, B]) == [A]
    assert await witnesses().told(calls, {X: STATE}) == {} and late == [B, X]
    assert asyncio.get_running_loop().time() < 20.0
