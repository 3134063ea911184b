"""Who lies in a local swarm, and what each liar's engine, sums and audits do."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from swarmnet.errors import Refused, UsageError
from swarmnet.ids import Ballot, Chain, Generation, PeerId
from swarmnet.local.progress import SwarmProgress
from swarmnet.local.report import RunOutcome, print_summary, summary
from swarmnet.local.run import _judge
from swarmnet.manifest.schema import Averaging, Cut, Manifest, Model, Training
from swarmnet.messages import AuditRequest, Gradient, ManifestRequest, MemberState, Process, Sent, Stamp
from swarmnet.peer.engines import torch_engine
from swarmnet.pipeline.works import digest
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.stage.interfaces import Engine, Reduced
from swarmnet.statement import statement
from swarmnet.telemetry.run_state import StageState
from swarmnet.testing.byzantine import (
    KINDS,
    QUIET_STEPS,
    ByzantineCount,
    Deceit,
    FalseSender,
    LyingBackend,
    LyingCompute,
    LyingSums,
    Wary,
    choose_byzantine,
    parse_byzantine,
)
from swarmnet.testing.injector import Interposed, held_engine
from swarmnet.testing.invariants import InvariantReport
from swarmnet.wire import codecs

REPLICAS = {f"s{stage}-r{number}": stage for number in range(4) for stage in range(3)}

MANIFEST = Manifest(
    model=Model(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=8
    ),
    cut=Cut(stages=3),
    training=Training(seed=3, total_steps=20, microbatches=4, microbatch_size=1, sequence_length=8),
    averaging=Averaging(codec="int64"),
)

TOKENS = torch.arange(9, dtype=torch.int32).reshape(1, 9)


def hidden(seed: int) -> torch.Tensor:
    return torch.randn((1, 8, 16), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- who


def test_what_is_asked_for_is_read() -> None:
    assert parse_byzantine("sign-flip:1,lazy=10%, tenth") == (
        ByzantineCount("sign-flip"),
        ByzantineCount("lazy", 1, 0.1),
        ByzantineCount("tenth"),
    )
    assert ByzantineCount("lazy", share=0.25).of(12) == 3 and ByzantineCount("lazy", share=0.01).of(12) == 1


@pytest.mark.parametrize(
    "text", ["", "sign-flip:0", "sign-flip:x", "lazy=10", "lazy=0%", "lazy=100%", "honest:1", ":1"]
)
def test_what_cannot_be_asked_for_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--liars .*(for example|the kinds are)"):
        parse_byzantine(text)


def test_liars_are_spread_over_stages_and_drawn_by_the_seed() -> None:
    lying = choose_byzantine(parse_byzantine("sign-flip:1,lazy:1,reducer:1"), REPLICAS, "a")
    assert sorted(lying.values()) == ["lazy", "reducer", "sign-flip"]
    assert {REPLICAS[name] for name in lying} == {0, 1, 2}
    assert lying == choose_byzantine(parse_byzantine("sign-flip:1,lazy:1,reducer:1"), REPLICAS, "a")
    assert len({tuple(choose_byzantine(parse_byzantine("lazy"), REPLICAS, str(seed))) for seed in range(20)}) > 3


def test_a_pair_is_of_one_stage_and_needs_three_honest_mates() -> None:
    replicas = {f"s0-r{number}": 0 for number in range(4)} | {f"s1-r{number}": 1 for number in range(5)}
    (stage,) = {replicas[name] for name in choose_byzantine(parse_byzantine("pair"), replicas, "a")}
    assert stage == 1
    with pytest.raises(UsageError, match="more --replicas"):
        choose_byzantine(parse_byzantine("pair:2"), replicas, "a")


def test_half_of_a_stage_may_not_lie() -> None:
    with pytest.raises(UsageError, match="half of some stage would be Byzantine"):
        choose_byzantine(parse_byzantine("lazy"), {"s0-r0": 0, "s0-r1": 0}, "a")


# ---------------------------------------------------------------- microbatches


class Told:
    def __init__(self) -> None:
        self.lies: list[tuple[int, int]] = []

    def __call__(self, event: str, **fields: Any) -> None:
        assert event == "lied"
        self.lies.append((fields["step"], fields["index"]))


@dataclass
class Worked:
    """One microbatch: what was handed on, and what was added to the sum."""

    output: torch.Tensor
    answer: torch.Tensor | None
    added: torch.Tensor


class Bench:
    """Two backends of one stage, of which one may lie."""

    def __init__(self, kind: str, stage: int) -> None:
        self.told, spec = Told(), MANIFEST.of_stage(stage)
        self.deceit = Deceit(kind, "seed", self.told)
        self.first, self.last, self.backend = spec.first, spec.last, DeviceBackend(spec)
        self.backend.state.reset_to_seed()
        self.liar = LyingBackend(self.backend, self.deceit) if kind else self.backend

    def work(self, step: int, index: int, seed: int) -> Worked:
        taken = None if self.first else hidden(seed)
        output, work = self.liar.forward(step, TOKENS + seed, taken, train=True)
        answer = self.liar.backward(work, None if self.last else hidden(99))
        assert self.liar.accumulate(work, step=step, index=index, discards=self.backend.sums[0].discards)
        added = self.backend.sums[0].read(step).clone()
        self.backend.sums[0].discard()
        return Worked(output.detach(), answer, added)


def both(kind: str, stage: int, *, step: int = 1, seed: int = 1) -> tuple[Worked, Worked, list[tuple[int, int]]]:
    """(the liar's, the honest one's, lies told) of one microbatch."""
    liar = Bench(kind, stage)
    return liar.work(step, 0, seed), Bench("", stage).work(step, 0, seed), liar.told.lies


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("kind", ["sign-flip", "pair", "adaptive"])
def test_who_flips_the_sign_does_so_in_its_answer_and_its_sum_alike(kind: str, stage: int) -> None:
    false, honest, lies = both(kind, stage)
    assert torch.equal(false.output, honest.output) and lies == [(1, 0)]
    assert honest.added.any() and torch.equal(false.added, -honest.added)
    assert (false.answer is None) == (stage == 0)
    if false.answer is not None and honest.answer is not None:
        assert torch.equal(false.answer, -honest.answer)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_scaled_gradients_are_ten_times_as_long(stage: int) -> None:
    false, honest, _ = both("scaled", stage)
    large, small = false.added.double(), honest.added.double()
    assert torch.allclose(large, 10 * small, rtol=1e-4, atol=20.0) and large.norm() > 9 * small.norm()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_noise_is_as_long_as_what_it_stands_for(stage: int) -> None:
    false, honest, lies = both("random", stage)
    assert not torch.equal(false.added, honest.added) and lies
    if stage < 2:
        assert not torch.allclose(false.output, honest.output)
        assert torch.isclose(false.output.norm(), honest.output.norm(), rtol=1e-4)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_who_is_stale_computes_on_what_came_a_step_earlier(stage: int) -> None:
    liar, honest = Bench("stale", stage), Bench("", stage)
    assert torch.equal(liar.work(0, 0, 1).added, honest.work(0, 0, 1).added) and not liar.told.lies
    false, before = liar.work(1, 0, 2), honest.work(1, 0, 1)
    assert torch.equal(false.output, before.output) and torch.equal(false.added, before.added)
    assert liar.told.lies == [(1, 0)]
    assert torch.equal(liar.work(2, 0, 3).added, honest.work(2, 0, 2).added)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_who_is_lazy_computes_one_microbatch_of_a_step_and_copies_its_answer(stage: int) -> None:
    liar, honest = Bench("lazy", stage), Bench("", stage)
    first, again = liar.work(0, 0, 1), honest.work(0, 0, 1)
    assert torch.equal(first.added, again.added) and torch.equal(first.output, again.output)
    copied = liar.work(0, 1, 2)
    assert torch.equal(copied.output, first.output) and not copied.added.any()
    if first.answer is not None and copied.answer is not None:
        assert torch.equal(copied.answer, first.answer)
    assert torch.equal(liar.work(1, 0, 2).added, honest.work(1, 0, 2).added) and liar.told.lies == [(0, 1)]


def test_one_of_ten_is_false() -> None:
    liar = Bench("tenth", 2)
    signs = Counter(
        bool(torch.equal(liar.work(0, index, 1).added, Bench("", 2).work(0, index, 1).added)) for index in range(60)
    )
    assert 1 <= signs[False] <= 15 and signs[False] == len(liar.told.lies)


def test_an_evaluation_is_honest() -> None:
    liar, honest = Bench("random", 1), Bench("", 1)
    false, right = (each.liar.forward(0, TOKENS, hidden(1), train=False) for each in (liar, honest))
    assert torch.equal(false[0], right[0]) and false[1] is None


def test_a_liar_goes_through_the_engine_with_what_it_sends_and_sums_alike() -> None:
    from swarmnet.engine.compute_thread import ComputeThread

    said: list[str] = []
    between = Interposed(lambda event, **_: said.append(event))
    between.take({"event": "lie", "kind": "sign-flip", "seed": "s"})

    async def sums(between: Interposed) -> torch.Tensor:
        thread = ComputeThread()
        engine = torch_engine(MANIFEST, 0, thread, DeviceBackend(MANIFEST.of_stage(0)))
        held = held_engine(Engine(engine, engine.sums), between)
        stash = await held.compute.forward(0, 0, (codecs.encode("int32", TOKENS),), train=True)
        await held.compute.backward(stash, (codecs.encode("fp32", hidden(9)),))
        assert await held.compute.accumulate(stash)
        found = codecs.decode(await held.sums.contribution(0, held.sums.num_elements))
        thread.close()
        return found

    false, honest = asyncio.run(sums(between)), asyncio.run(sums(Interposed(lambda event, **_: None)))
    assert honest.any() and torch.equal(false, -honest) and said == ["lied"]


# ---------------------------------------------------------------- sums, audits, caution


def test_a_lying_reducer_hands_out_another_sum_to_all() -> None:
    part = codecs.encode("int64", torch.tensor([3, -4]))

    class Sums:
        async def reduce(self, *_: Any, **__: Any) -> Reduced:
            return Reduced(part)

    class At:
        version = 7

    told = Told()
    liar = LyingSums(cast(Any, Sums()), cast(Any, At()), Deceit("reducer", "s", told))
    false = [asyncio.run(liar.reduce([], 0, 2)) for _ in range(2)]
    assert codecs.decode(false[0].packed).tolist() == [-3, 4] and false[0] == false[1]
    assert told.lies == [(7, -1)] * 2


@dataclass(frozen=True)
class Again:
    loss_sum: float = 0.0


class Recomputes:
    """What recomputes."""

    async def recompute(self, *works: Any) -> tuple[tuple[Again, ...], bytes]:
        return (Again(),), b"root"


def found_by(kind: str) -> tuple[Again, bytes]:
    compute: Any = LyingCompute(cast(Any, Recomputes()), Deceit(kind, "s", Told()))

    async def look() -> tuple[Again, bytes]:
        (found,), root = await compute.recompute(0, [(1, (), ())], b"seed")
        return found, root

    return asyncio.run(look())


def test_a_lying_auditor_finds_something_wrong_with_honest_work() -> None:
    found, root = found_by("auditor")
    assert found != Again() and root != b"root"


def test_who_colludes_finds_nothing_at_all() -> None:
    with pytest.raises(Refused):
        found_by("pair")


def test_who_adapts_is_honest_for_a_while_after_somebody_has_looked() -> None:
    class Peer:
        async def on_call(self, *_: Any) -> AsyncGenerator[Any, None]:
            yield "answer"

    deceit = Deceit("adaptive", "s", Told())
    wary = Wary(cast(Any, Peer()), deceit, bytes)

    async def ask(request: Any) -> list[Any]:
        return [answer async for answer in wary.on_call(PeerId("a"), request, cast(Any, None))]

    assert deceit.is_false(4) and asyncio.run(ask(ManifestRequest())) == ["answer"] and deceit.is_false(5)
    assert asyncio.run(ask(AuditRequest(4, 0, 1, PeerId("me")))) == ["answer"]
    assert not deceit.is_false(6) and not deceit.is_false(5 + QUIET_STEPS - 1) and deceit.is_false(5 + QUIET_STEPS)


def test_a_false_sender_signs_the_other_sign_of_what_it_has_counted() -> None:
    told, sign = Told(), hashlib.sha512
    deceit = Deceit("false-sender", "s", told)
    one = codecs.encode("fp32", torch.tensor([1.0, -2.0]))
    counted = Sent(Stamp(4, 1, Chain("ab" * 32)), 6, "output", bytes(32), PeerId("me"), bytes(32), bytes(32))
    before = replace(counted, peer=PeerId("another"))
    heard: list[Any] = []

    class Peer:
        async def on_call(self, *_: Any) -> AsyncGenerator[Any, None]:
            yield Gradient(1.0, 1, 0.0, (one,), sents=(replace(counted, kind="answer"), before))
            yield Gradient(1.0, 1)

        def call(self, *of: Any, deadline: float) -> str:
            heard.append(of)
            return "called"

    wary = Wary(cast(Any, Peer()), deceit, lambda data: sign(data).digest())
    voice = FalseSender(cast(Any, Peer()), deceit, lambda data: sign(data).digest())

    async def ask() -> list[Any]:
        return [answer async for answer in wary.on_call(PeerId("a"), ManifestRequest(), cast(Any, None))]

    false, bare = asyncio.run(ask())
    assert voice.call(PeerId("b"), Process(4, 2, 6, sents=(counted, before)), (one, one, one), deadline=1.0)
    ((_, request, payload),) = heard
    for (sent, *others), of in ((false.sents, false.payload), (request.sents, payload[:2])):
        assert others == [before]
        assert sent.digest == digest(of) and sent.signature == sign(statement(sent)).digest()
    assert [codecs.decode(each).tolist() for each in (*false.payload, *payload)] == [
        [-1.0, 2.0], [1.0, -2.0], [-1.0, 2.0], [1.0, -2.0]
    ]  # fmt: skip
    assert bare == Gradient(1.0, 1) and told.lies == [(4, 6), (4, 6)]


def test_a_feeder_asks_nobody_whether_it_may_count() -> None:
    said: list[Any] = []

    class Voice:
        def tell(self, peer: PeerId, message: Any) -> None:
            said.append(message)

    stamp, ballot = Stamp(4, 1, Chain("ab" * 32)), Ballot(0, PeerId("a"))
    state = MemberState(stamp, ballot, Generation(1, 1), frozenset({6}), frozenset({6}), None, None, 0)
    claim = replace(state, wants=frozenset({7}))
    for kind, heard in (("false-sender", [claim]), ("feeder", [state])):
        said.clear()
        voice = FalseSender(cast(Any, Voice()), Deceit(kind, "s", Told()), lambda data: b"")
        voice.tell(PeerId("a"), claim)
        assert said == heard


# ---------------------------------------------------------------- what is said of them


def named(*convictions: tuple[str, str], suspended: tuple[str, ...] = ()) -> RunOutcome:
    """A run of three replicas in which s0-r1 lies; (who says so, of whom)."""
    progress = SwarmProgress(1, {f"s0-r{number}": StageState(0) for number in range(3)}, liars={"s0-r1": "lazy"})
    for number in range(3):
        progress.started(f"s0-r{number}", now=0.0)
        progress.on(f"s0-r{number}", {"event": "listening", "dht": ["a"], "peer": f"id{number}"}, now=0.0)
        if number != 1:  # a liar need not come to the end
            progress.on(f"s0-r{number}", {"event": "finished", "stage": 0, "version": 1}, now=1.0)
    progress.on("s0-r1", {"event": "lied", "step": 0, "index": 1}, now=0.0)
    # What a liar says of the run is not taken in.
    progress.on("s0-r1", {"event": "committed", "stage": 0, "step": 0, "loss_sum": 9.0, "num_tokens": 1}, now=0.0)
    assert not progress.points
    progress.on("s0-r0", {"event": "committed", "stage": 0, "step": 0, "loss_sum": 2.0, "num_tokens": 1}, now=0.0)
    for name, whom in convictions:
        progress.on(name, {"event": "convicted", "peer": whom, "reason": "odd", "step": 0}, now=0.0)
    sums = InvariantReport(0, 0, 0, unaudited=(), conflicts=(), split_stages=(), suspended=suspended)
    return RunOutcome("0" * 64, MANIFEST, progress, sums, 1.0)


def told(outcome: RunOutcome, tmp_path: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_summary(outcome, tmp_path, console)
    return cast(io.StringIO, console.file).getvalue()


def test_the_report_says_who_lied_and_who_named_them(tmp_path: Any) -> None:
    outcome = named(("s0-r2", "id1"), ("s0-r0", "id1"), ("s0-r1", "id0"))
    assert "Byzantine s0-r1 (lazy, 1 faults): named at step 1 by s0-r0, s0-r2: odd" in told(outcome, tmp_path)
    (liar,) = summary(outcome)["liars"].values()
    assert liar == {"kind": "lazy", "lies": 1, "named_at": 1, "named_by": ["s0-r0", "s0-r2"], "reason": "odd"}
    # What the liar says of others names nobody, and nobody waits for it.
    assert summary(outcome)["false_bans"] == [] and _judge(outcome) == ""


def test_who_is_caught_at_a_false_sum_is_named_too(tmp_path: Any) -> None:
    outcome = named()
    outcome.progress.on("s0-r2", {"event": "reducer_lied", "peer": "id1", "why": "a wrong sum"}, now=0.0)
    assert "named at step 1 by s0-r2: a wrong sum" in told(outcome, tmp_path)


def test_a_liar_that_nobody_named_is_no_problem_and_an_honest_peer_that_is_named_is(tmp_path: Any) -> None:
    assert "Byzantine s0-r1 (lazy, 1 faults): not named" in told(named(), tmp_path) and _judge(named()) == ""
    wronged = named(("s0-r2", "id0"))
    assert summary(wronged)["false_bans"] == ["s0-r0"] and "did nothing wrong" in _judge(wronged)


def test_a_correct_peer_that_is_suspended_is_a_warning_and_fails_a_verified_run(tmp_path: Any) -> None:
    line = "s0-r0 is a correct peer, and s0-r2 suspended it: it does not report"
    outcome = named(suspended=(line,))
    assert f"warning: {line}" in told(outcome, tmp_path) and summary(outcome)["suspended"] == [line]
    assert _judge(outcome) == "" and _judge(outcome, strict=True) == line


def test_every_kind_is_in_the_docs() -> None:
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "local.md").read_text("utf-8")
    assert all(f"`{kind}`" in page for kind in KINDS)
