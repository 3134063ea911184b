"""Which ranks a peer gets, what they may compute in and keep, and what is refused in words. GPUs are made up."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from swarmnet import telemetry
from swarmnet.cli.frame import run
from swarmnet.config.peer import Caps, Memory, Mesh, PeerConfig
from swarmnet.errors import DeviceFull, UsageError
from swarmnet.manifest.file import run_id, to_toml
from swarmnet.manifest.schema import Averaging, Manifest, Model, Numerics, Optimizer, Training
from swarmnet.peer import devices, memory_fit
from swarmnet.peer.devices import NumericsClass, adds_in_own_order, check_memory, computed_here
from swarmnet.peer.engines import numerics_of, probe_layer
from swarmnet.peer.run import run_peer
from swarmnet.ranks.layout import MeshLayout, Shard
from swarmnet.stage.passes import MemoryPolicy

MANIFEST = Manifest(
    model=Model(num_heads=8, num_kv_heads=4, intermediate_size=96, vocab_size=258),
    training=Training(microbatch_size=4, sequence_length=36),
)


def chosen(mesh: Mesh, device: str = "auto", *, cuda: int = 0) -> MeshLayout:
    return devices.choose_layout(mesh, device, MANIFEST, cuda=cuda)


def gpus(*numbers: int) -> tuple[str, ...]:
    return tuple(f"cuda:{number}" for number in numbers)


def cpus(tensor: int) -> MeshLayout:
    return MeshLayout(tensor, devices=("cpu",) * tensor)


# ---------------------------------------------------------------- which ranks


@pytest.mark.parametrize(
    ("mesh", "device", "cuda", "layout"),
    [
        (Mesh(), "auto", 0, MeshLayout()),
        (Mesh(), "cpu", 8, MeshLayout()),
        (Mesh(), "auto", 8, MeshLayout(devices=gpus(0))),
        (Mesh(gpus="3,"), "cuda", 8, MeshLayout(devices=gpus(3))),
        (Mesh(gpus="auto"), "auto", 0, MeshLayout()),
        (Mesh(gpus="auto"), "cpu", 8, MeshLayout()),
        (Mesh(gpus="auto", shard="zero3", sequence_parallel=True), "auto", 1, MeshLayout(devices=gpus(0))),
        (Mesh(gpus="auto"), "auto", 4, MeshLayout(4, devices=gpus(0, 1, 2, 3))),
        (Mesh(gpus="4", sequence_parallel=True), "auto", 8, MeshLayout(4, 1, "none", True, gpus(0, 1, 2, 3))),
        (Mesh(gpus="5,1"), "cuda", 8, MeshLayout(2, devices=gpus(5, 1))),
        (Mesh(gpus="4", shard="zero3"), "auto", 8, MeshLayout(1, 4, "zero3", devices=gpus(0, 1, 2, 3))),
        (Mesh(gpus="8", shard="zero2", tensor=4), "auto", 8, MeshLayout(4, 2, "zero2", devices=gpus(*range(8)))),
        (Mesh(ranks=2), "auto", 8, MeshLayout(2, devices=("cpu",) * 2)),
        (Mesh(ranks=4, shard="dp"), "cpu", 0, MeshLayout(1, 4, "dp", devices=("cpu",) * 4)),
    ],
)
def test_what_is_asked_for_and_there(mesh: Mesh, device: str, cuda: int, layout: MeshLayout) -> None:
    assert chosen(mesh, device, cuda=cuda) == layout


def test_what_one_rank_ignores_has_a_name() -> None:
    zero, split = {"shard": "zero1"}, {"sequence_parallel": True}
    both = "--shard zero1 and --sequence-parallel"
    for fields, ignored in (({}, ""), (zero, "--shard zero1"), (split, "--sequence-parallel"), (zero | split, both)):
        mesh = Mesh(gpus="auto", **fields)
        assert devices.meaningless(mesh, chosen(mesh, cuda=1)) == ignored
    several = Mesh(gpus="auto", tensor=2, **zero, **split)
    assert devices.meaningless(several, chosen(several, cuda=4)) == ""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--ranks 5", "5 tensor-parallel ranks cannot split this model: num_heads = 4 is no multiple of 5"),
        ("--ranks 3 --shard zero3", "3 ranks cannot split a microbatch: training.microbatch_size = 4 is no multiple"),
        ("--gpus 999", "--gpus 999: torch sees "),
    ],
)
def test_a_peer_refuses_them_in_one_line_before_it_starts_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, line: str
) -> None:
    monkeypatch.setattr(telemetry, "setup", lambda *args, **kwargs: None)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")  # run_peer sets it for its process, if it is not set
    (tmp_path / "run.toml").write_text(to_toml(Manifest()), encoding="utf-8")
    argv = f"peer --manifest {tmp_path}/run.toml --stage 1 --dir {tmp_path}/peer --no-restart {words}"
    assert run(argv.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"swarmnet: error: {line}") and err.count("\n") == 1 and not (tmp_path / "peer").exists()


@given(
    st.integers(1, 16),
    st.integers(0, 16),
    st.sampled_from(Shard.__args__),
    st.booleans(),
    st.integers(0, 16),
    st.booleans(),
)
def test_a_layout_or_one_line(ranks: int, tensor: int, shard: Shard, split: bool, cuda: int, on_gpus: bool) -> None:
    assume(on_gpus or ranks > 1)
    asked = {"gpus": str(ranks)} if on_gpus else {"ranks": ranks}
    try:
        layout = chosen(Mesh(**asked, tensor=tensor, shard=shard, sequence_parallel=split), cuda=cuda)
    except UsageError as error:
        assert "\n" not in str(error)
        return
    assert layout.ranks == ranks and layout.kind == ("cuda" if on_gpus and cuda else "cpu")
    assert MANIFEST.training.microbatch_size % layout.data == 0 and MANIFEST.model.num_heads % layout.tensor == 0
    assert tensor in (0, layout.tensor) and (layout.shard in (shard, "none"))
    assert (layout.data > 1) == (layout.shard != "none")


@pytest.mark.parametrize(("cuda", "useless", "used"), [(0, "gpu", "host"), (1, "host", "gpu")])
def test_a_cap_of_memory_that_it_does_not_compute_in_is_refused(cuda: int, useless: str, used: str) -> None:
    layout, none = chosen(Mesh(), cuda=cuda), Caps()
    one = Caps.model_validate({f"{useless}_gib": 1.0})
    with pytest.raises(UsageError, match=f"--{useless}-memory does nothing here: .* use --{used}-memory"):
        devices.refuse_useless(one, none, layout)
    for allowed in ((one, one), (none, one), (Caps.model_validate({f"{used}_gib": 1.0}), none)):
        devices.refuse_useless(*allowed, layout)


# ---------------------------------------------------------------- which precision

FAST = Manifest(numerics=Numerics(mode="fast"), averaging=Averaging(codec="small"))
LOCAL = Manifest(numerics=Numerics(mode="fp32"), averaging=Averaging(sync="local", codec="int8"))


@pytest.mark.parametrize("manifest", [FAST, LOCAL])
def test_a_run_without_equal_bits_leaves_precision_to_its_peers(manifest: Manifest) -> None:
    mine = computed_here(manifest, "bf16")
    assert mine.numerics == manifest.numerics.model_copy(update={"compute": "bf16"})
    assert computed_here(mine, "fp32") == manifest, "a card without bf16 in a run of bf16"
    assert run_id(mine) != run_id(manifest), "it is for arithmetic alone, and never announced"


def test_a_run_that_promises_bits_does_not_and_what_a_run_says_needs_no_leave(tmp_path: Path) -> None:
    for manifest in (FAST, LOCAL, Manifest()):
        assert all(computed_here(manifest, compute) is manifest for compute in ("run", "fp32"))
    for codec in ("int64", "small"):
        with pytest.raises(UsageError, match="--compute bf16: this run computes in fp32 and promises the bits"):
            computed_here(Manifest(averaging=Averaging(codec=codec)), "bf16")
    with pytest.raises(UsageError, match=r"^--compute bf16"):
        run_peer(PeerConfig(stages=(0,), compute="bf16", dir=tmp_path), Manifest())


# ---------------------------------------------------------------- what is kept, and where


def test_what_needs_cuda_is_refused_without_it_and_everything_else_goes_everywhere() -> None:
    for memory, words in (
        (Memory(activations="offload"), "--activations offload: the CPU's memory is host memory already"),
        (Memory(offload_optimizer=True), "memory.offload_optimizer: the CPU's memory is host memory already"),
        (Memory(compile=True), "--compile: on the CPU it costs"),
    ):
        check_memory(memory, MeshLayout(devices=gpus(0)))
        with pytest.raises(UsageError, match=words):
            check_memory(memory, MeshLayout())
    for policy in ("save", "selective", "recompute_layers", "recompute"):
        check_memory(Memory(activations=policy), cpus(2))


def test_a_compiled_layer_chooses_itself_what_it_keeps_and_is_not_shared_by_ranks() -> None:
    with pytest.raises(ValueError, match="compile = true chooses itself"):
        Memory(compile=True, activations="selective")
    for layout in (MeshLayout(2, devices=gpus(0, 1)), MeshLayout(1, 2, "zero3", devices=gpus(0, 1))):
        with pytest.raises(UsageError, match="exchange tensors in their middle"):
            check_memory(Memory(compile=True), layout)
    check_memory(Memory(compile=True), MeshLayout(1, 2, "zero2", devices=gpus(0, 1)))


@pytest.mark.parametrize(
    "full", [torch.OutOfMemoryError("CUDA out of memory. Tried to"), DeviceFull("CUDA out of memory")]
)
def test_a_device_that_is_full_ends_in_one_line_with_what_takes_less(full: Exception) -> None:
    words = r"^CUDA out of memory; what takes less: .*--slots.*microbatch_size$"
    with pytest.raises(UsageError, match=words), memory_fit.full_in_words():
        raise full


# ---------------------------------------------------------------- what bits depend on


def test_a_numerics_class_says_what_bits_depend_on() -> None:
    manifest = Manifest()
    one = numerics_of(manifest, MeshLayout(), MemoryPolicy())
    assert NumericsClass.parse(str(one)) == one and len(str(one)) <= 128
    assert (one.mesh, one.compute, one.kernels) == ("1", "fp32", "eager") and one.device.startswith("cpu ")
    bf16 = manifest.model_copy(update={"numerics": Numerics(compute="bf16")})
    packed = manifest.model_copy(update={"optimizer": Optimizer(state="8bit")})
    others = [
        numerics_of(bf16, MeshLayout(), MemoryPolicy(compile=True)),
        numerics_of(manifest, cpus(2), MemoryPolicy(offload_optimizer=True)),
    ]
    assert all(other.apply == one.apply and str(other) != str(one) for other in others)
    meshes = {numerics_of(packed, cpus(n), MemoryPolicy()).apply for n in (1, 2)}
    assert len(meshes) == 2, "moments in 8 bits are rounded in blocks of what a rank holds"


def test_ranks_are_compared_with_ranks_that_make_the_same_bits_alone() -> None:
    """Another processor rounds otherwise, and so does NCCL on devices that are connected otherwise."""
    layer, cuda = probe_layer(Manifest(), torch.device("cpu")), gpus(0, 1, 2, 3)
    assert all(layer in numerics_of(Manifest(), each, MemoryPolicy()).device for each in (MeshLayout(), cpus(2)))
    assert adds_in_own_order(MeshLayout(4, devices=cuda)) and adds_in_own_order(MeshLayout(1, 4, "dp", devices=cuda))
    assert not adds_in_own_order(MeshLayout(2, 2, "zero1", devices=cuda)) and not adds_in_own_order(cpus(4))
    classes = [NumericsClass("GPU", "torch", f"tp4{where}", "fp32", "eager", "0") for where in ("", "@1", "@2")]
    assert len({*map(str, classes)}) == 3


@given(st.text(max_size=40))
def test_any_text_is_a_numerics_class(text: str) -> None:
    assert NumericsClass.parse(text).device == text.split("/")[0]


def made_up(monkeypatch: pytest.MonkeyPatch, *names: str, told: str | Exception = "") -> list[int]:
    """CUDA devices of 10 MiB with these names, of which 1 MiB is free as CUDA sees it. told: by the driver.

    Returns the devices on which a context is opened from now on.
    """
    opened: list[int] = []

    def ask_driver(*_: object, **__: object) -> SimpleNamespace:
        if isinstance(told, Exception):
            raise told
        return SimpleNamespace(stdout=told)

    monkeypatch.setattr(subprocess, "run", ask_driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (opened.append(number), (1 << 20, 10 << 20))[1])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[torch.device(device).index])
    properties = lambda n: SimpleNamespace(uuid=f"uuid-{n}", total_memory=10 << 20)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return opened


def test_free_memory_is_asked_of_the_driver_in_its_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = made_up(monkeypatch, told="GPU-uuid-1, 7\nGPU-uuid-9, 1\nGPU-uuid-0, 5\n")
    assert memory_fit.free_on_gpus([0, 1]) == [5 << 20, 7 << 20]
    assert memory_fit.memory_here(MeshLayout(2, devices=gpus(1, 0))) == 5 << 20 and not opened


@pytest.mark.parametrize("told", [OSError("no such command"), subprocess.TimeoutExpired("it", 1), "N/A", "GPU-a, 3"])
def test_without_its_driver_only_the_one_gpu_of_this_process_is_opened(
    monkeypatch: pytest.MonkeyPatch, told: str | Exception
) -> None:
    opened = made_up(monkeypatch, told=told)
    assert memory_fit.free_on_gpus([0, 1]) == [10 << 20] * 2 and not opened
    assert memory_fit.free_on_gpus([1]) == [1 << 20] and opened == [1]


def test_a_numerics_class_names_gpus_and_tells_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    long, policy = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", MemoryPolicy(offload_optimizer=True)
    made_up(monkeypatch, "NVIDIA H100 80GB HBM3", f"{long} A/B", f"{long} C")
    found = [numerics_of(Manifest(), MeshLayout(devices=gpus(number)), policy) for number in range(3)]
    assert found[0].device == "NVIDIA H100 80GB HBM3"
    assert found[1].device != found[2].device and all(len(each.device) <= 32 for each in found)
    assert all(NumericsClass.parse(str(each)) == each for each in found)
    assert len({each.apply for each in found}) == 1, "weights are compared if updates have equal bits"
