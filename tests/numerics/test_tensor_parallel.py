"""A stage split over ranks computes what the whole stage does: outputs, loss, input gradients, every gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from further import further
from group_processes import run_group
from rank_stages import (
    ENDS,
    LENGTH,
    MICROBATCHES,
    MODEL,
    OnRank,
    Seen,
    against,
    difference,
    merged,
    module_of,
    on_rank,
    through,
)
from torch import Tensor

from swarmnet.manifest.schema import Model
from swarmnet.model.comm import Comm
from swarmnet.model.decoder import loss_sum
from swarmnet.model.sharded import ShardedStage
from swarmnet.model.split import Tape
from swarmnet.model.tensor_plan import TensorSplit
from tests.contracts.comm_contract import CHECKS
from tests.contracts.fake_comm import FakeComm
from tests.contracts.tensor_parts import reduce_partial
from tests.contracts.thread_comm import Counted, run_ranks

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@functools.cache
def whole(keys: int, tied: bool, ends: str, dtype: torch.dtype) -> Seen:
    """What the unsharded stage computes."""
    return through(module_of(model_with(keys, tied), ends, dtype), ends, dtype)


def model_with(keys: int, tied: bool) -> Model:
    return MODEL.model_copy(update={"num_kv_heads": keys, "tie_embeddings": tied})


def check(ranks: list[OnRank], expected: Seen, split: TensorSplit, tolerance: float) -> None:
    for number, rank in enumerate(ranks):
        far = {what: d for what, d in against(rank, expected, split, number).items() if not d <= tolerance}
        assert not far, f"rank {number}"
    gradients = merged(ranks, split)
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in gradients.items():
        assert difference(gradient, expected.gradients[name]) <= tolerance, name


@pytest.mark.parametrize("dtype", [torch.float64, *further(torch.float32)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("keys", [8, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole-tokens", "sequence-parallel"])
@pytest.mark.parametrize("size", [2, 4, *further(1, 8)])
def test_a_whole_model(size: int, sequence_parallel: bool, keys: int, tied: bool, dtype: torch.dtype) -> None:
    model = model_with(keys, tied)
    ranks = run_ranks(size, lambda comm: on_rank(comm, model, "whole", dtype, sequence_parallel=sequence_parallel))
    split = TensorSplit(model, size, LENGTH, sequence_parallel=sequence_parallel)
    check(ranks, whole(keys, tied, "whole", dtype), split, TOLERANCE[dtype])


@pytest.mark.parametrize("ends", ["first", "middle", "last"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole-tokens", "sequence-parallel"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_stage_of_several(size: int, sequence_parallel: bool, ends: str) -> None:
    ranks = run_ranks(size, lambda comm: on_rank(comm, MODEL, ends, torch.float64, sequence_parallel=sequence_parallel))
    split = TensorSplit(MODEL, size, LENGTH, sequence_parallel=sequence_parallel)
    check(ranks, whole(2, False, ends, torch.float64), split, 1e-12)


@pytest.mark.parametrize(("size", "heads", "keys"), [(3, 9, 3), (3, 6, 1), (6, 12, 2)])
def test_odd_numbers(size: int, heads: int, keys: int) -> None:
    model = MODEL.model_copy(update={"num_heads": heads, "num_kv_heads": keys, "intermediate_size": 42})
    ranks = run_ranks(size, lambda comm: on_rank(comm, model, "whole", torch.float64, sequence_parallel=False))
    expected = through(module_of(model, "whole", torch.float64), "whole", torch.float64)
    check(ranks, expected, TensorSplit(model, size, LENGTH), 1e-12)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole-tokens", "sequence-parallel"])
@pytest.mark.parametrize("size", [2, 4])
def test_norms_over_heads(size: int, sequence_parallel: bool) -> None:
    model = MODEL.model_copy(update={"qk_norm": True, "attention_bias": False})
    ranks = run_ranks(
        size, lambda comm: on_rank(comm, model, "whole", torch.float64, sequence_parallel=sequence_parallel)
    )
    expected = through(module_of(model, "whole", torch.float64), "whole", torch.float64)
    check(ranks, expected, TensorSplit(model, size, LENGTH, sequence_parallel=sequence_parallel), 1e-12)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole-tokens", "sequence-parallel"])
def test_without_tapes_autograd_computes_the_same(sequence_parallel: bool) -> None:
    ranks = run_ranks(
        4, lambda comm: on_rank(comm, MODEL, "whole", torch.float64, sequence_parallel=sequence_parallel, tapes=False)
    )
    split = TensorSplit(MODEL, 4, LENGTH, sequence_parallel=sequence_parallel)
    check(ranks, whole(2, False, "whole", torch.float64), split, 1e-12)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole-tokens", "sequence-parallel"])
def test_what_several_ranks_hold_has_the_same_bits_on_each(sequence_parallel: bool) -> None:
    """So weights that are replicated stay equal, step by step, without a broadcast."""
    first, *others = run_ranks(
        4, lambda comm: on_rank(comm, MODEL, "middle", torch.float32, sequence_parallel=sequence_parallel)
    )
    split = TensorSplit(MODEL, 4, LENGTH, sequence_parallel=sequence_parallel)
    for number, other in enumerate(others, start=1):
        for ours, theirs in (
            (first.raw.outputs, other.raw.outputs),
            (first.raw.input_gradients, other.raw.input_gradients),
        ):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        for name, gradient in first.reduced.items():
            mine, yours = split.slice_of(name, 0), split.slice_of(name, number)
            if (mine.start, mine.stop) == (yours.start, yours.stop):
                assert torch.equal(gradient, other.reduced[name]), name


# ------------------------------------------------------------ collectives

REDUCE, GATHER, SCATTER = "all_reduce", "all_gather", "reduce_scatter"


def calls_of(ends: str, layers: int, *, sequence_parallel: bool) -> list[dict[str, int]]:
    """The collectives of one microbatch's forward (with loss), backward, and weight pass."""
    first, last = ENDS[ends]
    split = TensorSplit(MODEL, 2, LENGTH, sequence_parallel=sequence_parallel)

    def body(comm: Comm) -> list[dict[str, int]]:
        counted = Counted(comm)
        stage = ShardedStage(split, range(layers), first=first, last=last, comm=counted)
        stage.reset(seed=0)
        ids = torch.zeros(1, LENGTH, dtype=torch.int64)
        x = ids if first else torch.ones(1, LENGTH, MODEL.hidden_size, requires_grad=True)
        tape, calls = Tape(), []

        def phase() -> None:
            calls.append(dict(counted.counts))
            counted.counts.clear()

        y = stage(x, tape)
        result = stage.loss_sum(y, ids) if last else y.sum()
        phase()
        result.backward()
        phase()
        assert len(tape.weight_pass(torch.empty_like)) == len(list(stage.parameters()))
        phase()
        return calls

    first_rank, second_rank = run_ranks(2, body)
    assert first_rank == second_rank
    return first_rank


