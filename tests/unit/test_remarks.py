"""What is said of a manifest that is valid, and perhaps not what was meant."""

from __future__ import annotations

import pytest

from swarmnet.manifest.implied import remarks
from swarmnet.manifest.schema import Averaging, Manifest, Numerics, Training
from swarmnet.sums.local_sum import OuterPlan


def manifest(steps: int, *, sync: str = "local", **averaging: object) -> Manifest:
    mode, codec = ("fp32", "fp16") if sync == "local" else ("deterministic", "small")
    return Manifest(
        training=Training(total_steps=steps),
        numerics=Numerics(mode=mode),  # type: ignore[arg-type]
        averaging=Averaging(sync=sync, codec=codec, **averaging),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("steps", "averaging", "said"),
    [
        (60, {}, "never sets in"),
        (61, {}, "never sets in"),
        (62, {}, "only after step 60 of 62"),
        (120, {}, "only after step 60 of 120"),
        (121, {}, ""),
        (800, {}, ""),
        (300, {"partners": "pairs", "outer_warmup_steps": 150}, "only after step 150 of 300"),
        (30, {"outer_warmup_steps": 0}, ""),
        (30, {"outer_momentum": 0.0}, ""),
        (60, {"sync": "exact"}, ""),
    ],
)
def test_a_warm_up_that_is_most_of_the_run_is_told(steps: int, averaging: dict[str, object], said: str) -> None:
    lines = remarks(manifest(steps, **averaging))
    assert len(lines) == bool(said) and all(
        f"note: outer momentum {said}"[:20] in line and said in line and "\n" not in line for line in lines
    )


@pytest.mark.parametrize("steps", [2, 40, 60, 61, 62, 100])
def test_it_never_sets_in_where_no_outer_step_is_other_than_plain(steps: int) -> None:
    plan = OuterPlan(10, inner_steps=20, fragments=1, total_steps=steps, warmup_steps=60)
    ever = any(plan.due(step) and not plan.plain(step) for step in range(steps))
    assert ("never" in remarks(manifest(steps))[0]) == (not ever)


@pytest.mark.parametrize(("steps", "after", "said"), [(40, 40, True), (41, 40, False), (3, 40, True), (3, 2, False)])
def test_a_run_that_ends_before_its_steps_overlap_is_told(steps: int, after: int, said: bool) -> None:
    lines = remarks(manifest(steps, sync="overlap", overlap_after=after))
    assert len(lines) == said and all("no step overlaps another" in line and "\n" not in line for line in lines)


def test_the_default_manifest_is_as_meant() -> None:
    assert remarks(Manifest()) == []
