"""Loss curves side by side, for the benchmarks that train: what the eye sees of them, and below it what it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SMOOTH = 20
"""Steps a curve is averaged over."""


@dataclass(frozen=True, slots=True)
class Curve:
    """losses: of every step; base: those of what it is compared with. color: equal numbers, equal colours.
    label: None leaves it out of the upper panel."""

    losses: Sequence[float]
    base: Sequence[float]
    color: int
    label: str | None
    alpha: float = 1.0


def smooth(losses: Sequence[float]) -> list[float]:
    """The mean of the last SMOOTH steps, at every step that has as many before it."""
    return [sum(losses[at - SMOOTH : at]) / SMOOTH for at in range(SMOOTH, len(losses) + 1)]


def draw(
    curves: Sequence[Curve], path: Path, *, over: str, goal: tuple[float, float], limits: tuple[float, float] | None
) -> None:
    """The curves, and their ratios to `over` with the band of the goal; limits: of the lower panel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = pyplot.colormaps["tab20"].colors
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7), height_ratios=(2, 1))
    for curve in curves:
        smoothed, base = smooth(curve.losses), smooth(curve.base)
        at, color = range(SMOOTH, SMOOTH + len(smoothed)), colors[curve.color % len(colors)]
        if curve.label is not None:
            above.plot(at, smoothed, color=color, linewidth=1, label=curve.label)
        below.plot(
            at,
            [one / other for one, other in zip(smoothed, base, strict=True)],
            color=color,
            linewidth=0.8,
            alpha=curve.alpha,
        )
    below.axhspan(*goal, alpha=0.15)
    if limits is not None:
        below.set_ylim(*limits)
    above.set_ylabel(f"training loss, mean of {SMOOTH} steps")
    below.set_ylabel(f"over {over}")
    below.set_xlabel("step")
    above.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