def test_a_layer_costs_two_all_reduces_each_way() -> None:
    one, two = (calls_of("middle", layers, sequence_parallel=False) for layers in (1, 2))
    assert one == [{REDUCE: 2}, {REDUCE: 2}, {}]
    assert two == [{REDUCE: 4}, {REDUCE: 4}, {}]


def test_with_sequence_parallelism_each_becomes_a_gather_and_a_scatter() -> None:
    one, two = (calls_of("middle", layers, sequence_parallel=True) for layers in (1, 2))
    assert one == [{GATHER: 2 + 1, SCATTER: 2}, {GATHER: 2 + 1, SCATTER: 2}, {}]  # 1: the stage's input, output
    assert two == [{GATHER: 4 + 1, SCATTER: 4}, {GATHER: 4 + 1, SCATTER: 4}, {}]


@pytest.mark.parametrize(
    ("ends", "sequence_parallel", "expected"),
    [
        ("first", False, [{REDUCE: 1}, {}, {}]),
        ("last", False, [{REDUCE: 2}, {REDUCE: 1}, {}]),
        ("whole", False, [{REDUCE: 1 + 2}, {REDUCE: 1}, {}]),
        ("first", True, [{SCATTER: 1, GATHER: 1}, {GATHER: 1}, {}]),
        ("last", True, [{GATHER: 1, REDUCE: 2}, {SCATTER: 1, GATHER: 1}, {}]),
        ("whole", True, [{SCATTER: 1, GATHER: 1, REDUCE: 2}, {SCATTER: 1, GATHER: 1}, {}]),
    ],
)
def test_what_the_ends_cost(ends: str, sequence_parallel: bool, expected: list[dict[str, int]]) -> None:
    assert calls_of(ends, 0, sequence_parallel=sequence_parallel) == expected


