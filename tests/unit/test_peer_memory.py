"""What needs a CUDA device is refused without one, in words."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.config.peer import Memory
from swarmnet.errors import DeviceFull, UsageError
from swarmnet.manifest.schema import Manifest, Numerics, Optimizer
from swarmnet.peer import memory_fit
from swarmnet.peer.devices import NumericsClass, adds_in_own_order, check_memory
from swarmnet.peer.engines import numerics_of, probe_layer
from swarmnet.ranks.layout import MeshLayout
from swarmnet.stage.passes import MemoryPolicy


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (Memory(activations="offload"), "--activations offload: the CPU's memory is host memory already"),
        (Memory(offload_optimizer=True), "memory.offload_optimizer: the CPU's memory is host memory already"),
        (Memory(compile=True), "--compile: on the CPU it costs"),
    ],
)
def test_what_needs_cuda(memory: Memory, words: str) -> None:
    check_memory(memory, MeshLayout(devices=("cuda:0",)))
    with pytest.raises(UsageError, match=words):
        check_memory(memory, MeshLayout(devices=("cpu",)))


@pytest.mark.parametrize("policy", ["save", "selective", "recompute_layers", "recompute"])
def test_everything_else_goes_everywhere(policy: str) -> None:
    check_memory(Memory(activations=policy), MeshLayout(2, devices=("cpu", "cpu")))


def test_a_compiled_layer_chooses_itself_what_it_keeps() -> None:
    with pytest.raises(ValueError, match="compile = true chooses itself"):
        Memory(compile=True, activations="selective")


@pytest.mark.parametrize(
    "layout", [MeshLayout(2, devices=("cuda:0", "cuda:1")), MeshLayout(1, 2, "zero3", devices=("cuda:0", "cuda:1"))]
)
def test_layers_that_ranks_share_are_not_compiled(layout: MeshLayout) -> None:
    with pytest.raises(UsageError, match="exchange tensors in their middle"):
        check_memory(Memory(compile=True), layout)
    check_memory(Memory(compile=True), MeshLayout(1, 2, "zero2", devices=("cuda:0", "cuda:1")))


def test_a_numerics_class_says_what_bits_depend_on() -> None:
    manifest = Manifest()
    one = numerics_of(manifest, MeshLayout(), MemoryPolicy())
    assert NumericsClass.parse(str(one)) == one and len(str(one)) <= 128
    assert (one.mesh, one.compute, one.kernels) == ("1", "fp32", "eager") and one.device.startswith("cpu ")
    bf16 = manifest.model_copy(update={"numerics": Numerics(compute="bf16")})
    packed = manifest.model_copy(update={"optimizer": Optimizer(state="8bit")})
    others = [
        numerics_of(bf16, MeshLayout(), MemoryPolicy(compile=True)),
        numerics_of(manifest, MeshLayout(2, devices=("cpu", "cpu")), MemoryPolicy(offload_optimizer=True)),
    ]
    assert all(other.apply == one.apply and str(other) != str(one) for other in others)
    meshes = {numerics_of(packed, MeshLayout(n, devices=("cpu",) * n), MemoryPolicy()).apply for n in (1, 2)}
    assert len(meshes) == 2, "moments in 8 bits are rounded in blocks of what a rank holds"


def test_ranks_are_compared_with_ranks_that_make_the_same_bits_alone() -> None:
    """Another processor rounds otherwise, and so does NCCL on devices that are connected otherwise."""
    manifest, two = Manifest(), MeshLayout(2, devices=("cpu", "cpu"))
    layer = probe_layer(manifest, torch.device("cpu"))
    assert all(layer in numerics_of(manifest, each, MemoryPolicy()).device for each in (MeshLayout(), two))
    cuda = tuple(f"cuda:{number}" for number in range(4))
    assert adds_in_own_order(MeshLayout(4, devices=cuda)) and adds_in_own_order(MeshLayout(1, 4, "dp", devices=cuda))
    assert not adds_in_own_order(MeshLayout(2, 2, "zero1", devices=cuda))
    assert not adds_in_own_order(MeshLayout(4, devices=("cpu",) * 4))
    classes = [NumericsClass("GPU", "torch", f"tp4{where}", "fp32", "eager", "0") for where in ("", "@1", "@2")]
    assert len({*map(str, classes)}) == 3


@given(st.text(max_size=40))
def test_any_text_is_a_numerics_class(text: str) -> None:
    assert NumericsClass.parse(text).device == text.split("/")[0]


@pytest.mark.parametrize(
    "full", [torch.OutOfMemoryError("CUDA out of memory. Tried to"), DeviceFull("CUDA out of memory")]
)
def test_a_device_that_is_full_ends_in_one_line_with_what_takes_less(full: Exception) -> None:
    with (
        pytest.raises(UsageError, match=r"^CUDA out of memory; what takes less: .*--slots.*microbatch_size$"),
        memory_fit.full_in_words(),
    ):
        raise full


# ---------------------------------------------------------------- GPUs, without one


def gpus(monkeypatch: pytest.MonkeyPatch, *names: str, told: str | Exception = "") -> list[int]:
    """CUDA devices of 10 MiB with these names, of which 1 MiB is free as CUDA sees it. told: by the driver.

    Returns the devices on which a context is opened from now on.
    """
    opened: list[int] = []

    def run(*_: object, **__: object) -> SimpleNamespace:
        if isinstance(told, Exception):
            raise told
        return SimpleNamespace(stdout=told)

    def mem_get_info(number: int) -> tuple[int, int]:
        opened.append(number)
        return 1 << 20, 10 << 20

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[torch.device(device).index])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda n: SimpleNamespace(uuid=f"uuid-{n}", total_memory=10 << 20)
    )
    return opened


def test_free_memory_is_asked_of_the_driver_in_its_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = gpus(monkeypatch, told="GPU-uuid-1, 7\nGPU-uuid-9, 1\nGPU-uuid-0, 5\n")
    assert memory_fit.free_on_gpus([0, 1]) == [5 << 20, 7 << 20]
    assert memory_fit.memory_here(MeshLayout(2, devices=("cuda:1", "cuda:0"))) == 5 << 20 and not opened


@pytest.mark.parametrize("told", [OSError("no such command"), subprocess.TimeoutExpired("it", 1), "N/A", "GPU-a, 3"])
def test_without_its_driver_only_the_one_gpu_of_this_process_is_opened(
    monkeypatch: pytest.MonkeyPatch, told: str | Exception
) -> None:
    opened = gpus(monkeypatch, told=told)
    assert memory_fit.free_on_gpus([0, 1]) == [10 << 20] * 2 and not opened
    assert memory_fit.free_on_gpus([1]) == [1 << 20] and opened == [1]


def test_a_numerics_class_names_gpus_and_tells_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
    gpus(monkeypatch, "NVIDIA H100 80GB HBM3", f"{long} A/B", f"{long} C")
    found = [
        numerics_of(Manifest(), MeshLayout(devices=(f"cuda:{number}",)), MemoryPolicy(offload_optimizer=True))
        for number in range(3)
    ]
    assert found[0].device == "NVIDIA H100 80GB HBM3"
    assert found[1].device != found[2].device and all(len(each.device) <= 32 for each in found)
    assert all(NumericsClass.parse(str(each)) == each for each in found)
    assert len({each.apply for each in found}) == 1, "weights are compared if updates have equal bits"
