"""The one picture of a run's curve: losses, held-out losses, and when a peer came, went or was killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmnet.errors import UsageError


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a step. kind: what, in the legend."""

    step: float
    kind: str
    text: str
    color: str


PICTURES = ("png", "svg", "pdf", "jpg", "jpeg", "webp", "eps", "ps", "tif", "tiff")
"""How the name of a picture may end. matplotlib has some more, which few can open."""


def check_ending(flag: str, path: Path) -> None:
    """Raises UsageError if no picture is named so; matplotlib says it only after the work."""
    if path.suffix[1:].lower() not in PICTURES:
        raise UsageError(f"{flag} {path}: no picture ends so: write one of .{', .'.join(PICTURES)}")


def draw_curve(
    path: Path,
    losses: Sequence[tuple[int, float]],
    *,
    title: str,
    held_out: Mapping[int, float],
    marks: Sequence[Mark] = (),
    reference: Sequence[float] = (),
    reference_is: str = "one process",
) -> str:
    """A PNG of (step, loss) pairs, held-out losses by version, and the losses of `reference`.

    Returns a note instead if matplotlib is missing, or there is no step.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return f"no {path.name}: matplotlib is not installed (pip install 'swarmnet-train[plot]')"
    if not losses:
        return f"no {path.name}: no step was finished"
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    axes.plot(*zip(*losses, strict=True), label="swarm", linewidth=2.5 if reference else 1.5)
    if reference:
        axes.plot(reference, label=reference_is, linestyle="--", linewidth=1.2)
    if held_out:
        axes.plot(*zip(*sorted(held_out.items()), strict=True), "o", label="held out", markersize=5)
    known: set[str] = set()
    for mark in marks:
        label = None if mark.kind in known else mark.kind
        known.add(mark.kind)
        axes.axvline(mark.step, color=mark.color, linewidth=0.8, alpha=0.6, label=label)
        place: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "rotation": 90, "va": "top", "ha": "right"}
        axes.text(mark.step, 1, mark.text.replace("$", r"\$"), fontsize=7, color=mark.color, **place)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return ""
