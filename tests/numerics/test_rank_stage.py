"""The ranks of a mesh train as one process does, whatever they shard; what each holds of it is its share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from further import further
from group_processes import run_group
from mesh_training import (
    CASES,
    CPU,
    MODEL,
    Case,
    Rank,
    Trained,
    batches,
    changes,
    check,
    held_bytes,
    layout_of,
    on_ranks,
    run_of,
    train_alone,
)

from swarmnet.errors import BadMessage, Overflow, RejectCode, UsageError
from swarmnet.ranks.layout import MeshLayout, MeshSplit
from swarmnet.ranks.stage import RankStage
from swarmnet.stage.optimizer_8bit import BLOCK, LEAST
from swarmnet.stage.passes import MemoryPolicy
from tests.contracts.thread_comm import Counted, ThreadComm, run_mesh

T = TypeVar("T")

WHOLE = [(1, 2, "dp"), (1, 4, "zero1"), (1, 2, "zero2"), (1, 4, "zero2")]
SPLIT = [(2, 1, "none"), (2, 2, "dp"), (2, 2, "zero1"), (2, 2, "zero2"), (4, 2, "zero2")]
MESHES = [layout_of(tensor, data, shard) for tensor, data, shard in (*WHOLE, *SPLIT)]
LESS = [layout_of(1, 2, "zero2"), layout_of(2), layout_of(2, 2, "zero2")]
"""Of these, others have the same on more ranks."""
BY_LABEL = pytest.mark.parametrize(
    "layout", [*(each for each in MESHES if each not in LESS), *further(*LESS)], ids=lambda layout: layout.label
)


# ------------------------------------------------------------ the same as one process


@BY_LABEL
def test_five_clipped_steps_equal_those_of_one_process(layout: MeshLayout) -> None:
    manifest = run_of()
    for found in on_ranks(manifest, layout, lambda rank: rank.train()):
        assert min(found.norms) > 2 * manifest.optimizer.clip_norm, "clipped"
        check(found, manifest)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole-tokens", "sequence-parallel"])
@pytest.mark.parametrize("stage", [0, 1, 2], ids=["first", "middle", "head-only"])
def test_a_stage_of_several(stage: int, sequence_parallel: bool) -> None:
    manifest = run_of(stages=3)
    layout = layout_of(2, 2, "zero2", sequence_parallel=sequence_parallel)
    for found, rows in on_ranks(manifest, layout, lambda rank: (rank.train(steps=2), rank.rows), stage=stage):
        check(found, manifest, stage=stage, steps=2, rows=rows)


@pytest.mark.parametrize(
    ("policy", "tied"),
    [
        ("recompute", False),
        ("recompute_layers", True),
        ("selective", True),
        ("offload", False),
        *further(("recompute", True), ("recompute_layers", False), ("selective", False), ("offload", True)),
    ],
)
def test_what_is_kept_for_backward_changes_nothing(policy: str, tied: bool) -> None:
    manifest = run_of(model=MODEL.model_copy(update={"tie_embeddings": tied}))
    for found in on_ranks(
        manifest, layout_of(2, 2, "zero2"), lambda rank: rank.train(steps=2), memory=MemoryPolicy(activations=policy)
    ):
        check(found, manifest, steps=2)


@pytest.mark.parametrize("offload", [False, True], ids=["on-device", "offloaded"])
@pytest.mark.parametrize("shard", ["dp", "zero1", "zero2"])
def test_steps_may_overlap_and_moments_rest_in_host_memory(shard: str, offload: bool) -> None:
    manifest = run_of(sync="overlap")
    memory = MemoryPolicy(offload_optimizer=offload)
    for found in on_ranks(manifest, layout_of(1, 2, shard), lambda rank: rank.train(), memory=memory):
        check(found, manifest)


@pytest.mark.parametrize("sync", ["exact", "overlap", "local"])
def test_one_rank_makes_the_same_bits_with_moments_in_host_memory(sync: str) -> None:
    manifest = run_of(sync=sync)
    found = train_alone(manifest, memory=MemoryPolicy(offload_optimizer=True)).state
    for name, expected in train_alone(manifest).state.items():
        assert torch.equal(found[name], expected), name


def test_replicas_of_other_meshes_go_on_from_each_others_state() -> None:
    manifest, state = run_of(), train_alone(run_of(), steps=1).state
    for version, layout in enumerate(MESHES, start=1):
        begin = state

        def body(data: ThreadComm, tensor: ThreadComm, begin=begin, layout=layout, version=version) -> Trained:
            rank = Rank(manifest, 0, layout, data=data, tensor=tensor)
            rank.stage.read_state(version, begin)
            return rank.train(start=version, steps=1)

        state = run_mesh(layout.data, layout.tensor, body)[0].state
    expected = train_alone(manifest, steps=1 + len(MESHES)).state
    differences = changes(state, expected, train_alone(manifest, steps=0).state)
    assert max(differences.values()) <= 1e-5, differences


# ------------------------------------------------------------ the same bits


@BY_LABEL
def test_every_mesh_makes_the_same_bits_of_the_same_sum(layout: MeshLayout) -> None:
    """However elements were cut: kernels treat the ends of tensors by other code. `lead` counts steps too."""
    manifest = run_of(lead=1.5)
    expected = train_alone(manifest, start=1, steps=1)
    for state in on_ranks(manifest, layout, lambda rank: rank.one_update(1, expected.total), start=1):
        assert [name for name, tensor in state.items() if not torch.equal(tensor, expected.state[name])] == []


@BY_LABEL
def test_moments_in_8_bits_are_the_same_ones_on_every_mesh_and_agree_up_to_rounding(layout: MeshLayout) -> None:
    """One update from nothing: weights have the same bits, moments are off by what a block of 256 rounds."""
    manifest = run_of(model=MODEL.model_copy(update={"vocab_size": 600}), state="8bit")  # two matrices of 600 x 9
    split, expected = (MeshSplit(manifest.of_stage(0), layout), train_alone(manifest, steps=1))
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.state.items() if "optimizer." not in name}
    packed = {name for name, shape in shapes.items() if math.prod(shape) >= LEAST}

    def body(rank: Rank) -> tuple[int, int, dict[str, torch.Tensor]]:
        state = rank.one_update(0, expected.total)
        return rank.rank, held_bytes(rank.stage)["moments"], state

    for number, held, state in on_ranks(manifest, layout, body):
        sizes = {name: split.held("moments", name, shape, number).num_elements for name, shape in shapes.items()}
        assert held == sum(
            2 * size + 8 * -(-size // BLOCK) if name in packed else 8 * size for name, size in sizes.items()
        )
        for name, tensor in state.items():
            if any(name.endswith(each) for each in packed) and "optimizer." in name:
                torch.testing.assert_close(tensor, expected.state[name], rtol=0, atol=0.01 * float(tensor.abs().max()))
            else:
                assert torch.equal(tensor, expected.state[name]), name
    assert len(packed) == 2


@BY_LABEL
def test_each_element_of_sums_and_states_is_written_by_one_rank(layout: MeshLayout) -> None:
    manifest = run_of(sync="overlap")
    for writers in on_ranks(manifest, layout, lambda rank: rank.writers_of(0)):
        assert writers.unique().tolist() == [1]


@BY_LABEL
def test_a_sum_may_be_written_again_and_grow(layout: MeshLayout) -> None:
    def body(rank: Rank) -> None:
        given = list(batches(rank.manifest, 0, 0))
        totals = []
        for m, batch in enumerate(given):
            rows = slice(rank.rows.start, rank.rows.stop)
            rank.forward(m, 0, batch.tokens[rows], None)
            rank.backward(m, None)
            assert rank.accumulate(m, step=0, index=m)
            totals.append((rank.sum_of(0), rank.sum_of(0)))
        assert all(torch.equal(one, again) for one, again in totals)
        assert not torch.equal(totals[0][0], totals[1][0])
        expected = train_alone(rank.manifest, steps=1).total.double()
        assert (totals[-1][0].double() - expected).norm() <= 1e-5 * expected.norm()

    on_ranks(run_of(), layout, body)


# ------------------------------------------------------------ memory

FP32, SUMS = 4, {"fp32": 4, "deterministic": 8}


@pytest.mark.parametrize("mode", ["fp32", "deterministic"])
@BY_LABEL
def test_a_rank_holds_its_share(layout: MeshLayout, mode: str) -> None:
    def body(rank: Rank) -> tuple[int, dict[str, int]]:
        return rank.rank, rank.held_in_flight()

    manifest = run_of(mode)
    split, shapes = (
        MeshSplit(manifest.of_stage(0), layout),
        {name: tuple(tensor.shape) for name, tensor in STATE.items()},
    )
    for number, held in on_ranks(manifest, layout, body):
        assert held == expected_bytes(split, shapes, number, mode)
    whole = sum(math.prod(shape) for shape in shapes.values())
    share = whole / layout.tensor / (layout.data if layout.shard in ("zero1", "zero2") else 1)
    assert held["moments"] <= 1.15 * 2 * FP32 * share, "norms are on all tensor ranks, and chunks are not all equal"


def expected_bytes(split: MeshSplit, shapes: dict[str, tuple[int, ...]], rank: int, mode: str) -> dict[str, int]:
    width = {"parameters": FP32, "accumulators": SUMS[mode], "moments": 2 * FP32}
    return {what: size * split.num_elements(what, shapes, rank) for what, size in width.items()}


STATE = {name: tensor for name, tensor in train_alone(run_of(), steps=0).state.items() if "optimizer." not in name}


# ------------------------------------------------------------ collectives


def calls(shard: str) -> dict[str, dict[str, int]]:
    """Collectives along the data axis, of a stage of two layers and both ends, by what was asked of it."""
    manifest, layout = run_of(), layout_of(1, 2, shard)

    def body(data: ThreadComm, tensor: ThreadComm) -> dict[str, dict[str, int]]:
        counted, found = Counted(data), {}
        rank = Rank(manifest, 0, layout, data=counted, tensor=tensor)
        batch = next(batches(manifest, 0, 0))
        rows = slice(rank.rows.start, rank.rows.stop)
        total, state = torch.zeros(rank.canonical.num_elements), train_alone(manifest, steps=0).state
        for name, order in (
            ("read_state", lambda: rank.stage.read_state(0, state)),
            ("forward", lambda: rank.forward(0, 0, batch.tokens[rows], None)),
            ("backward", lambda: rank.backward(0, None)),
            ("accumulate", lambda: rank.accumulate(0, step=0, index=0)),
            ("write_sum", lambda: rank.stage.write_sum(0, total)),
            ("update", lambda: rank.stage.update(0, total, scale=1.0, rate=0.1)),
            ("write_state", lambda: rank.stage.write_state(1, state)),
        ):
            counted.counts.clear()
            order()
            found[name] = dict(counted.counts)
        return found

    one, other = run_mesh(2, 1, body)
    assert one == other
    return {name: counts for name, counts in one.items() if counts}


CHECK = {"all_reduce": 1}  # of one number
PARAMETERS = 2 * 11 + 3  # of two layers, and outside layers


@pytest.mark.parametrize(
    ("shard", "expected"),
    [
        ("dp", {"accumulate": CHECK, "write_sum": {"reduce_scatter": PARAMETERS}}),
        (
            "zero1",
            {"accumulate": CHECK, "write_sum": {"reduce_scatter": PARAMETERS}, "update": {"all_gather": PARAMETERS}},
        ),
        ("zero2", {"accumulate": CHECK | {"reduce_scatter": PARAMETERS}, "update": {"all_gather": PARAMETERS}}),
    ],
)
def test_what_each_kind_costs(shard: str, expected: dict[str, dict[str, int]]) -> None:
    assert calls(shard) == expected


# ------------------------------------------------------------ what may go wrong


def prepared(rank: Rank, *, key: int = 0) -> None:
    """Forward and backward of the first microbatch."""
    batch = next(batches(rank.manifest, 0, 0))
    rank.forward(key, 0, batch.tokens[rank.rows.start : rank.rows.stop], None)
    rank.backward(key, None)


@pytest.mark.parametrize(
    ("mode", "value", "error"),
    [
        ("fp32", math.nan, BadMessage),
        ("fp32", 2.0**100, BadMessage),
        ("deterministic", math.inf, BadMessage),
        ("deterministic", 2.0**40, Overflow),
    ],
)
@pytest.mark.parametrize(
    "layout", [layout_of(2), layout_of(1, 2, "zero1"), layout_of(2, 2, "zero2")], ids=lambda layout: layout.label
)
def test_what_one_rank_finds_in_a_gradient_all_raise(
    layout: MeshLayout, mode: str, value: float, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = run_of(mode)

    def body(rank: Rank) -> str:
        prepared(rank)
        assert rank.accumulate(0, step=0, index=0)
        before = rank.sum_of(0)
        prepared(rank)
        if rank.rank == layout.ranks - 1:
            spoil(rank, value)
        with pytest.raises(error) as raised:
            rank.accumulate(0, step=0, index=1)
        assert torch.equal(rank.sum_of(0), before), "nothing was added anywhere"
        prepared(rank)
        assert rank.accumulate(0, step=0, index=1), "and it goes on"
        return raised.value.code.value if error is BadMessage else str(raised.value)

    answers = on_ranks(manifest, layout, body)
    assert len(set(answers)) == 1
    if error is BadMessage:
        assert answers[0] == RejectCode.NON_FINITE.value


def spoil(rank: Rank, value: float) -> None:
    """Make one element of the microbatch's gradient on this rank `value`."""
    tape = rank.works[0].tape
    parameter, write = tape._owed[0]
    tape._owed[0] = parameter, lambda out: (write(out), out.view(-1)[:1].fill_(value))


