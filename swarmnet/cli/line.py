"""`swarmnet init --mbit`: what fits a line, and what else it was compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from swarmnet.errors import UsageError

if TYPE_CHECKING:
    from swarmnet.manifest.schema import StageSpec
    from swarmnet.plan.choice import Priced
    from swarmnet.plan.cost import Site

F = TypeVar("F", bound=Callable[..., Any])

TFLOPS = {"cuda": 30.0, "cpu": 0.08}
"""What a member reaches: two fifths of a 24 GB card's bf16, one core (docs/performance.md)."""

ROUND_TRIP_MS, MOST_MBIT, MOST_REPLICAS = 50.0, 1e6, 10_000


def above_0(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """A number above 0. Raises UsageError."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # A number that is none is in no range.
    if not 0.0 < value <= MOST_MBIT:
        raise UsageError(f"{param.opts[0]} {text}: must be a number above 0 and at most {MOST_MBIT:,.0f}")
    return value


MEMBER = {
    "tflops": ("N", "TFLOP/s that a member reaches in training.  [30 on cuda, 0.08 on a CPU's core]"),
    "rtt": ("MS", "Milliseconds of a round trip between members.  [50]"),
}
"""What else is said of a member, with `--mbit`: flag -> (metavar, help)."""


def with_line(mbit_help: str, *, device: bool = True) -> Callable[[F], F]:
    """`--mbit`, and what it is said with. device: `--device`, too."""

    def options(command: F) -> F:
        for name, (metavar, words) in MEMBER.items():
            command = click.option(
                f"--{name}", callback=above_0, metavar=metavar, allow_from_autoenv=False, help=words
            )(command)
        command = click.option(
            "--replicas",
            type=click.IntRange(1, MOST_REPLICAS),
            metavar="N",
            allow_from_autoenv=False,
            help="Replicas of each stage that are expected.  [4]",
        )(command)
        if device:
            command = click.option(
                "--device",
                type=click.Choice(["cuda", "cpu"]),
                allow_from_autoenv=False,  # of a peer it says something else
                help="What members compute on.  [cuda if it is here]",
            )(command)
        return click.option("--mbit", callback=above_0, metavar="N", allow_from_autoenv=False, help=mbit_help)(command)

    return options


@dataclass(frozen=True, slots=True)
class MemberLine:
    """What members are taken to have."""

    mbit: float
    device: str
    replicas: int
    tflops: float
    round_trip_s: float

    @classmethod
    def typed(
        cls,
        mbit: float | None,
        device: str | None,
        replicas: int | None,
        tflops: float | None,
        rtt: float | None,
        *,
        ranks: int = 1,
    ) -> MemberLine | None:
        """None without `--mbit`. Raises UsageError for another option that would then do nothing."""
        if mbit is None:
            others = {"--device": device, "--replicas": replicas, "--tflops": tflops, "--rtt": rtt}
            if said := [flag for flag, value in others.items() if value is not None]:
                raise UsageError(f"{said[0]} describes members: add --mbit, such as --mbit 200")
            return None
        kind = device or _device_here()
        return cls(mbit, kind, replicas or 4, tflops or ranks * TFLOPS[kind], (rtt or ROUND_TRIP_MS) / 1000)

    @property
    def site(self) -> Site:
        """As formulas take it."""
        from swarmnet.plan.cost import Site

        return Site(self.mbit * 1e6 / 8, self.tflops * 1e12, self.round_trip_s)

    def __str__(self) -> str:
        return (
            f"{self.mbit:g} Mbit/s each way, {self.round_trip_s * 1000:g} ms, {self.tflops:g} TFLOP/s "
            f"({self.device}), {self.replicas} replicas"
        )


def _device_here() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True)
class Fit:
    """What was chosen for a line, and what it was compared with."""

    line: MemberLine
    parameters: int
    """Of the largest stage."""
    best: Priced
    compared: tuple[Priced, ...]

    @classmethod
    def of(cls, spec: StageSpec, said: Mapping[str, object], line: MemberLine) -> Fit:
        """Raises UsageError for a field that was said and has no price."""
        from swarmnet.plan.choice import choose
        from swarmnet.plan.cost import load_of

        best, compared = choose(spec, said, line.site, replicas=line.replicas)
        return cls(line, load_of(spec, line.site, replicas=line.replicas).parameters, best, compared)

    @property
    def fields(self) -> dict[str, object]:
        """Of the manifest."""
        return self.best.fields | ({"numerics.compute": "bf16"} if self.line.device == "cuda" else {})

    def lines(self) -> list[str]:
        """A table, the chosen row with a star."""
        rows = [("", "sync", "sums", "boundary", "microbatch", "slots", "s/step", "busy", "steps")]
        for each in self.compared:
            way = each.way
            rows.append(
                (
                    "*" if each is self.best else "",
                    way.sync,
                    way.codec,
                    way.activations if way.activations == way.gradients else f"{way.activations}/{way.gradients}",
                    f"{each.microbatches} x {each.microbatch_size}",
                    str(way.slots),
                    f"{each.cost.step_s:.3g}" if each.cost.step_s < 100 else f"{each.cost.step_s:.0f}",
                    f"{each.cost.utilisation:.0%}",
                    f"x {each.more_steps:.2f}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [
            f"for {self.line} of {self.parameters:,} parameters (*: chosen):",
            *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
        ]

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "line": asdict(self.line),
            "stage_parameters": self.parameters,
            "chosen": self.fields | {"slots": self.best.way.slots},
            "compared": [
                asdict(each) | {"utilisation": each.cost.utilisation, "chosen": each is self.best}
                for each in self.compared
            ],
        }

    def peer_config(self, manifest: Path) -> str:
        """The file that members start with."""
        return (
            f"# For {self.line.mbit:g} Mbit/s, as `swarmnet init` found; docs/plan.md has the formulas.\n#\n"
            f"#   swarmnet peer --manifest {manifest.name} --config {peer_file(manifest).name} --stage 0\n\n"
            f'slots = {self.best.way.slots}\ndevice = "{self.line.device}"\n'
        )


def peer_file(manifest: Path) -> Path:
    """Where the peer config beside a manifest is: run.peer.toml beside run.toml."""
    return manifest.with_suffix(".peer.toml")
