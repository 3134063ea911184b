"""Following the others from an old copy: step by step, along certificates, to the step that is open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence, Set
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from restorers import restorer

from swarmnet.errors import BadMessage, NoReplica, PeerGone, Refused, RejectCode, SwarmError
from swarmnet.ids import Ballot, PeerId, RoundId, RunId, first_chain, next_chain
from swarmnet.manifest.extension import Notice
from swarmnet.manifest.schema import NO_DELAY
from swarmnet.manifest.timers import Timers
from swarmnet.messages import Answer, Commit, Finished, Rejected, Round, StateHeader, TrailRequest, TrailStep, Vote
from swarmnet.state.catch_up import InSync
from swarmnet.step.commits import evidence
from swarmnet.step.gate import Shape
from swarmnet.step.member import Member
from swarmnet.testing.clock import VirtualLoop
from swarmnet.testing.virtual_swarm import SimulatedSigner

STAGE, STAGES, HERE = 1, 2, 9
FIRST = first_chain(RunId("00" * 32), STAGE)
A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


@cache
def header(step: int) -> StateHeader:
    if not step:
        return StateHeader(0, FIRST, FIRST, FIRST)
    before = header(step - 1)
    return replace(
        before, version=step, chain=next_chain(before.chain, evidence(committed(step - 1))), before=before.chain
    )


def summed(step: int) -> Finished:
    return Finished(RoundId(Ballot(0, A), step), bytes([step]) * 32, 4, 0.0, 1.0, ())


def committed(step: int, num_stages: int = STAGES) -> tuple[Commit, ...]:
    done = summed(step)
    return tuple(
        Commit(stage, step, header(step).chain, done.id, done.digest, 4, 0.0, 1.0) for stage in range(num_stages)
    )


def told(step: int) -> Answer:
    """What an honest donor at version HERE says."""
    if step < HERE:
        return TrailStep(summed(step), committed(step))
    if step == HERE:
        return TrailStep(summed(step), committed(step)[STAGE:])
    return Rejected(RejectCode.NOT_READY, "behind that step", HERE)


class Story:
    """A joining replica with donors by script. Stands for its transport, engine, exchange and membership."""

    delay, collected_bytes = NO_DELAY, 0

    def __init__(self, *donors: PeerId) -> None:
        self.donors = list(donors or (A, B, C))
        self.lies: dict[PeerId, Any] = {}
        self.failed: list[tuple[PeerId, str]] = []
        self.log: list[str] = []
        self.collected: list[Sequence[PeerId]] = []
        self.break_collect = 0
        self.refuse: dict[PeerId, SwarmError] = {}
        self.slow_s: dict[PeerId, float] = {}
        self.took_s = 0.0
        me, shape = PeerId("joins"), Shape(STAGES, 4, 20)
        signer = SimulatedSigner(me)
        member = Member(me, STAGE, shape, Timers(), incarnation=1, chain=FIRST, now=0.0, signer=signer)
        member.membership = self
        parts = {"compute": self, "member": member, "exchange": self, "event": self.event}
        self.machine = restorer(STAGE, shape, transport=self, **parts)

    def event(self, event: str, fields: dict[str, Any]) -> None:
        if event == "following":
            self.log.append(f"at {fields['version']}")
        elif event == "join_failed":
            self.failed.append((fields["donor"], fields["reason"]))
        elif event == "fetching_again":
            raise NoReplica("a newer copy is needed")

    def snapshot_bytes(self, stage: int) -> int:
        return 0

    async def restore(self, data: bytes, *, version: int) -> None:
        pass

    def proven(self, commit: Commit, serving: Set[PeerId], *, now: float) -> bool:
        return commit in committed(commit.step)

    def signers(self, commit: Commit, among: Set[PeerId]) -> Set[PeerId]:
        return {vote.peer for vote in commit.votes}

    def followed(self, commits: Sequence[Commit]) -> None:
        pass

    async def call(self, peer: PeerId, request: TrailRequest, *_: Any, **__: Any) -> AsyncGenerator[Answer, None]:
        step = request.stamp.step
        await asyncio.sleep(self.slow_s.get(peer, 0.0))
        answer = self.lies[peer](step) if peer in self.lies else told(step)
        if isinstance(answer, Exception):
            raise answer
        yield answer

    async def collect_from(self, wanted: Round, digest: bytes, *holders: PeerId, kind: str) -> Finished:
        self.collected.append(list(holders))
        for holder in holders:
            if holder in self.refuse:
                raise self.refuse[holder]
        if self.break_collect:
            self.break_collect -= 1
            raise PeerGone("broken")
        self.log.append(f"sum {wanted.stamp.step}")
        return replace(summed(wanted.stamp.step), id=wanted.id)

    def lengthen(self, notices: tuple[Notice, ...]) -> None:
        assert not notices

    async def apply(self, commits: Sequence[Commit]) -> None:
        self.log.append(f"apply {commits[0].step}")

    def run(self, step: int) -> InSync:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            try:
                return runner.run(self.machine.join(lambda: self.donors, first=(header(step), memoryview(b""))))[0]
            finally:
                self.took_s = runner.get_loop().time()


def test_every_step_is_fetched_and_applied_until_the_one_that_is_open() -> None:
    story = Story()
    level = story.run(6)
    assert level == InSync(header(HERE), summed(HERE), committed(HERE)[STAGE:])
    steps = [line for step in (6, 7, 8) for line in (f"sum {step}", f"apply {step}", f"at {step + 1}")]
    assert story.log == [*steps, "sum 9"] and not story.failed
    assert all(holders == [A, B, C] for holders in story.collected), "a sum comes from all who hold it"


def test_whoever_is_in_sync_has_nothing_to_follow() -> None:
    assert Story().run(HERE).header == header(HERE)


def test_whoever_is_ahead_of_all_is_not_called_level() -> None:
    story = Story()
    with pytest.raises(NoReplica, match="no source tells"):
        story.run(HERE + 2)
    assert story.log == []


def test_the_first_story_leads_on_and_who_says_nothing_is_named_late() -> None:
    story = Story()
    story.slow_s[A] = 10.0
    assert story.run(HERE - 1).header == header(HERE)
    assert story.took_s < 2.1 and story.log[:3] == ["sum 8", "apply 8", "at 9"]
    assert [peer for peer, reason in story.failed if "says nothing" in reason] == [A]
    assert story.collected == [[B, C], [B, C]]


def forged(step: int) -> Answer:
    """A story that fits together and that nobody has signed."""
    other = replace(summed(step), digest=bytes(32))
    return TrailStep(other, (committed(step)[0], replace(committed(step)[STAGE], digest=bytes(32))))


@pytest.mark.parametrize("liars", [(A,), (A, B)])
def test_a_story_without_certificates_leads_nobody(liars: tuple[PeerId, ...]) -> None:
    """Also if it comes first, or from the larger group."""
    story = Story()
    story.lies = dict.fromkeys(liars, lambda step: forged(step) if step < HERE else told(step))
    story.slow_s = dict.fromkeys({A, B, C} - {*liars}, 0.9)
    assert story.run(6).header == header(HERE)
    assert all(not set(liars) & set(holders) for holders in story.collected[:3])
    assert {peer for peer, reason in story.failed if "without a certificate" in reason} == {*liars}


def test_what_nobody_can_prove_is_followed_as_most_tell_it() -> None:
    """All who have signed that step have left since."""
    story = Story()
    story.machine._member.membership.proven = lambda commit, serving, now: False
    story.lies[A] = lambda step: forged(step) if step < HERE else told(step)
    assert story.run(8).header == header(HERE) and story.collected[0] == [B, C]


def test_of_the_open_step_nothing_is_taken_that_the_stage_has_not_committed() -> None:
    """Whoever has it would sign it, and one donor may have made it up."""
    story = Story()
    last = tuple(replace(each, digest=bytes(32)) for each in committed(HERE - 1))
    story.lies = dict.fromkeys(story.donors, lambda step: TrailStep(summed(step), committed(step, 1), last))
    story.lies[C] = lambda step: TrailStep(None, (), committed(HERE - 1))
    found = InSync(header(HERE), None, committed(HERE, 1), committed(HERE - 1))
    assert story.run(HERE) == found and not story.collected, "nor voters that no certificate names"


def test_commits_that_do_not_lead_to_the_state_name_nobody_late() -> None:
    """Nobody can prove them any more: most sources could name whom they like."""
    story = Story()
    story.machine._member.membership.proven = lambda commit, serving, now: False
    last = tuple(replace(each, late=(C,)) for each in committed(HERE - 1))
    story.lies = dict.fromkeys((A, B), lambda step: TrailStep(None, (), last))
    assert story.run(HERE).last_commits == ()
    story.lies[C] = lambda step: TrailStep(None, (), committed(HERE - 1))
    assert story.run(HERE).last_commits == committed(HERE - 1)


def test_contributors_that_most_sources_make_up_are_not_taken_over_what_one_of_the_stage_has_signed() -> None:
    story = Story()
    true, made_up = committed(HERE - 1), tuple(replace(each, roll=bytes(32)) for each in committed(HERE - 1))
    signed = replace(true[0], votes=(Vote(C, bytes(64)),))
    story.machine._member.membership.proven = lambda commit, serving, now: commit == true[1]
    story.lies = dict.fromkeys((A, B), lambda step: TrailStep(None, (), made_up))
    story.lies[C] = lambda step: TrailStep(None, (), (signed, true[1]))
    assert story.run(HERE).last_commits == true, "a certificate counts for its own stage"


def test_a_sum_that_was_made_again_in_another_round_is_as_good() -> None:
    def again(step: int) -> Answer:
        return (
            TrailStep(replace(summed(step), id=RoundId(Ballot(5, B), 7)), committed(step))
            if step < HERE
            else told(step)
        )

    story = Story()
    story.lies = dict.fromkeys(story.donors, again)
    assert story.run(7).header == header(HERE) and not story.failed


def test_one_donor_that_lags_does_not_hold_back() -> None:
    story = Story()
    story.lies[A] = lambda step: TrailStep(None, ())
    assert story.run(6).header == header(HERE)
    assert story.collected[0] == [B, C]


def test_a_step_whose_sum_nobody_holds_is_left_to_the_member() -> None:
    story = Story()
    for donor in story.donors:
        story.lies[donor] = lambda step: TrailStep(None, committed(step))
    assert story.run(6) == InSync(header(6), None, committed(6)) and story.log == []


FORGERIES = {
    "another sum": lambda step: TrailStep(replace(summed(step), digest=bytes(32)), committed(step)),
    "other tokens": lambda step: TrailStep(replace(summed(step), num_tokens=5), committed(step)),
    "another step": lambda step: TrailStep(summed(step), committed(step + 1)),
    "a stage twice": lambda step: TrailStep(summed(step), (committed(step)[0],) * 2),
    "out of order": lambda step: TrailStep(summed(step), committed(step)[::-1]),
    "a stage that does not exist": lambda step: TrailStep(summed(step), committed(step, 3)),
    "not an answer": lambda step: Finished,
}


@pytest.mark.parametrize("lie", FORGERIES.values(), ids=FORGERIES)
def test_what_does_not_fit_together_is_named_and_not_used(lie: Any) -> None:
    story = Story()
    story.lies[A] = lie
    assert story.run(6).header == header(HERE)
    assert {peer for peer, _ in story.failed} == {A}
    assert all(A not in holders for holders in story.collected[:3])


@pytest.mark.parametrize("error", [BadMessage(RejectCode.MALFORMED, "no digest"), Refused(RejectCode.NOT_FOUND)])
def test_who_does_not_hand_over_what_it_describes_costs_one_attempt(error: SwarmError) -> None:
    story = Story(A, C)
    story.refuse[A] = error
    assert story.run(8).header == header(HERE)
    assert story.collected[:3] == [[A, C], [A], [C]] and {peer for peer, _ in story.failed} == {A}


def test_a_trail_that_does_not_reach_back_is_said_at_once() -> None:
    story = Story()
    for donor in story.donors:
        story.lies[donor] = lambda step: Rejected(RejectCode.NOT_FOUND) if step < 7 else told(step)
    with pytest.raises(NoReplica, match="newer copy"):
        story.run(6)
    assert story.run(7).header == header(HERE)


def test_silence_is_waited_out_for_a_while() -> None:
    story = Story(A)
    story.lies[A] = lambda step: PeerGone("broken")
    with pytest.raises(NoReplica, match="no source tells"):
        story.run(6)
    story = Story(A)
    answers = iter([PeerGone("broken"), Rejected(RejectCode.NOT_READY)])
    story.lies[A] = lambda step: next(answers, None) or told(step)
    assert story.run(6).header == header(HERE)


def test_a_sum_that_breaks_off_is_fetched_again() -> None:
    story = Story()
    story.break_collect = 3
    assert story.run(8).header == header(HERE) and story.log.count("apply 8") == 1
    story.break_collect = 1000
    with pytest.raises(PeerGone):
        story.run(8)
