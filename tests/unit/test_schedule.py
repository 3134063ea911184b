"""Learning rate and gradient scale."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import BadMessage
from swarmnet.ids import NO_CHAIN, Ballot, PeerId, RoundId
from swarmnet.manifest.schema import Cut, Manifest, Model, Optimizer
from swarmnet.messages import Commit
from swarmnet.stage.canonical import Canonical, clip_factor, learning_rate
from swarmnet.step.commits import gradient_norm


def rates(total: int, **fields: object) -> list[float]:
    table = Optimizer(learning_rate=1.0, **fields)
    return [learning_rate(table, step, total_steps=total) for step in range(total)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"schedule": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "constant", "warmup_steps": 0}, [1.0, 1.0, 1.0]),
        (
            {"schedule": "wsd", "warmup_steps": 2, "decay_steps": 4, "min_lr_ratio": 0.0},
            [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25],
        ),
        ({"schedule": "wsd", "warmup_steps": 0, "decay_steps": 0}, [1.0] * 4),
    ],
)
def test_rates(fields: dict[str, object], expected: list[float]) -> None:
    assert rates(len(expected), **fields) == pytest.approx(expected)


def test_what_the_manifest_says_of_warmup_is_what_is_computed() -> None:
    said = Optimizer.model_fields["warmup_steps"].description or ""
    formula = said.partition(" has ")[2].partition(" of the peak")[0]
    told = [eval(formula, {"t": t, "warmup_steps": 4}) for t in range(4)]
    assert rates(4, schedule="constant", warmup_steps=4) == told


def test_cosine_ends_at_the_floor() -> None:
    table = Optimizer(learning_rate=2.0, schedule="cosine", warmup_steps=10, min_lr_ratio=0.1)
    found = [learning_rate(table, step, total_steps=110) for step in (10, 60, 110, 500)]
    assert found == pytest.approx([2.0, 2.0 * 0.55, 0.2, 0.2])


@given(
    st.sampled_from(["constant", "cosine", "wsd"]),
    st.integers(0, 40),
    st.integers(0, 60),
    st.integers(1, 60),
    st.floats(0, 1),
)
def test_the_rate_rises_during_warmup_never_after_and_stays_in_bounds(
    schedule: str, warmup: int, decay: int, total: int, floor: float
) -> None:
    found = rates(total, schedule=schedule, warmup_steps=warmup, decay_steps=decay, min_lr_ratio=floor)
    assert all(0 <= rate <= 1 + 1e-12 for rate in found)
    assert found[:warmup] == sorted(found[:warmup])
    assert all(later <= earlier + 1e-12 for earlier, later in zip(found[warmup:], found[warmup + 1 :], strict=False))


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=8), st.integers(1, 10**9), st.floats(1e-3, 1e3))
def test_the_scaled_gradient_is_the_average_clipped(squares: list[float], tokens: int, clip: float) -> None:
    scale = clip_factor(squares, num_tokens=tokens, clip_norm=clip) / tokens
    norm = math.sqrt(math.fsum(squares))
    assert scale * norm <= clip * (1 + 1e-9)
    if norm / tokens <= clip * 0.99 - 1e-5:
        assert scale == 1.0 / tokens


# ---------------------------------------------------------------- what divides the sum of each stage

ROUND = RoundId(Ballot(0, PeerId("")), 0)


def scales(tokens: list[int], squares: list[float], clip_norm: float) -> list[float]:
    """What each stage multiplies its sum with, by the tokens and the squared norm of all of them."""
    manifest = Manifest(model=Model(num_layers=4), cut=Cut(stages=2), optimizer=Optimizer(clip_norm=clip_norm))
    commits = [
        Commit(stage, 0, NO_CHAIN, ROUND, b"", num_tokens, 0.0, square)
        for stage, (num_tokens, square) in enumerate(zip(tokens, squares, strict=True))
    ]
    return [Canonical(manifest.of_stage(stage), {}).update(0, commits).scale for stage in range(2)]


@given(st.lists(st.floats(0, 1e12), min_size=2, max_size=2), st.integers(1, 10**9), st.floats(1e-3, 1e3))
def test_stages_that_counted_the_same_microbatches_scale_alike(squares: list[float], tokens: int, clip: float) -> None:
    expected = clip_factor(squares, num_tokens=tokens, clip_norm=clip) / tokens
    assert scales([tokens, tokens], squares, clip) == [expected, expected], "the same bits"


@given(st.integers(1, 1000), st.integers(1, 1000), st.floats(1e-3, 1e3))
def test_a_stage_that_has_discarded_a_gradient_divides_by_what_it_counted(first: int, last: int, clip: float) -> None:
    # The gradient of each token is 3 long in stage 0, and 4 in the last one.
    found = scales([first, last], [(3.0 * first) ** 2, (4.0 * last) ** 2], clip)
    expected = min(1.0, clip / 5.0)
    assert [found[0] * first, found[1] * last] == pytest.approx([expected, expected], rel=1e-5)


def test_the_norm_that_is_shown_is_the_one_that_is_clipped_by() -> None:
    tokens = ((3, 100), (4, 25))
    commits = [Commit(0, 0, NO_CHAIN, ROUND, b"", num, 0.0, float(each * num) ** 2) for each, num in tokens]
    assert gradient_norm(commits) == pytest.approx(5.0)


@pytest.mark.parametrize("tokens", [[0, 8], [8, 0]])
def test_a_commit_without_tokens_is_refused(tokens: list[int]) -> None:
    with pytest.raises(BadMessage):
        scales(tokens, [1.0, 1.0], 1.0)
    with pytest.raises(ValueError, match="num_tokens = 0"):
        clip_factor([1.0], num_tokens=0, clip_norm=1.0)
