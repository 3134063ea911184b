"""`--compute`: which runs let a machine compute in another precision than theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnet.cli.frame import run
from swarmnet.config.peer import PeerConfig
from swarmnet.errors import UsageError
from swarmnet.manifest.file import run_id, to_toml
from swarmnet.manifest.schema import Averaging, Manifest, Numerics
from swarmnet.peer.devices import computed_here
from swarmnet.peer.run import run_peer

FAST = Manifest(numerics=Numerics(mode="fast"), averaging=Averaging(codec="small"))
LOCAL = Manifest(numerics=Numerics(mode="fp32"), averaging=Averaging(sync="local", codec="int8"))


@pytest.mark.parametrize("manifest", [FAST, LOCAL, Manifest()])
@pytest.mark.parametrize("compute", ["run", "fp32"])
def test_what_the_run_says_needs_no_leave(manifest: Manifest, compute: str) -> None:
    assert computed_here(manifest, compute) is manifest


@pytest.mark.parametrize("manifest", [FAST, LOCAL])
def test_a_run_without_equal_bits_leaves_precision_to_its_peers(manifest: Manifest) -> None:
    mine = computed_here(manifest, "bf16")
    assert mine.numerics == manifest.numerics.model_copy(update={"compute": "bf16"})
    assert computed_here(mine, "fp32") == manifest, "a card without bf16 in a run of bf16"
    assert run_id(mine) != run_id(manifest), "it is for arithmetic alone, and never announced"


@pytest.mark.parametrize("codec", ["int64", "small"])
def test_a_run_that_promises_bits_does_not(codec: str) -> None:
    with pytest.raises(UsageError, match="--compute bf16: this run computes in fp32 and promises the bits"):
        computed_here(Manifest(averaging=Averaging(codec=codec)), "bf16")


def test_it_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(to_toml(Manifest()), encoding="utf-8")
    assert run(["plan", str(path), "--compute", "bf16"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("swarmnet: error: --compute bf16") and said.count("\n") == 1
    with pytest.raises(UsageError, match=r"^--compute bf16"):
        run_peer(PeerConfig(stages=(0,), compute="bf16", dir=tmp_path), Manifest())
