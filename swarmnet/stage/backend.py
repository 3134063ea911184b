"""What an engine computes with: the modules, the sums and the state of one stage, wherever they live.

Two implementations: in this process, on one device (`ranks.device_backend`), or on the ranks of a mesh
(`ranks.backend`). Tensors in, tensors out; what may be counted, and what travels, is the engine's business. Of the
compute thread but for `GradientSum`, which the averaging thread reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from swarmnet.stage.accumulator import GradientSum
from swarmnet.stage.state import PastSteps, PastWeights, State
from swarmnet.telemetry.kinds import OnEvent


class StageBackend(Protocol):
    """One stage."""

    device: torch.device
    """Of `forward`'s tensors in here."""
    apart: bool
    """Do other processes compute, so that payloads are better coded outside the compute thread, which waits for
    them?"""
    state: State
    past: PastSteps
    writes_at_once: bool
    """Does backward write weight gradients, so that `accumulate` only adds them and frees their memory?"""

    @property
    def sums(self) -> Sequence[GradientSum]:
        """That of step s is number s % (1 + delay.most)."""

    def watch(self, lost: Callable[[], None], event: OnEvent) -> None:
        """Call these from now on, from any thread. lost: the sums of all open steps and all work are gone; discard
        counts have moved, and `read` refuses. event: something worth a line."""

    def start(self) -> None:
        """Start whatever computes, or check that it runs. Raises MeshFailed if it was given up."""

    def close(self) -> None:
        """End whatever was started, in the middle of a job too: that raises. Any thread."""

    def sum_memory(self) -> Tensor:
        """Memory for one finished sum, zeros: flat, in the dtype of sums. `State.apply` reads it best from there."""

    def forward(self, step: int, tokens: Tensor, hidden: Tensor | None, *, train: bool) -> tuple[Tensor, object | None]:
        """Run the module of `step`: tokens [B, T + 1] on the CPU, hidden [B, T, D], ours to keep, None in the first
        stage. Returns hidden [B, T, D], in the last stage the loss summed over tokens; and, to train, the work done.
        """

    def backward(self, work: Any, gradient: Tensor | None) -> Tensor | None:
        """The gradient of the input, None in the first stage. Raises ValueError the second time."""

    def accumulate(self, work: Any, *, step: int, index: int, discards: int) -> bool:
        """The weight pass of what backward has run of; see `Accumulator.add`. Ends `work`."""

    def new_share(self) -> object:
        """An empty sum, for a peer's whole contribution to a step that is over. It lasts until `end_recomputing`.
        Raises Refused(NOT_READY)."""

    def recompute(
        self,
        weights: PastWeights,
        index: int,
        tokens: Tensor,
        hidden: Tensor | None,
        gradient: Tensor | None,
        share: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Output (a loss, in the last stage) and input gradient of one microbatch; its gradients are added to `share`,
        unless that is None, rounded as in that step. Raises Refused(NOT_READY): ranks died, and the share with them;
        BadMessage(NON_FINITE) or Overflow, and nothing is added."""

    def read_share(self, share: Any, step: int) -> Tensor:
        """That sum, of `step`: flat, in canonical order. Raises Refused(NOT_READY): ranks died, and the share with
        them."""

    def end_recomputing(self) -> None:
        """Give memory of the device back. Any thread."""
