"""A trainer: what it feeds and how it waits, its evaluations beside feeding and at the end, and what it publishes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet import telemetry
from swarmnet.directory import Record, StageStatus
from swarmnet.errors import PeerGone, Refused, RejectCode
from swarmnet.ids import PeerId, RunId, first_chain
from swarmnet.manifest.extension import Horizon, Notices
from swarmnet.manifest.schema import Cut, Manifest, Training
from swarmnet.manifest.timers import Timers
from swarmnet.messages import Accepted, Gradient, History, HistoryRequest, Packed, Process, Rejected, Running
from swarmnet.net.admission import Admissions
from swarmnet.net.nat.dial_back import Proofs
from swarmnet.net.records import unserved, waiting_for_stages
from swarmnet.stage.canonical import rate_of
from swarmnet.telemetry.figures import Evaluation
from swarmnet.telemetry.journal import remind
from swarmnet.telemetry.run_state import RunState
from swarmnet.testing.doubles import FakeDirectory, FakeTransport, Script, run_virtual
from swarmnet.testing.virtual_swarm import SimulatedSigner
from swarmnet.trainer.evaluations import Evaluations
from swarmnet.trainer.scores import TOLERANCE, NoScore, same, score
from swarmnet.trainer.shares import FedShares
from swarmnet.trainer.trainer import Trainer, feeder
from swarmnet.transport import ReadPayload


def now() -> float:
    return asyncio.get_running_loop().time()


RUN, ME, REPLICA = RunId("00" * 32), PeerId("trainer"), PeerId("replica")
TOKENS = (Packed("int32", (1,), b"\0" * 4),)


def open_host(directory: FakeDirectory) -> Any:
    """A `PeerHost` of an open run, and reached by all."""
    host = SimpleNamespace(me=ME, run=RUN, incarnation=2, signer=SimulatedSigner(ME), proofs=Proofs())
    host.numerics, host.hides, host.told_of_others = "trainer", False, False
    host.directory, host.admissions, host.notices = directory, Admissions(RUN), Notices()
    host.wall, host.record = lambda: 0.0, lambda: Record(RUN, ME, 2, (), ())
    host.hide = lambda say: asyncio.sleep(0)
    return host


class Feeding(NamedTuple):
    """What came of it. events: (seconds, event, fields)."""

    events: list[tuple[float, str, dict[str, Any]]]
    transport: FakeTransport
    directory: FakeDirectory
    trainer: Trainer
    took_s: float

    @property
    def names(self) -> list[str]:
        return [event for _, event, _ in self.events]


def replica(stage: int = 0, version: int = 0, *, synced: bool = True, slots: int = 4, name: str = REPLICA) -> Record:
    """What a replica announces."""
    return Record(
        RUN, PeerId(name), 1, (), (StageStatus(stage, version, first_chain(RUN, stage), synced, slots=slots),)
    )


def fed(
    manifest: Manifest,
    records: Callable[[], Iterable[Record]],
    answer: Callable[[PeerId, Any], Script] = lambda peer, request: None,
    *,
    until_s: float = 1e6,
) -> Feeding:
    """Run a trainer that joins now, to its end or for so long."""
    events: list[tuple[float, str, dict[str, Any]]] = []
    transport, directory = FakeTransport(answer), FakeDirectory(records)

    async def story() -> Feeding:
        trainer = Trainer(
            open_host(directory),
            manifest,
            transport=transport,
            tokens=SimpleNamespace(training=lambda number: TOKENS, evaluation=lambda number: TOKENS),
            on_event=lambda event, fields: events.append((now(), event, fields)),
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until_s):
                await trainer.run()
        return Feeding(events, transport, directory, trainer, now())

    return run_virtual(story())


# ---------------------------------------------------------------- who feeds what

ALL = [PeerId(f"trainer{number}") for number in range(4)]
MINE, OTHER, PHANTOM = ALL[:3]
TIMERS = Timers()


@given(st.integers(1, 4), st.integers(0, 1000), st.integers(1, 40))
def test_shares_cover_a_step_once(count: int, step: int, size: int) -> None:
    trainers = ALL[:count]
    indexes = [index for me in trainers for index in FedShares(me, TIMERS).of(trainers, step, size, now=0.0)]
    assert sorted(indexes) == list(range(size))


def test_a_step_is_late_after_twice_its_usual_time() -> None:
    mine = FedShares(MINE, TIMERS)
    assert mine.patience_s() == TIMERS.suspect_s
    for took_s in (10.0, 2.0, 4.0):
        mine.brought([OTHER], took_s=took_s)
    assert mine.patience_s() == 8.0
    for _ in range(9):
        mine.brought([OTHER], took_s=0.1)
    assert mine.patience_s() == TIMERS.beat_s


def test_who_leaves_two_steps_undone_has_no_share_for_a_minute_and_then_for_two() -> None:
    mine, trainers = FedShares(MINE, TIMERS), [MINE, OTHER]
    assert mine.missed([OTHER], now=0.0) == []
    mine.brought([OTHER], took_s=1.0)
    assert mine.missed([OTHER], now=1.0) == [], "not two in a row"
    assert mine.missed([OTHER], now=2.0) == [OTHER]
    assert mine.feeding(trainers, now=61.9) == [MINE]
    assert sorted(mine.of(trainers, 7, 9, now=61.9)) == list(range(9))
    assert mine.feeding(trainers, now=62.0) == trainers
    assert mine.missed([OTHER], now=70.0) == [OTHER]
    assert mine.feeding(trainers, now=189.9) == [MINE] and mine.feeding(trainers, now=190.0) == trainers
    mine.brought([OTHER], took_s=1.0)
    for at in (1e6, 1e6 + 1):
        mine.missed([OTHER], now=at)
    assert mine.feeding(trainers, now=1e6 + 61) == trainers, "it has fed since: a minute again"


def test_identities_of_a_liar_are_forgotten() -> None:
    mine = FedShares(MINE, TIMERS)
    for number in range(2000):
        mine.missed([PeerId(f"phantom{number}")] * 2, now=float(number))
    assert len(mine._misses) == len(mine._left_out) == 256


def test_two_that_leave_each_other_out_begin_with_their_own() -> None:
    """With a phantom beside them neither knows who is missing, and both feed all."""
    orders = []
    for me, other in ((MINE, OTHER), (OTHER, MINE)):
        mine = FedShares(me, TIMERS)
        for _ in range(2):
            mine.missed([other, PHANTOM], now=0.0)
        orders.append(mine.of([MINE, OTHER, PHANTOM], 3, 60, now=1.0))
    one, two = orders
    assert sorted(one) == sorted(two) == list(range(60))
    assert not set(one[:10]) & set(two[:10])


# ---------------------------------------------------------------- a run that lacks a stage, and one that is complete

WAITING = Manifest(cut=Cut(stages=2), training=Training(eval_every=0))
NOBODY, ONLY_LAST, WITHOUT_WEIGHTS, COMPLETE = (), ((1, True),), ((0, False), (1, True)), ((0, True), (1, True))
There = tuple[float, tuple[tuple[int, bool], ...]]
"""From when on who is there: (seconds, ((stage, synced), ...)). Nobody answers."""


def there(*story: There) -> list[Record]:
    """Who announces itself now."""
    _, stages = [entry for entry in story if entry[0] <= now()][-1]
    return [replica(stage, synced=synced, name=f"p{stage}") for stage, synced in stages]


def said(*story: There, until: float) -> list[tuple[float, object]]:
    """When a trainer said what of the run it found: what it waits for, None if it is complete."""
    events = fed(WAITING, lambda: there(*story), until_s=until).events
    return [(at, fields.get("reason")) for at, event, fields in events if event in ("waiting", "complete")]


def test_what_lacks_is_said_when_it_lasts_and_when_it_changes() -> None:
    found = said((0.0, NOBODY), (20.0, ONLY_LAST), (40.0, WITHOUT_WEIGHTS), (60.0, COMPLETE), until=90.0)
    times, reasons = zip(*found, strict=True)
    assert reasons == (
        "no peer serves stage 0, 1 yet",
        "no peer serves stage 0 yet",
        "no replica of stage 0 has its weights yet",
        None,
    )
    assert times == pytest.approx([3.5, 23.0, 43.0, 60.0], abs=1.0)
    assert said((0.0, COMPLETE), (20.0, NOBODY), (21.0, COMPLETE), until=40.0) == []


def test_a_run_that_ends_without_it_is_done_although_nobody_may_be_called() -> None:
    """It was suspended, say, and all that it called are given up for minutes."""
    timers = {"long_silence_s": 1800.0}
    manifest = WAITING.model_copy(update={"protocol": WAITING.protocol.model_copy(update=timers)})
    last = lambda: manifest.training.total_steps if now() >= 60.0 else 0  # noqa: E731
    ended = fed(manifest, lambda: [replica(stage, version=last(), name=f"p{stage}") for stage in (0, 1)])
    assert ended.names[-1] == "done" and ended.took_s == pytest.approx(60.0, abs=manifest.protocol.timers.beat_s)
    assert {name for name in ended.names if name != "done"} == {"rerouted"}


def test_the_advice_can_be_typed() -> None:
    assert unserved((), num_stages=4, mine=(1,)) == (0, 2, 3)
    advice = str(waiting_for_stages((0, 2, 3))["advice"])
    assert "unless one is just starting, start a peer with --stage 0,2,3 and" in advice
    advice = str(waiting_for_stages((0,), stranger_to="ab" * 32)["advice"])
    assert advice.startswith("start the peers of these stages; if") and "in run abababababab: compare" in advice


def test_a_wait_is_said_again_every_minute_while_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    async def wait() -> None:
        state = RunState()
        running = asyncio.create_task(remind(telemetry.get("swarmnet.test"), state))
        for seconds, event, fields in (
            (0.0, "waiting", {"stage": 1, "reason": "nobody has it"}),
            (130.0, "waiting", {"reason": "no peer serves stage 2 yet"}),
            (60.0, "synced", {"stage": 1}),
            (600.0, "complete", {"peers": 3}),
        ):
            state.on(event, fields, now=now())
            await asyncio.sleep(seconds)
        running.cancel()

    with caplog.at_level(logging.INFO, "swarmnet"):
        run_virtual(wait())
    shown = [record.swarmnet_fields for record in caplog.records]
    assert sorted(each["reason"] for each in shown) == ["no peer serves stage 2 yet"] * 3 + ["nobody has it"] * 2
    assert shown[-1]["since"] == "3 min"


def progress(until_s: float, *, step_s: float = 1.0) -> list[dict[str, Any]]:
    """What is said of a run of a step a second. step_s: what its peers measure."""
    changes: dict[str, Any] = {"steps": 600, "step_s": step_s, "tokens_per_second": 64.0}
    records = lambda: [replace(each, loss=(int(now()), 5.0), **changes) for each in there((0.0, COMPLETE))]  # noqa: E731
    return [fields for _, event, fields in fed(WAITING, records, until_s=until_s).events if event == "progress"]


def test_where_the_run_is_is_said_now_and_then() -> None:
    found = progress(25.0)
    steps = [fields["step"] for fields in found]
    assert steps == pytest.approx([0, 10, 20], abs=1)
    warm_up = [rate_of(WAITING.optimizer, step, Horizon(600)) for step in steps]
    assert [fields["learning_rate"] for fields in found] == warm_up
    assert found[-1] == {
        "step": steps[-1],
        "steps": 600,
        "loss": 5.0,
        "learning_rate": warm_up[-1],
        "tokens_per_second": 64.0,
        "eta_s": 599 - steps[-1],
    }
    found = progress(5.0, step_s=0.0)
    assert found and not any({"eta_s", "tokens_per_second"} & fields.keys() for fields in found)


# ---------------------------------------------------------------- evaluations beside feeding


def test_the_share_is_fed_beside_an_evaluation_but_for_its_last_microbatch() -> None:
    """With that the step could end, and the weights that are measured be gone."""
    training = Training(total_steps=3, microbatches=4, eval_every=1, eval_microbatches=2)
    num_tokens = training.microbatch_size * training.sequence_length

    def answered(peer: PeerId, request: Process) -> list[Script]:
        """Training at once, an evaluation after two seconds; the replica is `Running` meanwhile."""
        waits = 4 if request.purpose == "eval" else 0
        return [Accepted(), *[0.5, Running()] * waits, Gradient(float(num_tokens), num_tokens)]

    swarm = fed(Manifest(cut=Cut(stages=1), training=training), lambda: [replica(slots=8)], answered)
    told = [(name, fields["step"]) for _, name, fields in swarm.events]
    assert told == [*(("evaluated", version) for version in range(4)), ("done", 3)]
    times = [at for _, request, at in swarm.transport.calls if request.purpose == "train" and request.step == 0]
    assert times[:3] == [0.0] * 3 and times[-1] == pytest.approx(4.0), "first looks, and a second one"


Begin = Callable[[int], Any]


def scores(
    ask: Callable[[int], Awaitable[Gradient]], story: Callable[[Evaluations, Begin], Awaitable[None]]
) -> list[tuple[float, str, object]]:
    """What is told while that happens: (seconds, event, version)."""
    told = list[tuple[float, str, object]]()
    host = SimpleNamespace(
        evaluate=lambda version, number, avoid: ask(version),
        numerics=lambda peer: "",
        scored=lambda version, loss: told.append((now(), "scored", version)),
        event=lambda name, fields: told.append((now(), name, fields["step"])),
    )

    async def run() -> None:
        evaluations = Evaluations(1, host, equal_bits=False, rng=random.Random(0))
        async with asyncio.TaskGroup() as group:
            await story(evaluations, lambda version: evaluations.begin(version, group))

    run_virtual(run())
    return told


async def after(seconds: float) -> Gradient:
    await asyncio.sleep(seconds)
    return Gradient(1.0, 1)


def test_scores_are_told_in_their_order_also_if_a_later_one_is_there_first() -> None:
    async def ask(version: int) -> Gradient:
        if version == 1:
            raise Refused(RejectCode.STALE, "gone", peer=REPLICA)
        return await after({0: 5.0, 2: 1.0}[version])

    async def story(evaluations: Evaluations, begin: Begin) -> None:
        for version in range(3):
            begin(version)
        assert await evaluations.end(20.0)
        assert not await evaluations.end(20.0), "none is open"

    told = [("scored", 0), ("evaluated", 0), ("not_evaluated", 1), ("scored", 2), ("evaluated", 2)]
    assert scores(ask, story) == [(10.0, *each) for each in told]


def test_what_is_given_up_is_not_told() -> None:
    async def story(evaluations: Evaluations, begin: Begin) -> None:
        begin(0)
        await asyncio.sleep(1.0)
        evaluations.cancel()
        begin(0)

    assert [at for at, _, _ in scores(lambda version: after(2.0), story)] == [5.0, 5.0]


def test_a_slow_evaluation_is_waited_for_as_long_as_answers_come() -> None:
    async def story(evaluations: Evaluations, begin: Begin) -> None:
        await evaluations.answered([begin(0)], lambda: 3.0)
        assert now() == 4.0, "two looks of 2 s"
        await evaluations.answered([begin(1)], lambda: 1.5)
        assert now() == 5.5
        await evaluations.answered([], lambda: 1.5)

    assert [event for _, event, _ in scores(lambda version: after(2.0), story)] == ["scored", "evaluated"] * 2


def test_the_end_is_not_waited_for_in_vain() -> None:
    async def story(evaluations: Evaluations, begin: Begin) -> None:
        for version in range(3):
            begin(version)
        await evaluations.end(20.0)

    never = scores(lambda version: after(2.0 if version == 0 else 1e6), story)
    assert never == [(4.0, "scored", 0), (4.0, "evaluated", 0), (20.0, "not_evaluated", 1), (20.0, "not_evaluated", 2)]


# ---------------------------------------------------------------- the held-out loss of a run's last weights

STEPS = 50
FINISHED = Manifest(training=Training(total_steps=STEPS, eval_every=20, eval_microbatches=3))
NUM_TOKENS = FINISHED.training.microbatch_size * FINISHED.training.sequence_length
FURTHER = tuple(PeerId(f"replica of {stage}") for stage in range(1, FINISHED.cut.stages))


def loss_of(nats: float) -> Gradient:
    """What a replica answers, per token."""
    return Gradient(nats * NUM_TOKENS, NUM_TOKENS, route=FURTHER)


def finished(answer: Callable[[Process], Script], *others: Record, manifest: Manifest = FINISHED) -> Feeding:
    """A trainer joins a finished run; answer: what its replica says to an evaluation."""
    return fed(manifest, lambda: (replica(version=STEPS), *others), lambda peer, request: [Accepted(), answer(request)])


def remembered(run: Feeding) -> list[object]:
    """What the trainer tells an observer at the end."""

    async def asked() -> list[object]:
        read = ReadPayload((), lambda: asyncio.sleep(0, ()))
        return [answer async for answer in run.trainer.on_call(PeerId("anybody"), HistoryRequest(), read)]

    return run_virtual(asked())


def test_the_last_weights_are_measured_and_published() -> None:
    swarm = finished(lambda request: loss_of(0.5 + request.index))
    *first, again = asked = [request for _, request in swarm.transport.requests]
    assert {(request.step, request.purpose) for request in asked} == {(STEPS, "eval")}
    assert sorted(request.index for request in first) == [0, 1, 2] and not any(request.avoid for request in first)
    assert set(again.avoid) == {REPLICA, *FURTHER}
    measured = {"step": STEPS, "loss": 1.5, "num_tokens": 3 * NUM_TOKENS}
    assert [event[1:] for event in swarm.events] == [("evaluated", measured), ("done", {"step": STEPS})]
    assert swarm.directory.published[-1].eval_loss == (STEPS, 1.5) and swarm.directory.published[-1].trainer
    assert remembered(swarm) == [History(evaluations=(Evaluation(STEPS, 1.5),))]


def test_a_manifest_without_evaluations_has_none() -> None:
    training = FINISHED.training.model_copy(update={"eval_every": 0})
    swarm = finished(lambda request: loss_of(1.0), manifest=FINISHED.model_copy(update={"training": training}))
    assert swarm.names == ["done"] and not swarm.transport.calls


@pytest.mark.parametrize(
    ("answer", "took_s"),
    [
        (Rejected(RejectCode.FINISHED, "no"), 0.5),  # a refusal is an answer
        (Rejected(RejectCode.STALE, "no"), 0.5),
        (PeerGone("refused", definite=True), 15.0),  # nobody left to ask ends the wait
    ],
)
def test_an_evaluation_is_not_waited_for_in_vain(answer: Script, took_s: float) -> None:
    swarm = finished(lambda request: answer)
    assert [event for event in swarm.names if event != "rerouted"] == ["not_evaluated", "done"]
    assert swarm.took_s == pytest.approx(took_s, abs=max(0.5, took_s / 15))


def test_what_a_second_look_contradicts_is_not_published() -> None:
    """By the only route there is: nobody can tell when it was right."""
    swarm = finished(lambda request: loss_of(0.5 if request.avoid else 1.0))
    assert swarm.names == ["eval_disputed", "not_evaluated", "done"]
    (_, _, disputed), (_, _, without), _ = swarm.events
    assert disputed["step"] == STEPS and disputed["losses"] == [1.0, 0.5]
    assert disputed["routes"] == [[REPLICA, *FURTHER]] * 2
    reason = f"microbatch {disputed['number']} has another loss by another route, and there is no third"
    assert without == {"step": STEPS, "reason": reason}
    assert swarm.directory.published[-1].eval_loss is None and remembered(swarm) == [History()]


@pytest.mark.parametrize("left", [False, True])
def test_the_share_of_a_trainer_that_has_left_is_taken_over(left: bool) -> None:
    names = (PeerId(f"other-{number}") for number in range(100))
    other = next(name for name in names if feeder([name, ME], STEPS, -1) == name)
    record = Record(RUN, other, 3, (), (), trainer=True, finished=left)
    assert finished(lambda request: loss_of(1.0), record).names == (["evaluated", "done"] if left else ["done"])


# ---------------------------------------------------------------- a few microbatches are looked at twice


def look(loss_sum: float, num_tokens: int, *route: PeerId) -> Gradient:
    return Gradient(loss_sum, num_tokens, route=route)


@dataclass
class Stages:
    """Stages of `replicas` each, who compute microbatch n's loss as n + 1 nats; `liars` say something else.

    looks: of all that was asked, by number. disputes: what was heard.
    """

    replicas: tuple[int, ...]
    liars: frozenset[PeerId]
    rng: random.Random
    share: float = 1.0
    looks: list[tuple[int, Gradient]] = field(default_factory=list)
    disputes: list[tuple[int, list[Gradient]]] = field(default_factory=list)

    async def look(self, number: int, around: tuple[PeerId, ...]) -> Gradient:
        route, loss = [], number + 1.0
        for stage, count in enumerate(self.replicas):
            everybody = [PeerId(f"{stage}.{replica}") for replica in range(count)]
            route.append(self.rng.choice([peer for peer in everybody if peer not in around] or everybody))
            if route[-1] in self.liars and self.rng.random() < self.share:
                loss += 0.5
        self.looks.append((number, look(loss, 2, *route)))
        return self.looks[-1][1]

    def alike(self, one: Gradient, other: Gradient) -> bool:
        return same(one, other, numerics=lambda peer: "cpu")

    def disputed(self, number: int, looks: Sequence[Gradient]) -> None:
        self.disputes.append((number, list(looks)))

    def score(self, microbatches: int) -> float | None:
        """What is published."""
        try:
            loss, num_tokens = asyncio.run(score(microbatches, self, self.rng))
        except NoScore:
            return None
        assert num_tokens == 2 * microbatches
        return loss


def honest(microbatches: int) -> float:
    """The loss per token of `Stages`."""
    return (microbatches + 1) / 4


REPLICAS = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@given(REPLICAS, st.integers(1, 40), st.integers())
def test_honest_replicas_are_never_in_dispute(replicas: tuple[int, ...], microbatches: int, seed: int) -> None:
    stages = Stages(replicas, frozenset(), random.Random(seed))
    assert stages.score(microbatches) == honest(microbatches) and not stages.disputes
    # A tenth of them, one at least, and by peers that the first route does not have.
    first, again = stages.looks[:microbatches], stages.looks[microbatches:]
    assert len(again) == max(1, -(-microbatches // 10)) == len({number for number, _ in again})
    for number, second in again:
        pairs = zip(first[number][1].route, second.route, replicas, strict=True)
        assert all((one != other) == (count > 1) for one, other, count in pairs)


@given(st.lists(st.integers(3, 5), min_size=1, max_size=3).map(tuple), st.integers(1, 20), st.integers())
def test_one_liar_among_three_is_gone_around(replicas: tuple[int, ...], microbatches: int, seed: int) -> None:
    """Who lies in every answer: once a second look has met it, the score is the honest one."""
    liar = PeerId(f"{len(replicas) - 1}.0")
    stages = Stages(replicas, frozenset({liar}), random.Random(seed))
    published = stages.score(microbatches)
    assert published is not None
    if stages.disputes:
        assert published == honest(microbatches)
        assert all(len(looks) == 3 and any(liar in look.route for look in looks) for _, looks in stages.disputes)


@given(REPLICAS, st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3))), st.floats(0, 1), st.integers())
def test_nothing_is_published_that_a_second_look_contradicts(
    replicas: tuple[int, ...], liars: set[tuple[int, int]], share: float, seed: int
) -> None:
    named = frozenset(PeerId(f"{stage}.{replica}") for stage, replica in liars)
    stages = Stages(replicas, named, random.Random(seed), share)
    published = stages.score(6)
    if published is None:
        assert stages.disputes
        return
    # It is the last pass: six first looks, and one of them again.
    *first, (number, again) = stages.looks[-7:]
    assert published == sum(look.loss_sum for _, look in first) / 12
    assert again.loss_sum == first[number][1].loss_sum
    for disputed, (one, other, third) in stages.disputes:
        assert third.loss_sum in (one.loss_sum, other.loss_sum)
        odd, right = (one, other) if third.loss_sum == other.loss_sum else (other, one)
        out = set(odd.route) - set(right.route)
        assert not any(out & set(look.route) for _, look in (*first, (disputed, right))), "nobody who was wrong"


def test_weights_that_move_on_while_a_third_is_asked_leave_the_dispute() -> None:
    stages = Stages((3,), frozenset(), random.Random(1))
    answers = iter([look(1.0, 2, PeerId("0.0")), look(2.0, 2, PeerId("0.1")), None])
    stages.look = lambda number, around: asyncio.sleep(0, next(answers))
    with pytest.raises(NoScore, match="moved on"):
        asyncio.run(score(1, stages, stages.rng))
    assert len(stages.disputes) == 1


A, B = PeerId("a"), PeerId("b")


@pytest.mark.parametrize(
    "classes, exact",
    [({A: "cpu", B: "cpu"}, True), ({A: "cpu", B: "cuda"}, False), ({A: "cpu"}, False), ({}, False), (None, False)],
)
def test_bits_are_equal_only_in_one_known_class(classes: dict[PeerId, str] | None, exact: bool) -> None:
    alike = partial(same, numerics=None if classes is None else lambda peer: classes.get(peer, ""))
    one = look(100.0, 8, A)
    assert alike(one, look(100.0, 8, B)) and not alike(one, look(100.0, 9, B))
    assert alike(one, look(100.0 * (1 + TOLERANCE / 2), 8, B)) == (not exact)
    assert not alike(one, look(100.0 * (1 + 2 * TOLERANCE), 8, B))
    # What one peer says twice is equal, whatever its class.
    assert alike(one, look(100.0001, 8, A)) == (classes is None)