@pytest.mark.parametrize(
    ("size", "sequence_parallel", "expected"),
    [
        (2, False, {}),  # a key head each, norms replicated: nothing is partial
        (2, True, {REDUCE: 1}),  # norms
        (4, False, {REDUCE: 1}),  # key heads on two ranks each
        (4, True, {REDUCE: 1}),  # both, together
    ],
)
def test_what_is_partial_is_reduced_once(size: int, sequence_parallel: bool, expected: dict[str, int]) -> None:
    ranks = run_ranks(
        size, lambda comm: on_rank(comm, MODEL, "middle", torch.float64, sequence_parallel=sequence_parallel)
    )
    assert [rank.calls_to_reduce for rank in ranks] == [expected] * size
    per_layer = {GATHER: 4, SCATTER: 4} if sequence_parallel else {REDUCE: 4}
    ends = {GATHER: 2} if sequence_parallel else {}
    total = {name: MICROBATCHES * (2 * n + ends.get(name, 0)) for name, n in per_layer.items()}
    assert [rank.calls for rank in ranks] == [total] * size


def test_sums_on_a_grid_of_integers_are_reduced_too() -> None:
    split = TensorSplit(MODEL, 4, LENGTH, sequence_parallel=True)

    def body(comm: Comm) -> dict[str, Tensor]:
        stage = ShardedStage(split, range(1), first=False, last=False, comm=comm)
        sums = {name: torch.full(p.shape, 2**53 + 1 + comm.rank) for name, p in stage.named_parameters()}
        reduce_partial(stage, list(sums.values()))
        return sums

    for number, sums in enumerate(run_ranks(4, body)):
        for name, total in sums.items():
            if name.endswith("layernorm.weight"):
                expected = 4 * (2**53 + 1) + 0 + 1 + 2 + 3
            elif "k_proj" in name or "v_proj" in name:
                expected = 2 * (2**53 + 1) + (0 + 1 if number < 2 else 2 + 3)
            else:
                expected = 2**53 + 1 + number
            assert bool((total == expected).all()), name


def test_tokens_that_ranks_cannot_share_are_refused_before_a_collective() -> None:
    def body(comm: Comm) -> float:
        for ends in ("first", "middle") if comm.rank == 0 else ():  # the other rank is not there to be waited for
            stage = module_of(MODEL, ends, torch.float32, comm=comm, sequence_parallel=True)
            shape = (1, 15) if ends == "first" else (1, 15, MODEL.hidden_size)
            with pytest.raises(ValueError, match="2 ranks cannot share a dimension of 15 equally"):
                stage(torch.zeros(shape, dtype=torch.int64 if ends == "first" else torch.float32))
        return comm.all_reduce(torch.ones(1)).item()

    assert run_ranks(2, body) == [2, 2], "the group goes on"


def test_a_second_backward_of_the_loss_raises() -> None:
    """It works in the memory of the probabilities; silently it would be wrong."""

    def body(comm: Comm) -> None:
        stage = module_of(MODEL, "last", torch.float32, comm=comm)
        labels = torch.zeros(1, LENGTH, dtype=torch.int64)
        loss = stage.loss_sum(stage(torch.ones(1, LENGTH, MODEL.hidden_size)), labels)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run_ranks(2, body)


def test_the_gradient_of_the_loss_scales_with_what_comes_of_it() -> None:
    logits, labels = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([[0, 3, 1, 2, 3]])

    def body(comm: Comm) -> Tensor:
        split = TensorSplit(MODEL.model_copy(update={"vocab_size": 4}), 2, LENGTH)
        rows = split.part("vocabulary", comm.rank)
        own = logits[..., rows.start : rows.stop].clone().requires_grad_()
        stage = ShardedStage(split, range(0), first=False, last=True, comm=comm)
        (-3 * stage.loss_sum(own, labels)).backward()
        return own.grad

    leaf = logits.clone().requires_grad_()
    (-3 * loss_sum(leaf, labels)).backward()
    torch.testing.assert_close(torch.cat(run_ranks(2, body), -1), leaf.grad)


