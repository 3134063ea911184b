"""The frozen weights of a stage as a content: made from a checkpoint, mapped, fetched from peers of whom some lie."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from swarmnet.errors import NoReplica, PeerGone, RejectCode, SwarmError, UsageError
from swarmnet.fetch.driver import HolderCalls
from swarmnet.fetch.plan import address, span
from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Cut, Initial, Lora, Manifest, Model
from swarmnet.messages import Answer, Content, Packed, Rejected, SnapshotPiece, SnapshotRequest
from swarmnet.model.base_file import BaseLayout, base_root, content_of, described, write_base
from swarmnet.model.decoder import StageModule
from swarmnet.model.frozen import FrozenWeight, at_rest
from swarmnet.model.huggingface.checkpoint import Checkpoint
from swarmnet.model.huggingface.config import config_of
from swarmnet.state.base_fetch import fetch_base
from swarmnet.testing.doubles import FakeTransport, run_virtual

pytestmark = pytest.mark.virtual_time

MODEL = Model(hidden_size=64, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
RUN = Manifest(model=MODEL, cut=Cut(stages=2), lora=Lora(r=4, base="nf4"))
A, B = map(PeerId, "ab")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    module = StageModule(MODEL, range(MODEL.num_layers), first=True, last=True)
    module.reset(seed=1)
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(MODEL, longest=16)))
    save_file(dict(module.state_dict()), folder / "model.safetensors")
    return folder


def layout_of(stage: int, base: str = "nf4") -> BaseLayout:
    return BaseLayout.of(RUN.model_copy(update={"lora": Lora(r=4, base=base)}).of_stage(stage))


@pytest.mark.parametrize("base", ["fp32", "bf16", "nf4"])
def test_a_file_holds_each_weight_as_it_rests(base: str, checkpoint: Path, tmp_path: Path) -> None:
    for stage in (0, 1):
        layout, whole = layout_of(stage, base), Checkpoint(checkpoint)
        root = base_root(whole, layout)
        write_base(tmp_path / "base" / root, checkpoint, layout, agreed=root)
        mapped = layout.mapped(tmp_path / "base" / root)
        for name, tensor in whole.read(layout.shapes).items():
            rests = FrozenWeight(at_rest(name, tensor, base)).get(torch.float32)
            assert torch.equal(FrozenWeight(mapped(name)).get(torch.float32), rests), name
            assert all(part.data_ptr() % 64 == 0 for part in mapped(name).values())
    assert layout_of(0, "nf4").num_bytes < layout_of(0, "bf16").num_bytes < layout_of(0, "fp32").num_bytes


def test_a_file_that_is_damaged_or_of_another_checkpoint_is_not_taken(checkpoint: Path, tmp_path: Path) -> None:
    layout = layout_of(0)
    root, path = base_root(Checkpoint(checkpoint), layout), tmp_path / "base"
    assert content_of(path, layout, agreed=root) is None
    with pytest.raises(UsageError, match="this is not the checkpoint that the run begins with"):
        write_base(path, checkpoint, layout, agreed="0" * 64)
    with pytest.raises(UsageError, match="holds neither"):
        write_base(path, tmp_path, layout, agreed=root)
    assert list(tmp_path.glob("base*")) == []
    write_base(path, checkpoint, layout, agreed=root)
    assert content_of(path, layout, agreed=root) is not None
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)
    assert content_of(path, layout, agreed=root) is None
    path.write_bytes(data[:-1])
    with pytest.raises(UsageError, match="has not the"):
        layout.mapped(path)


# ---------------------------------------------------------------- from peers

DATA = bytes(torch.arange(5_000_000).mul(7).to(torch.uint8).numpy())
CONTENT = described([DATA], len(DATA))
ROOT = address(CONTENT).hex()


def piece_of(data: bytes, piece: int) -> SnapshotPiece:
    start, stop = span(CONTENT, piece)
    return SnapshotPiece((Packed("uint8", (stop - start,), data[start:stop]),))


def honest(request: SnapshotRequest) -> Answer:
    return CONTENT if request.piece < 0 else piece_of(DATA, request.piece)


def falsifies(request: SnapshotRequest) -> Answer:
    return CONTENT if request.piece < 0 else piece_of(bytes(len(DATA)), request.piece)


def another(request: SnapshotRequest) -> Answer:
    return described([DATA[1:]], len(DATA) - 1)


class Holding(FakeTransport):
    """Peers that answer so. errors: why some were given up."""

    def __init__(self, **holders: Callable[[SnapshotRequest], Answer]) -> None:
        super().__init__(**holders)
        self.errors: list[SwarmError] = []
        self.to_holders = HolderCalls(self, lambda peer, error: self.errors.append(error))

    @property
    def pieces(self) -> list[tuple[PeerId, int]]:
        """Which were asked for, and of whom."""
        return [(peer, request.piece) for peer, request in self.requests if request.piece >= 0]

    def fetch(self, path: Path) -> bytes:
        holders = [*map(PeerId, self.peers)]
        run_virtual(fetch_base(self.to_holders, holders, 1, path, root=ROOT, num_bytes=len(DATA)))
        return path.read_bytes()


def test_the_pieces_come_from_all_that_have_them(tmp_path: Path) -> None:
    line = Holding(a=honest, b=honest, c=lambda request: Rejected(RejectCode.NOT_FOUND, "not here"))
    assert line.fetch(tmp_path / "base") == DATA
    had = [(peer, piece) for peer, piece in line.pieces if peer in (A, B)]
    assert {peer for peer, _ in had} == {A, B} and sorted(piece for _, piece in had) == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_who_falsifies_a_piece_costs_that_piece_and_is_not_asked_again(tmp_path: Path) -> None:
    line = Holding(a=falsifies, b=honest)
    assert line.fetch(tmp_path / "base") == DATA
    false = [piece for peer, piece in line.pieces if peer == A]
    # It was asked for several at once before the first one came.
    assert len(line.pieces) == 3 + len(false)
    assert [str(error) for error in line.errors] == [str(line.errors[0])] and "not the one described" in str(
        line.errors[0]
    )


def test_another_content_is_refused_whoever_describes_it(tmp_path: Path) -> None:
    with pytest.raises(NoReplica, match="no peer has the frozen weights"):
        Holding(a=another).fetch(tmp_path / "base")
    line = Holding(a=another, b=honest)
    assert line.fetch(tmp_path / "base") == DATA and "describes another content" in str(line.errors)


def test_who_only_promises_holds_up_no_fetch_and_ends_none(tmp_path: Path) -> None:
    """It describes the content truly, and sends no piece; the honest one describes it later."""

    def promises(request: SnapshotRequest) -> Any:
        return CONTENT if request.piece < 0 else 1e9

    line = Holding(a=promises, b=lambda request: [1.5, honest(request)])
    assert line.fetch(tmp_path / "base") == DATA
    with pytest.raises(NoReplica, match="came in part only"):
        Holding(a=promises).fetch(tmp_path / "other")
    with pytest.raises(NoReplica, match="no peer has the frozen weights"):
        Holding(a=lambda request: 1e9).fetch(tmp_path / "other")


def test_a_content_of_other_lengths_is_not_what_the_manifest_names(tmp_path: Path) -> None:
    other = Content(
        len(DATA),
        CONTENT.piece_bytes // 2,
        b"".join(hashlib.sha256(DATA[at : at + (1 << 20)]).digest() for at in range(0, len(DATA), 1 << 20)),
    )
    line = Holding(a=lambda request: other)
    with pytest.raises(NoReplica, match="no peer has the frozen weights"):
        run_virtual(
            fetch_base(line.to_holders, [A], 1, tmp_path / "base", root=address(other).hex(), num_bytes=len(DATA))
        )
    assert "describes another content" in str(line.errors)


def test_what_is_here_is_not_fetched_again(tmp_path: Path) -> None:
    def dies(request: SnapshotRequest) -> Answer:
        if request.piece == 2:
            raise PeerGone("killed", definite=True)
        return honest(request)

    with pytest.raises(NoReplica, match="came in part only"):
        Holding(a=dies).fetch(tmp_path / "base")
    line = Holding(b=honest)
    assert line.fetch(tmp_path / "base") == DATA and [piece for _, piece in line.pieces] == [2]


def test_a_manifest_names_a_root_for_each_stage() -> None:
    """As many as stages; 4 bits need whole blocks, and each stage something to train."""
    with pytest.raises(ValueError, match=r"initial\.sha256 holds 1 digests"):
        RUN.model_validate({**RUN.model_dump(), "initial": Initial(source="hf", sha256=(ROOT,)).model_dump()})
    odd = MODEL.model_copy(update={"intermediate_size": 100}).model_dump()
    with pytest.raises(ValueError, match=r"needs multiples of 64, model\.intermediate_size = 100 is none"):
        Manifest.model_validate({"model": odd, "lora": {"r": 4, "base": "nf4"}, "cut": {"stages": 2}})
    with pytest.raises(ValueError, match="each stage needs a layer to adapt"):
        Manifest.model_validate({"model": MODEL.model_dump(), "lora": {"r": 4}, "cut": {"stages": 2, "layers": (2, 0)}})
    with pytest.raises(ValueError, match="names a matrix twice"):
        Lora(r=4, target_modules=("q_proj", "q_proj"))
    with pytest.raises(ValueError, match='base has no effect without adapters: leave it at its default, "fp32"'):
        Lora(base="nf4")
