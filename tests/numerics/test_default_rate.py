"""The default optimizer must not amplify rounding: a curve that two groupings of one sum tell apart proves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarmnet.local import oracle
from swarmnet.local.audit import FP32_STEPS, FP32_TOLERANCE
from swarmnet.local.prepare import read_tokens, with_data
from swarmnet.manifest.schema import Averaging, Data, Manifest, Numerics


class InTwoSums(oracle._Plain):
    """The same gradients, odd and even microbatches summed apart, as two replicas do."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self._sums: list[list[torch.Tensor]] = [[], []]

    def count(self, index: int) -> None:
        gradients = [parameter.grad for parameter in self._behind]
        held = self._sums[index % 2]
        self._sums[index % 2] = [a + b for a, b in zip(held, gradients, strict=True)] if held else gradients
        for parameter in self._behind:
            parameter.grad = None

    def step(self, step: int, num_tokens: int) -> None:
        for parameter, even, odd in zip(self._behind, *self._sums, strict=True):
            parameter.grad = even + odd
        self._sums = [[], []]
        super().step(step, num_tokens)


def test_losses_of_the_first_steps_do_not_show_how_sums_were_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = with_data(
        Manifest(data=Data(source="corpus:small"), numerics=Numerics(mode="fp32"),
                 averaging=Averaging(codec="fp32")),
        base=Path(),
    )
    tokens = read_tokens(manifest)
    plain = oracle.run_oracle(manifest, tokens, steps=FP32_STEPS).losses
    monkeypatch.setattr(oracle, "_Plain", InTwoSums)
    grouped = oracle.run_oracle(manifest, tokens, steps=FP32_STEPS).losses
    apart = max(abs(a - b) for a, b in zip(plain, grouped, strict=True))
    assert 0 < apart < FP32_TOLERANCE / 10