def test_a_sum_of_another_discard_count_is_empty() -> None:
    def body(rank: Rank) -> None:
        prepared(rank)
        assert rank.accumulate(0, step=0, index=7, discards=3)
        assert rank.sum_of(0, discards=3).any()
        prepared(rank)
        assert not rank.accumulate(0, step=0, index=7, discards=3), "that index is in it"
        prepared(rank)
        assert rank.accumulate(0, step=0, index=7, discards=4), "of the new sum it is not"
        assert not rank.sum_of(0, discards=5).any()

    on_ranks(run_of(), layout_of(1, 2, "zero1"), body)


def test_what_was_computed_on_weights_that_are_gone_is_refused() -> None:
    def body(rank: Rank) -> None:
        batch = next(batches(rank.manifest, 0, 0))
        rank.forward(0, 0, batch.tokens[rank.rows.start : rank.rows.stop], None)
        rank.stage.update(0, torch.zeros(rank.canonical.num_elements), scale=1.0, rate=0.1)
        with pytest.raises(RuntimeError, match="modified since forward"):
            rank.backward(0, None)

    on_ranks(run_of(), layout_of(1, 2, "zero1"), body)


def test_an_evaluation_keeps_nothing() -> None:
    def body(rank: Rank) -> None:
        batch = next(batches(rank.manifest, 0, 0))
        rows = batch.tokens[rank.rows.start : rank.rows.stop]
        loss = rank.forward(5, 0, rows, None, train=False)
        assert loss.shape == () and not loss.requires_grad and not rank.works

    on_ranks(run_of(), layout_of(1, 2, "dp"), body)


