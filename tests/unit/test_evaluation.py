"""An evaluation through a swarm that trains, halts, refuses or is gone: on virtual time, against scripted replicas."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import pytest

from swarmnet.data.heldout import Tally
from swarmnet.directory import Record, StageStatus
from swarmnet.errors import NoReplica, PeerGone, Refused, RejectCode
from swarmnet.ids import PeerId, RunId, first_chain
from swarmnet.manifest.schema import Averaging, Manifest, Training
from swarmnet.messages import Accepted, Answer, Busy, Control, Gradient, Packed, Process, Rejected, Request
from swarmnet.simulate.clock import VirtualLoop
from swarmnet.trainer.evaluation import GIVE_UP_S, UNSEEN_S, Evaluation, Piece
from swarmnet.trainer.first_stage import FirstStage
from swarmnet.trainer.scoring import _outcome

RUN, ME, GOOD, BAD = RunId("00" * 32), PeerId("me"), PeerId("good"), PeerId("bad")
MANIFEST = Manifest(training=Training(total_steps=50, eval_microbatches=2))
NUM_TOKENS = MANIFEST.training.microbatch_size * MANIFEST.training.sequence_length


@dataclass
class Swarm:
    """Directory and transport. answer(peer, request): what that peer says; version: what all announce."""

    answer: Callable[[PeerId, Process], Answer]
    version: int = 20
    peers: tuple[PeerId, ...] = (GOOD,)
    asked: list[tuple[PeerId, Process]] = field(default_factory=list)

    async def publish(self, record: Record) -> None:
        raise AssertionError("whoever only asks announces nothing")

    async def records(self) -> tuple[Record, ...]:
        status = StageStatus(0, self.version, first_chain(RUN, 0), synced=True, slots=1)
        return tuple(Record(RUN, peer, 1, (), (status,)) for peer in self.peers)

    def tell(self, peer: PeerId, message: Control) -> None:
        """Nothing is told here."""

    async def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        assert isinstance(request, Process) and request.purpose == "eval"
        self.asked.append((peer, request))
        yield Accepted()
        yield self.answer(peer, request)


def evaluate(swarm: Swarm, tally: Tally, *, count: int = 5, manifest: Manifest = MANIFEST) -> float:
    """Run one, on virtual time; how long it took."""
    stage = FirstStage(ME, manifest, transport=swarm, directory=swarm, rerouted=lambda fields: None)
    evaluation = Evaluation(
        stage, lambda number: Piece((Packed("int32", (1,), bytes([number])),), 1), count, tally=tally
    )
    loop = VirtualLoop()
    try:
        loop.run_until_complete(evaluation.run())
    except* NoReplica as group:
        raise group.exceptions[0] from group
    else:
        return loop.time()
    finally:
        loop.close()


def loss(peer: PeerId, request: Process) -> Answer:
    return Gradient(2.0 * NUM_TOKENS, NUM_TOKENS)


def test_all_are_scored_by_the_newest_version_with_indexes_the_replicas_take() -> None:
    swarm = Swarm(loss)
    tally = Tally()
    evaluate(swarm, tally)
    assert (tally.loss, tally.num_microbatches, tally.versions) == (2.0, 5, {20: 5 * NUM_TOKENS})
    assert [request.index for _, request in swarm.asked] == [0, 1, 0, 1, 0]
    assert {request.step for _, request in swarm.asked} == {20}


def test_where_steps_overlap_the_step_is_the_one_that_is_computed_on_those_weights() -> None:
    overlap = MANIFEST.model_copy(update={"averaging": Averaging(sync="overlap", overlap_after=0)})
    swarm = Swarm(loss)
    tally = Tally()
    evaluate(swarm, tally, manifest=overlap)
    assert {request.step for _, request in swarm.asked} == {21} and set(tally.versions) == {20}


def test_weights_that_move_on_are_followed_and_told() -> None:
    def answer(peer: PeerId, request: Process) -> Answer:
        if len(swarm.asked) == 4:
            swarm.version = 21
        return Rejected(RejectCode.STALE, version=21) if request.step < swarm.version else loss(peer, request)

    swarm = Swarm(answer)
    tally = Tally()
    evaluate(swarm, tally)
    assert tally.num_microbatches == 5 and tally.versions == {20: 3 * NUM_TOKENS, 21: 2 * NUM_TOKENS}


@pytest.mark.parametrize("tells", [True, False])
def test_announcements_that_are_behind_are_not_waited_for(tells: bool) -> None:
    """It is always two versions further than anybody announces; a refusal further on does not say which."""

    def answer(peer: PeerId, request: Process) -> Answer:
        now = swarm.version + 2
        return Rejected(RejectCode.STALE, version=now if tells else -1) if request.step < now else loss(peer, request)

    swarm = Swarm(answer)
    tally = Tally()
    assert evaluate(swarm, tally) == 0.0 and tally.versions == {22: 5 * NUM_TOKENS}
    assert {request.step for _, request in swarm.asked} == ({20, 22} if tells else {20, 21, 22})
    assert [request.step for _, request in swarm.asked[-2:]] == [22, 22]  # what was reached is begun with


def test_a_version_that_only_a_liar_tells_of_is_not_waited_for_long() -> None:
    def answer(peer: PeerId, request: Process) -> Answer:
        if peer == BAD:
            return Rejected(RejectCode.STALE, version=49) if len(swarm.asked) == 1 else Busy(0.05, 20)
        return loss(peer, request) if request.step == 20 else Busy(0.05, 20)

    swarm = Swarm(answer, peers=(BAD, GOOD))
    tally = Tally()
    took = evaluate(swarm, tally, count=1)
    assert swarm.asked[0][0] == BAD and UNSEEN_S <= took < GIVE_UP_S and set(tally.versions) == {20}


@pytest.mark.parametrize("trouble", [PeerGone("refused", definite=True), Rejected(RejectCode.NOT_READY)])
def test_a_replica_that_is_gone_or_lacks_its_state_does_not_matter(trouble: PeerGone | Rejected) -> None:
    def answer(peer: PeerId, request: Process) -> Answer:
        if peer == BAD:
            if isinstance(trouble, PeerGone):
                raise trouble
            return trouble
        return loss(peer, request)

    swarm = Swarm(answer, peers=(BAD, GOOD))
    tally = Tally()
    evaluate(swarm, tally, count=8)
    assert tally.num_microbatches == 8 and {peer for peer, _ in swarm.asked} == {BAD, GOOD}


def test_what_all_refuse_is_an_error() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        evaluate(Swarm(lambda peer, request: Rejected(RejectCode.MALFORMED, "no word")), Tally())
    assert caught.group_contains(Refused, match="no word")


@pytest.mark.parametrize("peers", [(), (GOOD,)])
def test_nobody_left_to_ask_ends_the_wait(peers: tuple[PeerId, ...]) -> None:
    def gone(peer: PeerId, request: Process) -> Answer:
        raise PeerGone("refused", definite=True)

    words = "a stage may lack replicas" if peers else "nobody announces the run any more"
    with pytest.raises(NoReplica, match=f"no microbatch was scored for {GIVE_UP_S:g} s: {words}"):
        evaluate(Swarm(gone, peers=peers), Tally())


def test_what_ends_an_evaluation_is_told_from_a_bug() -> None:
    async def fails(*errors: Exception) -> None:
        raise ExceptionGroup("tasks", [ExceptionGroup("inner", list(errors))])

    def outcome(*errors: Exception) -> object:
        loop = VirtualLoop()
        try:
            return loop.run_until_complete(_outcome(fails(*errors)))
        finally:
            loop.close()

    named = NoReplica("nobody")
    assert outcome(named) is named
    with pytest.raises(ExceptionGroup):
        outcome(named, KeyError("a bug"))
