"""Which ranks a peer gets: from what was typed, what the machine has and what the model lets be split."""

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from swarmnet import telemetry
from swarmnet.cli.frame import run
from swarmnet.config.peer import Caps, Mesh
from swarmnet.errors import UsageError
from swarmnet.manifest.file import to_toml
from swarmnet.manifest.schema import Manifest, Model, Training
from swarmnet.peer.devices import Device, choose_layout, meaningless, refuse_useless
from swarmnet.ranks.layout import MeshLayout, Shard

MANIFEST = Manifest(
    model=Model(num_heads=8, num_kv_heads=4, intermediate_size=96, vocab_size=258),
    training=Training(microbatch_size=4, sequence_length=36),
)


def chosen(mesh: Mesh, device: Device = "auto", *, cuda: int = 0, manifest: Manifest = MANIFEST) -> MeshLayout:
    return choose_layout(mesh, device, manifest, cuda=cuda)


def gpus(*numbers: int) -> tuple[str, ...]:
    return tuple(f"cuda:{number}" for number in numbers)


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
def test_what_is_asked_for_and_there(mesh: Mesh, device: Device, cuda: int, layout: MeshLayout) -> None:
    assert chosen(mesh, device, cuda=cuda) == layout


@pytest.mark.parametrize(
    ("mesh", "ignored"),
    [
        (Mesh(), ""),
        (Mesh(gpus="auto", shard="zero1"), "--shard zero1"),
        (Mesh(gpus="auto", sequence_parallel=True), "--sequence-parallel"),
        (Mesh(gpus="auto", shard="zero3", sequence_parallel=True), "--shard zero3 and --sequence-parallel"),
    ],
)
def test_what_one_rank_ignores_has_a_name(mesh: Mesh, ignored: str) -> None:
    assert meaningless(mesh, chosen(mesh, cuda=1)) == ignored
    several = Mesh(gpus="auto", tensor=2, shard="zero1", sequence_parallel=True)
    assert meaningless(several, chosen(several, cuda=4)) == ""


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
    mesh = Mesh(
        **({"gpus": str(ranks)} if on_gpus else {"ranks": ranks}), tensor=tensor, shard=shard, sequence_parallel=split
    )
    try:
        layout = chosen(mesh, cuda=cuda)
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
        refuse_useless(one, none, layout)
    refuse_useless(one, one, layout)
    refuse_useless(none, one, layout)
    refuse_useless(Caps.model_validate({f"{used}_gib": 1.0}), none, layout)
