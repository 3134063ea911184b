"""Codecs by name: ours cannot be replaced, others' are loaded when a manifest asks for them, never when a peer does."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from swarmnet.config.peer import PeerConfig
from swarmnet.config.plug_in import is_plug_in
from swarmnet.errors import BadMessage, UsageError
from swarmnet.manifest.codec_names import check_averaging, check_boundary, named_by
from swarmnet.manifest.schema import Averaging, Manifest, Numerics, Wire
from swarmnet.messages import Packed
from swarmnet.trainer.run import run_trainer
from swarmnet.wire import codecs

SIGN = '''
import torch

class Sign:
    """Signs under one scale."""
    dtype, feedback, block = "float32", True, 64

    def __init__(self, parameter):
        self.name = self.reduced = "acme.sign" if parameter is None else f"acme.sign:{parameter}"

    def sizes(self, num_elements):
        return num_elements, num_elements

    def check(self, data, num_elements):
        pass

    def encode(self, x_N):
        return x_N.sign().to(torch.int8)

    def decode(self, data, out_N):
        out_N.copy_(data.view(torch.int8))

    def bound(self, x_N):
        return (x_N.sign() - x_N).abs().double()

class Thief(Sign):
    def __init__(self, parameter):
        self.name = self.reduced = "int8"

class Half:
    name, dtype, reduced = "acme.half", "float32", "acme.half"
    def __init__(self, parameter): ...

class Odd(Sign):
    block = 96

class Vague(Sign):
    def sizes(self, num_elements):
        return num_elements

class Endless(Sign):
    def sizes(self, num_elements):
        return 0, 1 << 60

def broken(parameter):
    raise RuntimeError("no kernels here")
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a distribution with these entry points on the path, as an installer would."""

    def put(distribution: str, entries: dict[str, str]) -> None:
        site = tmp_path / distribution
        info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"{name} = {target}" for name, target in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[swarmnet.codecs]", *lines]) + "\n")
        (site / "acme_codecs.py").write_text(SIGN)
        monkeypatch.syspath_prepend(str(site))
        importlib.invalidate_caches()

    monkeypatch.setattr(codecs, "_used", {})
    monkeypatch.delitem(sys.modules, "acme_codecs", raising=False)
    yield put
    sys.modules.pop("acme_codecs", None)


def test_a_plug_in_is_used_like_our_own(install) -> None:
    install("acme-codecs", {"acme.sign": "acme_codecs:Sign"})
    assert codecs.use("acme.sign") is codecs.use("acme.sign")
    x = torch.tensor([3.0, -0.5, 0.0])
    packed = codecs.encode("acme.sign", x)
    assert codecs.decode(packed).tolist() == [1, -1, 0] and packed.num_bytes == 3
    assert codecs.use("acme.sign:7").name == "acme.sign:7"


def local(codec: str) -> Manifest:
    return Manifest(numerics=Numerics(mode="fp32"), averaging=Averaging(sync="local", codec=codec))


@pytest.mark.parametrize(
    ("field", "manifest"),
    [
        ("averaging.codec", local("acme.sign")),
        ("wire.activations", Manifest(wire=Wire(activations="acme.sign"))),
        ("wire.gradients", Manifest(wire=Wire(gradients="acme.sign"))),
    ],
)
def test_all_that_a_run_needs_is_loaded_or_its_field_named(install, field: str, manifest: Manifest) -> None:
    with pytest.raises(UsageError, match=f"^{field}: codec acme.sign: no installed distribution"):
        codecs.use_all(named_by(manifest))
    with pytest.raises(UsageError, match=f"^{field}: "):
        run_trainer(PeerConfig(), manifest)
    install("acme-codecs", {"acme.sign": "acme_codecs:Sign"})
    codecs.use_all(named_by(manifest))
    assert codecs.find("acme.sign").name == "acme.sign"


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8", "nf4", "sparse:0.01"])
def test_ours_need_nothing(codec: str) -> None:
    codecs.use_all(named_by(local(codec)))
    codecs.use_all(named_by(Manifest()))


