"""The pictures of the benchmark book."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

MET, MISSED = "#4878a8", "#d1615d"


class Drawn(Protocol):
    """A row of the book, as it is drawn."""

    @property
    def value(self) -> float | None: ...
    @property
    def target(self) -> Any: ...


def draw(rows: Sequence[Drawn], figures: Mapping[str, Any], folder: Path) -> None:
    """Each that has figures, in `folder`."""
    folder.mkdir(exist_ok=True)
    for name, make in PICTURES.items():
        if name in figures:
            figure = make(figures[name])
            figure.savefig(folder / f"{name}.png", dpi=100, metadata={"Software": None})
            pyplot.close(figure)
    figure = _targets(rows)
    figure.savefig(folder / "targets.png", dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def _targets(rows: Sequence[Drawn]) -> Any:
    """A dot for each measured target: how many times better than asked."""
    found = []
    for row in rows:
        target, value = row.target, row.value
        if value is None or value <= 0:
            continue
        if target.at_least:
            found.append((value / target.at_least, target))
        elif target.at_most:
            found.append((target.at_most / value, target))
    found.sort(key=lambda each: each[0])
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.22 * max(len(found), 1)), layout="constrained")
    for at, (ratio, _) in enumerate(found):
        axes.plot([1, ratio], [at, at], color=MET if ratio >= 1 else MISSED, linewidth=1)
        axes.plot([ratio], [at], "o" if ratio >= 1 else "X", color=MET if ratio >= 1 else MISSED)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.set_yticks(range(len(found)), [f"{target.part}: {target.what:.60}" for _, target in found], fontsize=7)
    axes.set_xlabel("times better than the target asks")
    return figure


def _latency(found: Any) -> Any:
    rows = [row for row in found["rows"] if row["layer"] == "Ours"]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for key, label, style in (
        ("utilisation", "ours", "o-"),
        ("reference", "relayed by the trainer, no overlap, same run", "s--"),
        ("published", "SWARM, published", "x:"),
    ):
        axes.plot([row["rtt_ms"] for row in rows], [100 * row[key] for row in rows], style, label=label)
    axes.set_ylim(0, 100)
    axes.set_xlabel("round trip, ms")
    axes.set_ylabel("devices busy, %")
    axes.legend()
    return figure


PICTURES = {"latency": _latency}