def test_the_loss_bears_logits_that_exponentials_do_not() -> None:
    logits = torch.tensor([[[1000.0, -1000.0, 0.0, 999.0]]])
    labels = torch.tensor([[3]])

    def body(comm: Comm) -> float:
        split = TensorSplit(MODEL.model_copy(update={"vocab_size": 4}), 2, LENGTH)
        rows = split.part("vocabulary", comm.rank)
        stage = ShardedStage(split, range(0), first=False, last=True, comm=comm)
        return stage.loss_sum(logits[..., rows.start : rows.stop], labels).item()

    expected = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum").item()
    assert run_ranks(2, body) == pytest.approx([expected] * 2)


# ------------------------------------------------------------ without the hardware

LLAMA_8B = Model(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=500000.0,
)
LLAMA_70B = LLAMA_8B.model_copy(
    update={"hidden_size": 8192, "intermediate_size": 28672, "num_layers": 80, "num_heads": 64}
)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole-tokens", "sequence-parallel"])
@pytest.mark.parametrize(
    ("model", "layers", "ends", "size", "millions"),
    [
        (LLAMA_8B, range(24, 32), "last", 8, 283.8),  # of 2270
        (LLAMA_70B, range(10), "first", 8, 1201.0),  # of 9608
        (LLAMA_70B, range(40, 50), "middle", 8, 1069.7),  # of 8556
        (LLAMA_70B, range(40, 50), "middle", 16, 545.4),  # key heads are on two ranks each
    ],
    ids=["8B-last", "70B-first", "70B-middle", "70B-16-ranks"],
)
def test_shapes_of_large_stages(
    model: Model, layers: range, ends: str, size: int, millions: float, sequence_parallel: bool
) -> None:
    first, last = ENDS[ends]
    length = 4096
    split = TensorSplit(model, size, length, sequence_parallel=sequence_parallel)
    with torch.device("meta"):
        comm = FakeComm(size - 1, size)
        stage = ShardedStage(split, layers, first=first, last=last, comm=comm)
        ids = torch.empty(1, length, dtype=torch.int64)
        x = torch.empty(1, length, model.hidden_size, requires_grad=True)
    held = {name.split(".", 3)[-1]: tuple(p.shape) for name, p in stage.named_parameters()}
    keys = max(1, 8 // size) * 128
    assert held["self_attn.q_proj.weight"] == (model.num_heads // size * 128, model.hidden_size)
    assert held["self_attn.k_proj.weight"] == held["self_attn.v_proj.weight"] == (keys, model.hidden_size)
    assert held["self_attn.o_proj.weight"] == (model.hidden_size, model.num_heads // size * 128)
    assert (
        held["mlp.gate_proj.weight"]
        == held["mlp.up_proj.weight"]
        == (model.intermediate_size // size, model.hidden_size)
    )
    assert held["mlp.down_proj.weight"] == (model.hidden_size, model.intermediate_size // size)
    assert sum(p.numel() for p in stage.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)
    tape = Tape()
    y = stage(ids if first else x, tape)
    assert y.shape == (1, length, len(split.part("vocabulary", size - 1)) if last else model.hidden_size)
    (stage.loss_sum(y, ids) if last else y.sum()).backward()
    assert first or x.grad.shape == x.shape
    written = tape.weight_pass(torch.empty_like)
    assert written == set(stage.parameters())
    reduce_partial(stage, [torch.empty_like(p) for p in stage.parameters()])


# ------------------------------------------------------------ real processes


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_threads_keep_the_contract_of_processes(check: Callable[[Comm], None], size: int) -> None:
    run_ranks(size, check)


def check_reports(reports: list[dict[str, Any]], *, size: int) -> None:
    assert len(reports) == size
    for report in reports:
        assert report["checks"] == len(CHECKS) and report["differences"].keys() == {"False", "True"}
        for found in report["differences"].values():
            assert len(found) > 3 * MICROBATCHES and max(found.values()) <= 1e-12, found


def test_two_processes_over_gloo(tmp_path: Path) -> None:
    check_reports(run_group("group_rank.py", "gloo", 2, tmp_path / "store"), size=2)


@pytest.mark.gpu
def test_as_many_processes_over_nccl_as_there_are_gpus(tmp_path: Path) -> None:
    size = max(ranks for ranks in (1, 2, 4, 8) if ranks <= torch.cuda.device_count())
    check_reports(run_group("group_rank.py", "nccl", size, tmp_path / "store"), size=size)
