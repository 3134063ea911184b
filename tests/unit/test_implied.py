"""What a new manifest gets with what was asked for."""

from __future__ import annotations

import pytest

from swarmnet.config.check import layer
from swarmnet.manifest.file import change
from swarmnet.manifest.implied import PARTNERS_MOMENTUM, PARTNERS_WARMUP_STEPS, SPARSE_INNER_STEPS, implied
from swarmnet.manifest.schema import Manifest

LOCAL = {"averaging.sync": "local"}
FAST = {"numerics.mode": "fast"}
SMALL = {"averaging.codec": "small"}
FP32 = {"numerics.mode": "fp32", "averaging.reducer": "norm_clip"}
INT8 = {**FP32, "averaging.codec": "int8"}
WARMUP = {"averaging.outer_momentum": PARTNERS_MOMENTUM, "averaging.outer_warmup_steps": PARTNERS_WARMUP_STEPS}
NF4 = {"averaging.codec": "nf4"}
PAIRS, GROUPS = {"averaging.partners": "pairs"}, {"averaging.partners": "groups"}


@pytest.mark.parametrize(
    ("said", "follows"),
    [
        (LOCAL, INT8),
        (LOCAL | {"averaging.codec": "int8"}, FP32),
        (LOCAL | {"averaging.reducer": "sum"}, {"numerics.mode": "fp32", "averaging.codec": "int8"}),
        (LOCAL | PAIRS, {**INT8, **WARMUP}),
        (LOCAL | NF4, {**FP32, "averaging.inner_steps": 24, "averaging.fragments": 4}),
        (LOCAL | {"averaging.codec": "sparse:0.05"}, {**FP32, "averaging.inner_steps": SPARSE_INNER_STEPS}),
        (LOCAL | PAIRS | NF4, {**FP32, **WARMUP}),
        (LOCAL | GROUPS, {**INT8, **WARMUP, "averaging.group_size": 4}),
        (LOCAL | PAIRS | {"averaging.outer_momentum": 0.2}, {**INT8, "averaging.outer_warmup_steps": 150}),
        ({}, SMALL),
        (FAST, SMALL),
        ({"averaging.codec": "int64"}, {}),
        ({"averaging.sync": "overlap"}, {**SMALL, "averaging.overlap_after": 300, "optimizer.lead": 2.5}),
        ({"averaging.sync": "overlap", "optimizer.lead": 0.0}, {**SMALL, "averaging.overlap_after": 300}),
        ({"averaging.sync": "overlap", "optimizer.beta1": 0.0}, {**SMALL, "averaging.overlap_after": 300}),
    ],
)
def test_what_a_choice_of_sync_brings_along(said: dict, follows: dict) -> None:
    assert implied(said) == follows
    fields = {**follows, **said}
    change(Manifest(), [layer("test", tuple(name.split(".")), value) for name, value in fields.items()], where="test")


def test_a_manifest_keeps_its_codec() -> None:
    assert implied({"training.seed": 3}, new=False) == implied(FAST, new=False) == {}