def test_what_a_peer_sends_loads_nothing(install) -> None:
    install("acme-codecs", {"acme.sign": "acme_codecs:Sign"})
    with pytest.raises(BadMessage, match="unknown codec"):
        codecs.decode(Packed("acme.sign", (3,), bytes(3)))
    assert "acme_codecs" not in sys.modules


def test_a_plug_in_cannot_take_our_names(install) -> None:
    install("thief", {"int8": "acme_codecs:Thief", "sparse": "acme_codecs:Thief", "acme.int8": "acme_codecs:Thief"})
    ours = codecs.find("int8")
    assert codecs.use("int8") is ours and "acme_codecs" not in sys.modules
    assert codecs.use("sparse:0.01").name == "sparse:0.01" and "acme_codecs" not in sys.modules
    with pytest.raises(UsageError, match="distribution thief is no such codec: it is 'int8'"):
        codecs.use("acme.int8")
    assert codecs.find("int8") is ours


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("acme_codecs:broken", "cannot be loaded: RuntimeError: no kernels here"),
        ("acme_codecs:missing", "cannot be loaded: AttributeError"),
        ("no_such_module:Sign", "cannot be loaded: ModuleNotFoundError"),
        (
            "acme_codecs:Half",
            "is no codec: it has no feedback, no block, no sizes, no check, no encode, no decode, no bound",
        ),
        ("acme_codecs:Odd", "has blocks of 96 elements: not a power of two up to 65536"),
        ("acme_codecs:Vague", "takes 0 bytes for 0 elements: not"),
        ("acme_codecs:Endless", "for 0 elements: not"),
    ],
)
def test_a_bad_plug_in_is_named_with_its_distribution(install, target: str, line: str) -> None:
    install("acme-codecs", {"acme.sign": target, "acme.half": target})
    name = "acme.half" if target.endswith("Half") else "acme.sign"
    with pytest.raises(UsageError) as caught:
        codecs.use(name)
    assert str(caught.value).startswith(f"codec {name} of distribution acme-codecs ") and line in str(caught.value)


def test_two_that_bring_the_same_codec_are_named(install) -> None:
    install("acme-codecs", {"acme.sign": "acme_codecs:Sign"})
    install("other-codecs", {"acme.sign": "acme_codecs:Sign"})
    with pytest.raises(UsageError, match=r"brought by acme-codecs and by other-codecs; uninstall all but one"):
        codecs.use("acme.sign")


def test_a_missing_plug_in_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"no installed distribution has an entry point 'acme\.none'"):
        codecs.use("acme.none:3")


@pytest.mark.parametrize(
    "name", ["int9", "topk:0.01", "sparse:", "sparse:0.010", "sparse:nan", "sparse:2.0", "", "auto", "x" * 1000]
)
def test_no_name_but_ours_is_found(name: str) -> None:
    with pytest.raises(BadMessage, match="unknown codec"):
        codecs.find(name)
    with pytest.raises(UsageError):
        codecs.use(name)


# ---------------------------------------------------------------- names in a manifest


@pytest.mark.parametrize("name", ["fp32", "fp16", "int8", "nf4", "acme.sign", "acme.sign:3", "a-b.c_d.e"])
def test_names_that_are_good_everywhere(name: str) -> None:
    assert check_boundary(name) == check_averaging(name) == name


@pytest.mark.parametrize("name", ["int64", "small", "sparse:0.01", "sparse:0.25", "sparse:1e-05"])
def test_names_that_are_good_for_aggregates_alone(name: str) -> None:
    assert check_averaging(name) == name
    with pytest.raises(ValueError, match="fp32, bf16, fp16, int8, bnb8, nf4"):
        check_boundary(name)


GONE = ("bf16", "bnb8", "auto", "auto:nf4", "topk:0.01", "powersgd:4")


def test_ours_are_never_spelled_as_others() -> None:
    assert not any(map(is_plug_in, (*codecs.NAMES, "sparse:0.01", *GONE)))
