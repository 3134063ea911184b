"""A gradient that is one step late: where the exact steps before were stable, the late ones are, too."""

from __future__ import annotations

import pytest
import torch

from swarmnet.manifest.schema import NO_DELAY, Delay, Optimizer
from swarmnet.stage.optimizer import StageOptimizer, first_moment

EXACT, STEPS = 300, 600


def distance(curvature: float, delay: Delay) -> float:
    """Of a weight from the minimum of curvature * w^2 / 2 at a rate of 1; it begins at 1e-3, and a nudge follows."""
    # With eps = 1 the second moment of small gradients does not matter, so the update is a linear one.
    table = Optimizer(eps=1.0, lead=2.5, beta2=0.0, weight_decay=0.0)
    weight = torch.tensor([1e-3])
    optimizer, before = StageOptimizer([weight], table, delay=delay), weight.clone()
    for step in range(STEPS):
        at = before if delay.behind(step) else weight.clone()
        before = weight.clone()
        optimizer.step([at * curvature], learning_rate=1.0)
        if step == EXACT:
            weight += 1e-3
    return abs(weight.item())


@pytest.mark.parametrize("curvature", [0.1, 1.0, 2.5, 4.0, 6.0])
def test_late_steps_are_stable_where_exact_ones_are(curvature: float) -> None:
    assert distance(curvature, NO_DELAY) < 1e-4
    assert distance(curvature, Delay(1, EXACT)) < 1e-4


def test_the_first_moment_averages_over_more_steps_once_gradients_are_late() -> None:
    table, delay = Optimizer(beta1=0.9, lead=2.5), Delay(1, 2)
    betas = [first_moment(table, delay, step) for step in range(1, 5)]
    late = 3.6 * 9 / (1 + 3.6 * 9)
    assert [beta1 for beta1, _ in betas] == pytest.approx([0.9, 0.9, late, late])
    assert [product for _, product in betas] == pytest.approx([0.9, 0.81, 0.81 * late, 0.81 * late**2])
    assert [first_moment(table, NO_DELAY, step)[0] for step in range(1, 5)] == [0.9] * 4
    assert first_moment(Optimizer(beta1=0.9, lead=0.0), Delay(1, 0), 9)[0] == 0.9, "it would lag, and bring nothing"
