"""A stage on a GPU against what it is on the CPU or in plain torch. Everything runs here as well, on whatever there is.

Figures (time beside a plain loop, MFU) are printed, never asserted.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import sys
from pathlib import Path

import pytest
import torch
from benchmark_modules import load
from stage_chain import StageChain, compute_thread, tiny
from torch import Tensor
from torch.nn.attention import SDPBackend

from swarmnet.errors import DeviceFull, UsageError
from swarmnet.manifest.schema import Averaging, Optimizer
from swarmnet.messages import Packed
from swarmnet.peer.engines import probed_apart
from swarmnet.peer.memory_fit import free_on_gpus
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.ranks.supervisor import RankGroup
from swarmnet.stage.optimizer import StageOptimizer, adamw, probe
from swarmnet.stage.passes import MemoryPolicy, attention_kernels
from swarmnet.wire import codecs
from tests.contracts.comm_contract import CHECKS

mfu = load("mfu")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def steps(
    device: str, *, compute: str = "fp32", mode: str = "fast", state: str = "fp32", count: int = 3, **options: object
):
    """(losses, weights) of the tiny stage."""
    manifest = mfu.TINY.manifest(compute)
    manifest = manifest.model_copy(update={"optimizer": manifest.optimizer.model_copy(update={"state": state})})
    manifest = manifest.model_copy(update={"numerics": manifest.numerics.model_copy(update={"mode": mode})})
    train = mfu.Replica(manifest, mfu.TINY.batches(), torch.device(device), **options)
    losses = [train() for _ in range(count)]
    return losses, [weight.detach().cpu() for weight in train.body.state.newest]


def test_flops_are_those_counted_by_hand() -> None:
    model = mfu.TINY.model
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 176
    attention = 2 * 64 * 32
    assert mfu.flops_per_step(mfu.TINY) == 6 * (2 * layer + 64 * 128 + attention) * 2 * 32
    tied = mfu.Size(model.model_copy(update={"tie_embeddings": True}), 2, 1, 32)
    assert mfu.flops_per_step(tied) == mfu.flops_per_step(mfu.TINY), "a tied matrix is multiplied all the same"


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_stage_step_is_a_plain_torch_loops(device: str, compute: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = mfu.measure(mfu.TINY, torch.device(device), compute, turns=1, steps=5)
    ours, plain = found["losses"]["ours"], found["losses"]["plain"]
    assert ours[-1] < ours[0] - 0.1, "it trains"
    assert ours == pytest.approx(plain, rel=1e-3 if compute == "fp32" else 3e-3)
    if device == "cuda":
        timed = mfu.measure(mfu.fitting(torch.device(device)), torch.device(device), compute, turns=5)
        with capsys.disabled():
            share = "MFU unknown for this device" if timed["mfu"] is None else f"MFU {timed['mfu']:.1%} of bf16's peak"
            print(f"\n{torch.cuda.get_device_name()}, {compute}: {timed['ratio']:.2f} of a plain loop's time, {share}")


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("device", DEVICES)
def test_deterministic_mode_has_the_same_bits_again(device: str, compute: str) -> None:
    once, again = (steps(device, compute=compute, mode="deterministic") for _ in range(2))
    assert once[0] == again[0]
    assert all(torch.equal(a, b) for a, b in zip(once[1], again[1], strict=True))


@pytest.mark.parametrize(
    ("compute", "reproducible", "capability", "expected"),
    [
        ("fp32", False, (9, 0), None),
        ("bf16", True, None, None),
        ("fp32", True, (9, 0), [SDPBackend.MATH]),
        ("bf16", True, (7, 5), [SDPBackend.MATH]),
        ("bf16", True, (8, 6), [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]),
    ],
)
def test_attention_is_fast_where_a_fast_kernel_is_reproducible(
    compute: str, reproducible: bool, capability: tuple[int, int] | None, expected: list[SDPBackend] | None
) -> None:
    assert attention_kernels(compute, reproducible=reproducible, capability=capability) == expected


@pytest.mark.gpu
def test_a_gpu_computes_what_a_cpu_does() -> None:
    """fp32 means fp32 there too: no TensorFloat-32 unasked."""
    cuda, cpu = steps("cuda"), steps("cpu")
    assert cuda[0] == pytest.approx(cpu[0], rel=1e-5)
    for ours, theirs in zip(cuda[1], cpu[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("policy", ["recompute", "recompute_layers", "selective", "offload"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_kept_for_backward_changes_no_bit(device: str, compute: str, policy: str) -> None:
    (losses, weights), (found, ours) = (
        steps(device, compute=compute, mode="deterministic", memory=MemoryPolicy(activations=kept))
        for kept in ("save", policy)
    )
    assert found == losses
    assert all(torch.equal(a, b) for a, b in zip(ours, weights, strict=True))


@pytest.mark.gpu
def test_activations_in_host_memory_take_none_of_the_device() -> None:
    """Largest memory of a step beyond what rests: far less with saved tensors in host memory."""
    peak = {}
    for kept in ("save", "offload"):
        size = mfu.Size(mfu.GPU.model.model_copy(update={"num_layers": 4, "vocab_size": 512}), 1, 2, 2048)
        train = mfu.Replica(
            size.manifest("bf16"), size.batches(), torch.device("cuda"), memory=MemoryPolicy(activations=kept)
        )
        train()
        rest = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train()
        peak[kept] = torch.cuda.max_memory_allocated() - rest
    assert peak["offload"] < 0.8 * peak["save"], peak


@pytest.mark.parametrize("device", DEVICES)
def test_ranks_of_this_machine_keep_the_contract_and_share_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo between two processes; nccl among as many GPUs as there are, be it one."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), str(Path(__file__).parents[2]), *sys.path])
    ranks = 2 if device == "cpu" else torch.cuda.device_count()
    devices = ["cpu"] * ranks if device == "cpu" else [f"cuda:{rank}" for rank in range(ranks)]
    places = {"first": ((1 << 20,), "float32"), "second": ((1 << 10,), "float32")}
    group = RankGroup("device_rank:make", {}, devices=devices, deadline_s=120.0, memory=places)
    try:
        group.start()
        assert group.order("check") == [{"checks": len(CHECKS)}] * ranks
        for name in places:
            numbers = group.memory.places[name]
            numbers[100:1000] = torch.arange(900.0)
            answers = group.order("squares", memory=name, start=100, stop=1000)
            pinned, current = (True, list(range(ranks))) if device == "cuda" else (None, [None] * ranks)
            assert [answer["pinned"] for answer in answers] == [pinned] * ranks
            assert [answer["current"] for answer in answers] == current
            expected = ranks * sum(number**2 for number in range(900))
            assert numbers[100 : 100 + ranks].tolist() == pytest.approx([expected] * ranks)
    finally:
        group.close()
    assert all(not os.path.exists(f"/proc/{pid}") for pid in group.pids)


@pytest.mark.gpu
def test_a_peak_is_known_or_no_figure_is_given() -> None:
    peak = mfu.peak_flops(torch.device("cuda"))
    assert peak is None or 1e13 < peak < math.inf
    assert mfu.peak_flops(torch.device("cpu")) is None


@pytest.mark.parametrize("device", DEVICES)
def test_the_finished_sum_is_in_host_memory(device: str) -> None:
    """A round's arithmetic then waits for no kernel of the next step, and none for it."""
    memory = DeviceBackend(mfu.TINY.manifest("fp32").of_stage(0), device=torch.device(device)).sum_memory()
    assert memory.device.type == "cpu" and memory.is_pinned() == (device == "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_an_update_rounds_an_element_alike_wherever_its_tensor_is_cut(device: str) -> None:
    """So ranks that each update a part make the weights of a replica that updates all of it."""
    generator = torch.Generator().manual_seed(4)
    whole = [torch.randn(4096 + 77, generator=generator).to(device) for _ in range(4)]
    edges = [0, 1, 4, 11, 75, 1075, 4096 + 77]
    updated = []
    for cuts in ([0, edges[-1]], edges):
        weights = [whole[0][a:b].clone() for a, b in itertools.pairwise(cuts)]
        optimizer = StageOptimizer(weights, Optimizer(lead=0.5))
        for number in (1, 2, 3):
            optimizer.step([whole[number][a:b].clone() for a, b in itertools.pairwise(cuts)], learning_rate=1e-2)
        updated.append(torch.cat(weights))
    assert torch.equal(*updated)


@pytest.mark.parametrize("device", DEVICES)
def test_moments_in_host_memory_and_updates_on_the_cpu_are_the_same_training(device: str) -> None:
    (losses, weights), (found, ours) = steps(device), steps(device, memory=MemoryPolicy(offload_optimizer=True))
    assert found == pytest.approx(losses, rel=0.0 if device == "cpu" else 1e-5)
    for mine, theirs in zip(ours, weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0.0 if device == "cpu" else 1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_updates_in_host_memory_take_all_cores_and_give_them_back(
    device: str, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []

    def counted(*arguments: object, **named: object) -> None:
        used.append(torch.get_num_threads())
        adamw(*arguments, **named)

    found = []
    for cores in (1, 3):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cores=cores: set(range(cores)))
        monkeypatch.setattr("swarmnet.stage.optimizer.adamw", counted)
        found.append(steps(device, memory=MemoryPolicy(offload_optimizer=True)))
        assert {*used} == {cores} and torch.get_num_threads() == 1
        used.clear()
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.parametrize(
    "averaging",
    [
        Averaging(codec="int64"),
        Averaging(codec="small"),
        Averaging(codec="small", sync="overlap", overlap_after=0),
        Averaging(codec="int8", sync="local", inner_steps=1, outer_warmup_steps=1),
        Averaging(codec="nf4", sync="local", inner_steps=1, outer_warmup_steps=1),
        Averaging(codec="sparse:0.05", sync="local", inner_steps=1, outer_warmup_steps=1),
    ],
    ids=lambda averaging: f"{averaging.sync}-{averaging.codec}",
)
@pytest.mark.parametrize("device", DEVICES)
def test_rounds_under_every_kind_of_codec(device: str, averaging: Averaging) -> None:
    """Accumulators and weights on the device, what travels and what is owed in host memory."""
    ends = []

    async def train(where: str) -> None:
        async with compute_thread() as compute:
            mode = "fp32" if averaging.sync == "local" else "deterministic"
            chain = StageChain(tiny(1, mode=mode, averaging=averaging), compute, device=where)
            losses = [await chain.step(random.Random(number)) for number in range(4)]
            ends.append((losses, await chain.weights()))

    asyncio.run(train(device))
    asyncio.run(train("cpu"))
    (losses, ours), (expected, theirs) = ends
    assert losses == pytest.approx(expected, rel=0.0 if device == "cpu" else 1e-3)
    assert all(weight.device.type == "cpu" and weight.isfinite().all() for weight in ours.values())
    assert device == "cuda" or all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_moments_in_eight_bits_train_alike(device: str) -> None:
    (losses, weights), (expected, theirs) = steps(device, state="8bit", count=8), steps("cpu", state="8bit", count=8)
    assert losses == pytest.approx(expected, rel=0.0 if device == "cpu" else 1e-3)
    assert losses == pytest.approx(steps(device, count=8)[0], rel=0.01), "as with fp32 moments"
    assert device == "cuda" or all(torch.equal(a, b) for a, b in zip(weights, theirs, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("codec", ["small", "int64"])
def test_a_contribution_is_encoded_where_the_accumulator_is(
    device: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bytes that the CPU makes of it."""
    asked = []
    encode = codecs.encode

    def noted(name: str, piece: Tensor, **how: bool) -> Packed:
        asked.append((piece.device.type, bytes(encode(name, piece.cpu(), **how).data)))
        return encode(name, piece, **how)

    async def contributed() -> bytes:
        async with compute_thread() as compute:
            chain = StageChain(tiny(1, averaging=Averaging(codec=codec)), compute, device=device)
            await chain.compute(random.Random(0), 0)
            monkeypatch.setattr(codecs, "encode", noted)
            sums = chain.engines[0][0].sums
            return bytes((await sums.contribution(1, sums.num_elements)).data)

    found = asyncio.run(contributed())
    assert asked == [(device, found)]


@pytest.mark.gpu
async def test_a_full_gpu_is_said_and_serves_on() -> None:
    async with compute_thread() as compute:
        chain = StageChain(tiny(1), compute, device="cuda")
        ((engine,),) = chain.engines
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine._backend, "forward", lambda *_, **__: torch.empty(1 << 50, device="cuda"))
            with pytest.raises(DeviceFull):
                await chain.forward([engine], 0)
        assert math.isfinite(await chain.step(random.Random(0)))


@pytest.mark.parametrize("device", DEVICES)
def test_updates_of_several_devices_are_tried_in_another_process(device: str) -> None:
    assert probed_apart(Optimizer(), [device, "cpu"]) == [probe(Optimizer(), torch.device("cpu"))] * 2
    with pytest.raises(UsageError, match="cuda:77"):
        probed_apart(Optimizer(), ["cuda:77"])


@pytest.mark.gpu
def test_the_driver_knows_how_much_of_a_gpu_is_free() -> None:
    free, total = torch.cuda.mem_get_info(0)
    assert abs(free_on_gpus([0])[0] - free) < 0.02 * total
