"""The pictures of the benchmark book."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

from swarmnet.audit.draw import chance_named

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


def _time_to_loss(found: Any) -> Any:
    """Curves on the left; on the right times sooner than SWARM-like, bars to the higher loss and dots to the lower."""
    modes = list(found["curves"])
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for place, mode in enumerate(modes):
        steps, losses = zip(*found["curves"][mode], strict=True)
        left.plot(steps, losses, color=f"C{place}", label=mode, linestyle="--" if mode in ("1F1B", "DiLoCo") else "-")
    for loss in found["losses"].values():
        left.axhline(loss, color="black", linewidth=0.8, linestyle=":")
    left.set_xlabel("step")
    left.set_ylabel("held-out loss")
    left.legend(fontsize=8)
    lines = list(dict.fromkeys((row["mbit"], row["rtt_ms"]) for row in found["rows"]))
    for place, mode in enumerate(modes):
        rows = [row for row in found["rows"] if row["mode"] == mode]
        at = [number + (place - len(modes) / 2) / (len(modes) + 1) for number in range(len(lines))]
        right.bar(at, [row["all_times"] for row in rows], width=1 / (len(modes) + 1), color=f"C{place}")
        right.plot(at, [row["low_times"] for row in rows], ".", color="black")
    right.axhline(1.0, color="black", linewidth=0.8)
    right.set_xticks(range(len(lines)), [f"{mbit}\n{rtt_ms}" for mbit, rtt_ms in lines])
    right.set_xlabel("Mbit/s, and round trip in ms")
    right.set_ylabel("times sooner than SWARM-like (dots: at the lower loss)")
    return figure


def _scaling(found: Any) -> Any:
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for kind, style in (("strong", "o-"), ("weak", "s-")):
        rows = [row for row in found["rows"] if row["kind"] == kind]
        axes.plot([row["replicas"] for row in rows], [row["speedup"] for row in rows], style, label=kind)
    most = max(row["replicas"] for row in found["rows"])
    axes.plot([1, most], [1, most], ":", color="black", label="as many times as replicas")
    axes.set_xlabel("replicas of a stage")
    axes.set_ylabel("microbatches a second, of one replica's")
    axes.legend()
    return figure


def _audit(found: Any) -> Any:
    """The formula of docs/trust.md as lines; dots: liars of whom every microbatch is false, by when each was named."""
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    own = [10 ** (place / 25) for place in range(101)]
    usual = {"false": 1.0, "per_step": 20, "microbatches": 0.01, "contributions": 0.005, "members": 5, "liars": 1}
    weights = {"microbatches": 0.0, "contributions": 0.01}
    lines: list[tuple[str, Any, dict[str, float]]] = [
        ("every microbatch false", "-", {}),
        ("so do two of five, for each other", "--", {"liars": 2}),
        ("one in ten false", "-.", {"false": 0.1}),
        ("weight gradients alone, one microbatch a step", ":", {**weights, "per_step": 1}),
        ("the same, twenty a step", (0, (1, 4)), weights),
    ]
    for label, style, lie in lines:
        axes.plot(own, [100 * chance_named(each, **usual | lie) for each in own], linestyle=style, label=label)
    rows = [row for row in found["rows"] if row["liars"] == 1 and row["found_by"] == "microbatch" and row["f"] == 1.0]
    named = sorted(row["microbatches_until"] for row in rows if row["microbatches_until"] is not None)
    shares = [100 * (place + 0.5) / len(rows) for place in range(len(named))]
    axes.plot(named, shares, "o", color="C0", label=f"{len(rows)} such liars, measured")
    axes.axvline(found["rows"][0]["bound"], color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("microbatches of its own")
    axes.set_ylabel("named, %")
    axes.legend(fontsize=7)
    return figure


PICTURES = {"audit": _audit, "latency": _latency, "time_to_loss": _time_to_loss, "scaling": _scaling}