def test_a_microbatch_is_added_once_and_after_its_backward() -> None:
    def body(rank: Rank) -> None:
        prepared(rank)
        work = rank.works[0]
        assert rank.accumulate(0, step=0, index=0)
        batch = next(batches(rank.manifest, 0, 0))
        rank.forward(1, 0, batch.tokens[rank.rows.start : rank.rows.stop], None)
        for again in (work, rank.works[1]):
            with pytest.raises(ValueError, match="no gradient to add"):
                rank.stage.accumulate(again, step=0, index=1, discards=0)

    on_ranks(run_of(), layout_of(1, 2, "dp"), body)


def test_ranks_that_cannot_are_refused_up_front() -> None:
    def made(layout: MeshLayout, **options: Any) -> None:
        def body(data: ThreadComm, tensor: ThreadComm) -> None:
            RankStage(run_of().of_stage(0), layout, tensor=tensor, data=data, device=CPU, **options)

        run_mesh(layout.data, layout.tensor, body)

    with pytest.raises(UsageError, match=r"3 ranks cannot split a microbatch: .* = 4"):
        made(layout_of(1, 3, "zero1"))
    with pytest.raises(UsageError, match="3 tensor-parallel ranks cannot split"):
        made(layout_of(3))
    with pytest.raises(UsageError, match="offloaded activations"):
        made(layout_of(1, 2, "zero3"), memory=MemoryPolicy(activations="offload"))
    with pytest.raises(ValueError, match="needs a process group"):
        made(layout_of(1, 2, "zero3"))


# ------------------------------------------------------------ real processes


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What four ranks over gloo report; see zero_rank.py."""
    store: Path = tmp_path_factory.mktemp("group") / "store"
    return run_group("zero_rank.py", "gloo", 4, store)


@pytest.mark.parametrize(("name", "case"), CASES.items(), ids=CASES)
def test_four_processes_over_gloo(processes: list[dict[str, Any]], name: str, case: Case) -> None:
    manifest = case.manifest()
    layout = layout_of(case.tensor, 4 // case.tensor, case.shard, sequence_parallel=case.sequence_parallel)
    split = MeshSplit(manifest.of_stage(0), layout)
    shapes = {
        weight: tuple(tensor.shape)
        for weight, tensor in train_alone(manifest, case.stage, steps=0).state.items()
        if not weight.startswith(("optimizer.", "previous."))
    }
    for number, report in enumerate(report[name] for report in processes):
        assert max(report["far"].values()) <= case.tolerance, report["far"]
        assert report["other bits"] == [] and report["writers"] == [1]
        expected = expected_bytes(split, shapes, number, case.mode)
        for what in ("parameters", "accumulators") if case.sync == "overlap" else ():
            expected[what] *= 2
        assert report["held"] == [expected, expected], "after backwards, and after a forward"
