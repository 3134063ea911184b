"""What `swarmnet local` was asked to do, checked before anything starts. Knows no manifest and no process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swarmnet.errors import UsageError


@dataclass(frozen=True, slots=True, order=True)
class KillOrder:
    """Kill one replica of `stage` while that stage is in the middle of `step`."""

    stage: int
    step: int

    def __str__(self) -> str:
        return f"{self.stage}@{self.step}"


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """One local swarm. Raises UsageError at once for values that cannot work.

    stages, steps, seed, data, numerics describe a manifest built on the spot; with `manifest` the file says them.
    out: directory of the results, ./runs/local-<seed>-<timestamp> if None. kill: "STAGE@STEP" each. kill_every:
    seconds between two kills anywhere. set: manifest overrides "section.key=value". slots: microbatches one replica
    works on at once, None for what a peer does by default. numerics: None means deterministic for models under 50M
    parameters, else fp32.
    """

    stages: int = 3
    replicas: int = 2
    steps: int = 60
    seed: int = 0
    out: Path | None = None
    kill: tuple[str, ...] = ()
    kill_every: float | None = None
    oracle: bool = False
    trainers: int = 1
    data: str = "stdlib"
    manifest: Path | None = None
    numerics: Literal["deterministic", "fp32"] | None = None
    set: tuple[str, ...] = ()
    slots: int | None = None
    log_level: str = "warning"

    def __post_init__(self) -> None:
        for name in ("stages", "replicas", "steps", "trainers", "slots"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} must be at least 1, got {value}")
        if self.kill_every is not None and not self.kill_every > 0:
            raise UsageError(f"--kill-every must be more than 0 seconds, got {self.kill_every}")
        if self.numerics not in (None, "deterministic", "fp32"):
            raise UsageError(f'--numerics must be "deterministic" or "fp32", got {self.numerics!r}')


def parse_kills(texts: tuple[str, ...], *, stages: int, steps: int) -> tuple[KillOrder, ...]:
    """The kill orders among `stages` stages and steps 0 .. steps - 1. Raises UsageError with the text at fault."""
    orders = []
    for text in texts:
        if not (match := re.fullmatch(r"\s*(\d+)\s*@\s*(\d+)\s*", text)):
            raise UsageError(f"--kill {text}: write STAGE@STEP, for example 1@20")
        order = KillOrder(stage=int(match[1]), step=int(match[2]))
        if order.stage >= stages:
            raise UsageError(f"--kill {text}: there is no stage {order.stage}, stages are 0 to {stages - 1}")
        if order.step >= steps:
            raise UsageError(f"--kill {text}: there is no step {order.step}, steps are 0 to {steps - 1}")
        orders.append(order)
    return tuple(orders)
