"""What came of a step, in figures for people. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from swarmnet.bounds import Between
from swarmnet.ids import Number

_NotNegative = Annotated[float, Between(0.0, math.inf)]

MAX_FIGURES = 256
"""Steps in one answer: about 12 KB."""

MAX_EVALUATIONS = 256


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What came of one step."""

    step: Number
    loss_sum: float
    """Nats, as in the last stage's commit."""
    num_tokens: Annotated[int, Between(0, (1 << 63) - 1)]
    grad_norm: _NotNegative
    """Of the mean gradient of all stages, before it is clipped."""
    learning_rate: _NotNegative
    ago_s: _NotNegative
    """Seconds since the callee applied it."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out loss, nats per token, of the weights of a version."""

    version: Number
    loss: float
