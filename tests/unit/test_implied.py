"""What a new manifest gets with what was asked for."""

from __future__ import annotations

import pytest

from swarmnet.config.check import layer
from swarmnet.manifest.file import change
from swarmnet.manifest.implied import PARTNERS_MOMENTUM, PARTNERS_WARMUP_STEPS, implied
from swarmnet.manifest.schema import Manifest

LOCAL = {"averaging.sync": "local"}
SMALL = {"averaging.codec": "small"}
FP32 = {"numerics.mode": "fp32", "averaging.codec": "fp32"}
INT8 = {"numerics.mode": "fp32", "averaging.codec": "int8"}
WARMUP = {"averaging.outer_momentum": PARTNERS_MOMENTUM, "averaging.outer_warmup_steps": PARTNERS_WARMUP_STEPS}
NF4 = {"averaging.codec": "nf4"}
PAIRS, GROUPS = {"averaging.partners": "pairs"}, {"averaging.partners": "groups"}
CLIP = {"averaging.reducer": "norm_clip"}


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize(
    ("said", "follows"),
    [
        (LOCAL, {**INT8, **CLIP}),
        (LOCAL | {"averaging.codec": "int8"}, {"numerics.mode": "fp32", **CLIP}),
        (LOCAL | {"averaging.codec": "powersgd:4"}, {"numerics.mode": "fp32"}),
        (LOCAL | {"averaging.reducer": "centered_clip"}, INT8),
        (LOCAL | PAIRS, {**INT8, **CLIP, **WARMUP}),
        (LOCAL | NF4, {"numerics.mode": "fp32", **CLIP, "averaging.inner_steps": 24, "averaging.fragments": 4}),
        (LOCAL | PAIRS | NF4, {"numerics.mode": "fp32", **CLIP, **WARMUP}),
        (LOCAL | GROUPS, {**INT8, **CLIP, **WARMUP, "averaging.group_size": 4}),
        (LOCAL | PAIRS | {"averaging.outer_momentum": 0.2}, {**INT8, **CLIP, "averaging.outer_warmup_steps": 150}),
        (LOCAL | {"numerics.mode": "deterministic"}, {}),
        ({}, SMALL),
        ({"averaging.codec": "int64"}, {}),
        ({"averaging.sync": "overlap"}, {**SMALL, "averaging.overlap_after": 100, "optimizer.lead": 2.5}),
        ({"averaging.sync": "overlap", "optimizer.lead": 0.0}, {**SMALL, "averaging.overlap_after": 100}),
        ({"averaging.sync": "overlap", "optimizer.beta1": 0.0}, {**SMALL, "averaging.overlap_after": 100}),
    ],
)
def test_what_a_choice_of_sync_brings_along(said: dict, follows: dict, opened: bool) -> None:
    assert implied(said, opened=opened) == follows


def test_open_runs_with_float_sums_clip_and_others_do_not() -> None:
    assert implied(FP32, opened=True) == CLIP
    assert implied(FP32, opened=False) == {}
    assert implied(FP32 | {"averaging.reducer": "sum"}, opened=True) == {}
    assert implied(FP32 | {"averaging.codec": "powersgd:2"}, opened=True) == {}


def test_a_manifest_keeps_its_codec_until_its_mode_changes() -> None:
    assert implied({"training.seed": 3}, opened=True, anew=False) == {}
    assert implied({"numerics.mode": "fp32"}, opened=False) == {"averaging.codec": "fp32"}


@pytest.mark.parametrize("codec", [None, "int8", "nf4", "powersgd:4"])
def test_what_follows_makes_a_manifest(codec: str | None) -> None:
    said = LOCAL | ({} if codec is None else {"averaging.codec": codec})
    fields = {**implied(said, opened=True), **said}
    change(Manifest(), [layer("test", tuple(name.split(".")), value) for name, value in fields.items()], where="test")
