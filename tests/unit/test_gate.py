"""Every message that cannot be true in this run is refused, with a reason; what the run says itself passes."""

import pytest

from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.messages import (
    NONE,
    Commit,
    Committed,
    Control,
    Heartbeat,
    Late,
    LineQuality,
    Measure,
    MemberState,
    Round,
    StagePlan,
    Stamp,
    Trouble,
)
from swarmnet.step.gate import Shape, refusal

LEADER, OTHER = PeerId("leader"), PeerId("other")
SHAPE = Shape(num_stages=2, num_microbatches=4, total_steps=10)
STAMP, BALLOT, GEN = Stamp(3, 1, Chain("0" * 64)), Ballot(2, LEADER), Generation(1, 0)
SOME, REST = frozenset({0, 3}), frozenset({1, 2})


def commit(**changed: object) -> Commit:
    fields = {
        "stage": 1,
        "step": 3,
        "chain": STAMP.chain,
        "id": RoundId(BALLOT, 0),
        "digest": b"x",
        "num_tokens": 8,
        "loss_sum": 4.0,
        "grad_sq_norm": 1.0,
    } | changed
    return Commit(**fields)


def report(line: LineQuality) -> MemberState:
    return MemberState(STAMP, BALLOT, GEN, SOME, SOME, None, None, 0, line=line)


def complaint(trouble: Trouble) -> MemberState:
    return MemberState(STAMP, BALLOT, GEN, SOME, SOME, None, None, 0, trouble=trouble)


def round_of(
    parts: tuple = ((OTHER, GEN, SOME), (LEADER, GEN, REST)), receivers: tuple = (OTHER, LEADER), **changed: object
) -> StagePlan:
    attempt = Round(STAMP, RoundId(BALLOT, 0), parts, receivers, (), **changed)
    return StagePlan(STAMP, BALLOT, attempt=attempt)


GOOD = [
    StagePlan(STAMP, BALLOT, given=SOME, whole=True),
    MemberState(STAMP, BALLOT, GEN, NONE, NONE, None, None, 0, wants=frozenset({3})),
    StagePlan(STAMP, BALLOT, GEN, SOME, ((3, OTHER),)),
    StagePlan(STAMP, BALLOT, GEN, evicted="discard"),
    MemberState(STAMP, BALLOT, GEN, NONE, NONE, None, None, 0, returns=SOME),
    StagePlan(STAMP, BALLOT, execute=frozenset({3})),
    MemberState(STAMP, BALLOT, GEN, SOME, SOME, None, None, 0),
    Committed(commit()),
    Committed(commit(stage=0, step=0, discarded=SOME)),
    round_of(),
    round_of(bandwidths=(1, 10**12)),
    round_of(rows=(2,)),
    round_of(rows=(1, 1)),
    complaint(Trouble(RoundId(BALLOT, 0), (Late(OTHER, True, 10.0),), (OTHER, LEADER))),
    report(LineQuality(10**9, ((OTHER, 1), (LEADER, 50_000)))),
    report(LineQuality(0)),
    Heartbeat(STAMP, 1, True, BALLOT, (commit(),), (commit(stage=0, step=2),)),
    Heartbeat(STAMP, 1, True, BALLOT, numerics="cpu", measure=Measure(3, STAMP.chain, b"d" * 32)),
]

BAD = [
    StagePlan(Stamp(3, 2, STAMP.chain), BALLOT),
    StagePlan(STAMP, Ballot(1 << 40, LEADER)),
    StagePlan(STAMP, Ballot(BALLOT.number + 1, LEADER), attempt=round_of().attempt),
    StagePlan(Stamp(4, STAMP.stage, STAMP.chain), BALLOT, attempt=round_of().attempt),
    MemberState(STAMP, BALLOT, GEN, NONE, NONE, None, None, 0, wants=frozenset({4})),
    StagePlan(STAMP, BALLOT, GEN, frozenset({65535})),
    StagePlan(STAMP, BALLOT, GEN, moved=((4, OTHER),)),
    StagePlan(STAMP, BALLOT, execute=frozenset({4})),
    MemberState(STAMP, BALLOT, GEN, NONE, NONE, None, None, 0, returns=frozenset({4})),
    MemberState(STAMP, BALLOT, GEN, frozenset({9}), SOME, None, None, 0),
    MemberState(STAMP, BALLOT, GEN, SOME, SOME, None, None, 0, frozenset({60000})),
    round_of(receivers=()),
    StagePlan(STAMP, BALLOT, attempt=Round(STAMP, RoundId(BALLOT, 0), (), (), (OTHER,))),
    round_of(receivers=(OTHER, OTHER)),
    round_of(parts=((OTHER, GEN, frozenset()),)),
    round_of(parts=((OTHER, GEN, frozenset({4})),)),
    round_of(discarded=frozenset({7})),
    round_of(parts=((OTHER, GEN, SOME),)),
    round_of(parts=((OTHER, GEN, SOME), (LEADER, GEN, frozenset({1}))), discarded=frozenset({2})),
    round_of(rows=(1,)),
    round_of(rows=(2, 1)),
    round_of(parts=((PeerId("p9"), GEN, SOME),), rows=(1, 1)),
    Committed(commit(stage=2)),
    Committed(commit(step=10)),
    Committed(commit(num_tokens=0)),
    Committed(commit(loss_sum=1e300)),
    Committed(commit(grad_sq_norm=1e308)),
    Committed(commit(discarded=frozenset({4}))),
    Heartbeat(STAMP, 1, True, BALLOT, known=b"\x04"),  # a stage of none of two
    Heartbeat(STAMP, 1, True, BALLOT, wants=b"\x00\x01"),
    Heartbeat(Stamp(3, 3000, STAMP.chain), 1, True, None),
    Heartbeat(Stamp(11, 1, STAMP.chain), 1, True, None),
    Heartbeat(STAMP, 1, True, None, measure=Measure(4, STAMP.chain, b"")),
    Heartbeat(STAMP, 1, True, None, (commit(num_tokens=0),)),
    Heartbeat(STAMP, 1, True, None, (commit(),) * 3),
]


@pytest.mark.parametrize("message", GOOD, ids=lambda message: type(message).__name__)
def test_what_the_run_says_passes(message: Control) -> None:
    assert refusal(LEADER, message, SHAPE, BALLOT, lambda: 0) is None


@pytest.mark.parametrize("message", BAD, ids=lambda message: type(message).__name__)
def test_what_cannot_be_true_is_refused(message: Control) -> None:
    assert refusal(LEADER, message, SHAPE, BALLOT, lambda: 0)


@pytest.mark.parametrize(
    "message",
    [message for message in GOOD if isinstance(message, StagePlan)],
    ids=lambda message: type(message).__name__,
)
def test_only_a_leader_uses_its_ballot(message: Control) -> None:
    assert refusal(OTHER, message, SHAPE, BALLOT, lambda: 0)


def test_a_ballot_far_ahead_is_heard_if_two_mates_have_promised_such_a_one():
    """Else those whom a liar has led far ahead and the others would refuse each other for ever."""
    ahead = Ballot(BALLOT.number + 2000, LEADER)
    message = StagePlan(STAMP, ahead)
    assert refusal(LEADER, message, SHAPE, BALLOT, lambda: 0)
    assert refusal(LEADER, message, SHAPE, BALLOT, lambda: ahead.number - 1) is None
