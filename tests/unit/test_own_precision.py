"""`--compute`: which runs let a machine compute in another precision than theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swarmnet.cli.frame import run
from swarmnet.config.peer import PeerConfig
from swarmnet.errors import UsageError
from swarmnet.manifest.file import run_id, to_toml
from swarmnet.manifest.schema import Averaging, Manifest, Numerics
from swarmnet.peer.devices import NumericsClass, computed_here
from swarmnet.peer.run import run_peer

FLOATS = Manifest(numerics=Numerics(mode="fp32"), averaging=Averaging(codec="int8"))


@pytest.mark.parametrize("manifest", [FLOATS, Manifest()])
@pytest.mark.parametrize("compute", ["run", "fp32"])
def test_what_the_run_says_needs_no_leave(manifest: Manifest, compute: str) -> None:
    assert computed_here(manifest, compute) is manifest


def test_a_run_of_floats_leaves_precision_to_its_peers() -> None:
    mine = computed_here(FLOATS, "bf16")
    assert mine.numerics == Numerics(mode="fp32", compute="bf16")
    assert computed_here(mine, "fp32") == FLOATS, "a card without bf16 in a run of bf16"
    assert run_id(mine) != run_id(FLOATS), "it is for arithmetic alone, and never announced"


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


def test_precision_is_no_part_of_what_weights_depend_on() -> None:
    one = NumericsClass("cpu AVX2", "torch-2.13.0", "1", "fp32", "eager", "bdac02c7")
    other = replace(one, compute="bf16")
    assert str(other) != str(one), "status tells them apart"
    assert other.of_weights(exact=False) == one.of_weights(exact=False)
    assert replace(one, device="H100").of_weights(exact=False) != one.of_weights(exact=False)
