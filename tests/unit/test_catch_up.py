"""Following the others from an old copy: step by step, believing the larger group, to the step that is open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from swarmnet.errors import BadMessage, NoReplica, PeerGone, PeerTimeout, Refused, RejectCode, SwarmError
from swarmnet.fetch.driver import HolderCalls
from swarmnet.ids import Ballot, Chain, PeerId, RoundId
from swarmnet.manifest.extension import Extension
from swarmnet.manifest.schema import NO_DELAY
from swarmnet.messages import Answer, Commit, Finished, Rejected, Stamp, StateHeader, TrailRequest, TrailStep
from swarmnet.simulate.clock import VirtualLoop
from swarmnet.state.catch_up import CatchUp, InSync, ReplayLogEnds

STAGE, STAGES, HERE = 1, 2, 9
A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def chain(step: int) -> Chain:
    return Chain(f"{step:064x}")


def header(step: int) -> StateHeader:
    return StateHeader(step, chain(step), chain(max(step - 1, 0)), chain(0))


def summed(step: int) -> Finished:
    return Finished(RoundId(Ballot(0, A), step), bytes([step]) * 32, 4, 0.0, 1.0, ())


def committed(step: int, num_stages: int = STAGES) -> tuple[Commit, ...]:
    done = summed(step)
    return tuple(Commit(stage, step, chain(step), done.id, done.digest, 4, 0.0, 1.0) for stage in range(num_stages))


def told(step: int) -> Answer:
    """What an honest donor at version HERE says."""
    if step < HERE:
        return TrailStep(summed(step), committed(step))
    if step == HERE:
        return TrailStep(summed(step), committed(step, 1))
    return Rejected(RejectCode.NOT_READY, "behind that step", HERE)


class Story:
    """One joiner, donors by script, an engine that counts."""

    delay = NO_DELAY

    def __init__(self, *donors: PeerId) -> None:
        self.donors = list(donors or (A, B, C))
        self.lies: dict[PeerId, Any] = {}
        self.failed: list[tuple[PeerId, SwarmError]] = []
        self.log: list[str] = []
        self.collected: list[Sequence[PeerId]] = []
        self.break_collect = 0
        self.refuse: dict[PeerId, SwarmError] = {}
        self.slow_s: dict[PeerId, float] = {}
        self.took_s = 0.0
        self.machine = CatchUp(
            HolderCalls(self, lambda donor, error: self.failed.append((donor, error))),
            self,
            STAGE,
            STAGES,
            collect=self.collect,
            after=self.after,  # type: ignore[arg-type]
            moved=lambda header: self.log.append(f"at {header.version}"),
            refusal=lambda commit: None if commit.num_tokens else "a commit that cannot be applied",
        )

    async def call(self, peer: PeerId, request: TrailRequest, *_: Any, **__: Any) -> AsyncGenerator[Answer, None]:
        step = request.stamp.step
        await asyncio.sleep(self.slow_s.get(peer, 0.0))
        answer = self.lies[peer](step) if peer in self.lies else told(step)
        if isinstance(answer, Exception):
            raise answer
        yield answer

    async def collect(self, stamp: Stamp, finished: Finished, holders: Sequence[PeerId]) -> None:
        self.collected.append(list(holders))
        for holder in holders:
            if holder in self.refuse:
                raise self.refuse[holder]
        if self.break_collect:
            self.break_collect -= 1
            raise PeerGone("broken")
        self.log.append(f"sum {stamp.step}")

    def lengthen(self, extensions: tuple[Extension, ...]) -> None:
        assert not extensions

    async def apply(self, commits: Sequence[Commit]) -> None:
        self.log.append(f"apply {commits[0].step}")

    @staticmethod
    def after(at: StateHeader, commits: tuple[Commit, ...]) -> StateHeader:
        honest = commits == committed(at.version)
        return header(at.version + 1) if honest else StateHeader(at.version + 1, Chain("ff" * 32), at.chain, chain(0))

    def run(self, step: int) -> InSync:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            try:
                return runner.run(self.machine.run(header(step), lambda: self.donors))
            finally:
                self.took_s = runner.get_loop().time()


def test_every_step_is_fetched_and_applied_until_the_one_that_is_open() -> None:
    story = Story()
    level = story.run(6)
    assert level == InSync(header(HERE), summed(HERE), committed(HERE, 1))
    steps = [line for step in (6, 7, 8) for line in (f"sum {step}", f"apply {step}", f"at {step + 1}")]
    assert story.log == [*steps, "sum 9"] and not story.failed
    assert all(holders == [A, B, C] for holders in story.collected), "a sum comes from all who hold it"


def test_whoever_is_in_sync_has_nothing_to_follow() -> None:
    assert Story().run(HERE).header == header(HERE)


def test_whoever_is_ahead_of_all_is_not_called_level() -> None:
    story = Story()
    with pytest.raises(NoReplica, match="nobody says"):
        story.run(HERE + 2)
    assert story.log == []


def test_the_first_story_leads_on_and_who_says_nothing_is_named_late() -> None:
    story = Story()
    story.slow_s[A] = 10.0
    assert story.run(HERE - 1).header == header(HERE)
    assert story.took_s < 2.1 and story.log[:3] == ["sum 8", "apply 8", "at 9"]
    assert [peer for peer, error in story.failed if isinstance(error, PeerTimeout)] == [A]
    assert story.collected == [[B, C], [B, C]]


def test_the_larger_group_has_a_moment_to_answer() -> None:
    """A liar that is first leads nobody, as long as the others are not late."""

    def forged(step: int) -> Answer:
        other = replace(summed(step), digest=bytes(32))
        return TrailStep(other, (committed(step)[0], replace(committed(step)[STAGE], digest=bytes(32))))

    story = Story()
    story.lies[A], story.slow_s = (lambda step: forged(step) if step < HERE else told(step)), {B: 0.9, C: 0.9}
    assert story.run(6).header == header(HERE) and all(A not in holders for holders in story.collected[:3])


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
    "commits nobody can apply": lambda step: TrailStep(None, tuple(replace(c, num_tokens=0) for c in committed(step))),
    "not an answer": lambda step: Finished,
}


@pytest.mark.parametrize("lie", FORGERIES.values(), ids=FORGERIES)
def test_what_does_not_fit_together_is_named_and_not_used(lie: Any) -> None:
    story = Story()
    story.lies[A] = lie
    assert story.run(6).header == header(HERE)
    assert {peer for peer, error in story.failed if isinstance(error, BadMessage)} == {A}
    assert all(A not in holders for holders in story.collected[:3])


def test_a_story_that_fits_together_and_differs_needs_the_larger_group() -> None:
    def forged(step: int) -> Answer:
        if step >= HERE:
            return Rejected(RejectCode.NOT_FOUND)
        other = replace(summed(step), digest=bytes(32))
        mine = replace(committed(step)[STAGE], digest=bytes(32))
        return TrailStep(other, (committed(step)[0], mine))

    story = Story()
    story.lies[A] = forged
    assert story.run(6).header == header(HERE) and all(A not in holders for holders in story.collected)


def test_of_equal_groups_the_one_whose_story_led_nowhere_is_not_believed_again() -> None:
    """Alone against one, with the name that wins a tie; the sum it describes is not to be had, or does not apply."""

    def forged(step: int) -> Answer:
        other = replace(summed(step), digest=bytes(32))
        return TrailStep(other, (committed(step)[0], replace(committed(step)[STAGE], digest=bytes(32))))

    for error in (BadMessage(RejectCode.MALFORMED, "no digest"), PeerGone("broken"), Refused(RejectCode.NOT_FOUND)):
        story = Story(A, C)
        story.lies[C] = forged
        story.refuse[C] = error
        assert story.run(6).header == header(HERE)
        assert [holders for holders in story.collected if C in holders] == [[C]], error


def test_a_trail_that_does_not_reach_back_is_said_at_once() -> None:
    story = Story()
    for donor in story.donors:
        story.lies[donor] = lambda step: Rejected(RejectCode.NOT_FOUND) if step < 7 else told(step)
    with pytest.raises(ReplayLogEnds):
        story.run(6)
    assert story.run(7).header == header(HERE)


def test_silence_is_waited_out_for_a_while() -> None:
    story = Story(A)
    story.lies[A] = lambda step: PeerGone("broken")
    with pytest.raises(NoReplica, match="nobody says"):
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
