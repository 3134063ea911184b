"""`swarmnet simulate`: a whole fleet on virtual time, and what it would reach."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarmnet.cli.settings import PREFIX, SETTINGS, TYPED, SchemaCommand, fields, given, origin_of
from swarmnet.errors import UsageError
from swarmnet.telemetry.text import counted

if TYPE_CHECKING:
    from swarmnet.config.check import SettingsLayer
    from swarmnet.simulate.fleet import Fleet
    from swarmnet.simulate.fleet_run import FleetProgress, FleetSimulation
    from swarmnet.telemetry.screen import Screen

TWINNED = 256
"""A fleet of so many peers is run without its faults, too, unless an option says otherwise."""

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("simulate", cls=SchemaCommand, context_settings=SETTINGS)
@click.argument("fleet", metavar="[FLEET.toml]", required=False)
@fields("fleet", "peers", "run", "regions", "churn")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    envvar=f"{PREFIX}_SET",
    help="Any other setting of a fleet, such as machine.speed=[0.2,4]; repeatable.",
)
@click.option(
    "--twin/--no-twin",
    default=None,
    help=f"Run it without its faults, too, and say the goodput.  [up to {TWINNED} peers]",
)
@click.option("--json", "json_file", metavar="FILE", type=_FILE, help="Write the report there, too.")
@click.option("--plot", "plot_file", metavar="FILE.png", type=_FILE, help="Draw it there.")
@click.pass_context
def simulate(
    ctx: click.Context,
    /,
    *,
    fleet: str | None,
    twin: bool | None,
    json_file: Path | None,
    plot_file: Path | None,
    **_: Any,
) -> int:
    """Run a fleet on virtual time: the product's own decisions, with emulated compute and lines.

    Says what it reaches of what its machines could, where a step's time goes, what faults cost and what control costs.
    Every sum is held against that of one process. docs/simulate.md says what is abstracted.

    \b
    Examples:
      swarmnet simulate
      swarmnet simulate --peers 64 --stages 8 --microbatches 128 --kill-every 15
      swarmnet simulate docs/fleet.toml --json run.json --plot run.png
      swarmnet simulate --peers 300 --stages 10 --regions 5 --life 600 --seconds 300
      swarmnet simulate --set machine.speed=[0.2,4] --set run.activation_bytes=8e6
      swarmnet simulate --peers 1000 --stages 10 --regions 10 --abstract on --seconds 60
    """
    if plot_file is not None:
        from swarmnet.config.check import check_installed
        from swarmnet.telemetry.plot import check_ending

        check_ending("--plot", plot_file)
        check_installed("--plot", "plot")
    for option, path in (("--json", json_file), ("--plot", plot_file)):
        # Not only after minutes of work.
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{option} {path}: there is no directory {path.absolute().parent}")

    from rich.console import Console

    from swarmnet.simulate.fleet import calm, read
    from swarmnet.telemetry.screen import Screen

    wanted = read(Path(fleet).expanduser() if fleet else None, _layers(ctx))
    with Screen(Console(stderr=True), transient=True) as screen:
        found, whole = _run(wanted, screen, "")
        faulty = bool(found["faults"])
        if whole and faulty and (twin if twin is not None else found["peers"] <= TWINNED):
            other, twin_whole = _run(calm(wanted), screen, "without faults: ")
            if twin_whole and other["throughput"]:
                found |= {"goodput": found["throughput"] / other["throughput"], "calm_throughput": other["throughput"]}
    found["interrupted"] = not whole
    click.echo(text_of(found))
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if plot_file is not None:
        plot(found, plot_file)
    return 0 if whole else 130


def _layers(ctx: click.Context) -> list[SettingsLayer]:
    """Weakest first, above the file: variables, `--set`, flags."""
    from swarmnet.config import toml
    from swarmnet.config.check import layer

    assignments = next(param for param in ctx.command.params if param.name == "assignments")
    layers = []
    for source in TYPED:
        if ctx.get_parameter_source("assignments") is source:
            name = origin_of(assignments, source)
            layers += [layer(name, *toml.assignment(text, where=name)) for text in ctx.params["assignments"]]
        layers += [
            layer(name, option.path, str(value) if isinstance(value, Path) else value)
            for option, name, value in given(ctx, source)
        ]
    return layers


def _run(fleet: Fleet, screen: Screen, prefix: str) -> tuple[dict[str, Any], bool]:
    """(its report, False if it was interrupted)."""
    from swarmnet.simulate.fleet_run import FleetSimulation
    from swarmnet.telemetry.screen import PLAIN_EVERY_S

    said_at = 0.0

    def show(progress: FleetProgress) -> None:
        nonlocal said_at
        if screen.redraws:
            screen.show(prefix + progress_line(progress, fleet.plan.steps))
        elif progress.wall_s - said_at >= PLAIN_EVERY_S:
            said_at = progress.wall_s
            screen.note(prefix + progress_line(progress, fleet.plan.steps))

    simulation = FleetSimulation(fleet, on_progress=show)
    interrupted = _until_interrupted(simulation)
    screen.clear()
    return simulation.report(), not interrupted


def _until_interrupted(simulation: FleetSimulation) -> bool:
    """Run it. True if Ctrl+C ended it; a second one ends the process as ever."""
    interrupted = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal interrupted
        interrupted = True
        simulation.stop()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        simulation.run()
    finally:
        signal.signal(signal.SIGINT, before)
    return interrupted


def progress_line(progress: FleetProgress, steps: int) -> str:
    """Where it is, and when it ends."""
    left = f", {progress.left_s:.0f} s left" if math.isfinite(progress.left_s) else ""
    return (
        f"{progress.virtual_s:.1f} virtual s after {progress.wall_s:.0f} s: step {progress.step} of {steps}, "
        f"{progress.alive} peers{left}"
    )


def text_of(found: Mapping[str, Any]) -> str:
    """A report for a person."""
    size = f"{counted(found['peers'], 'peer')} in {counted(found['stages'], 'stage')}"
    where = ", ".join(f"{count} in {name}" for name, count in found["regions"].items())
    lines = [
        f"{size} ({where}), speed {found['speed']:.1f} in all, "
        f"{found['slots'] or 'automatic'} slots, {found['microbatches']} microbatches a step, seed {found['seed']}",
        f"{found['steps_done']} of {found['steps']} steps in {found['virtual_s']:.1f} virtual seconds "
        f"({found['wall_s']:.1f} s here)" + (", interrupted" if found.get("interrupted") else ""),
    ]
    if found["abstract"]:
        lines.append("abstract     rounds meet without streams, records of the next stages only, no peer moves")
    if found["steps_done"]:
        parts = ", ".join(f"{name} {share:.0%}" for name, share in found["of_a_step"].items())
        lines += [
            f"a step       {found['step_s']:.2f} s: {parts}",
            f"throughput   {found['throughput']:.2f} microbatches/s, {found['of_optimal']:.0%} of what the devices "
            f"could do ({found['optimal']:.2f})",
            f"repairs      {found['repairs']} of {found['executed']} executions were done again",
        ]
    if found["faults"]:
        done = ", ".join(f"{count} {kind}" for kind, count in found["faults"].items())
        goodput = f"; goodput {found['goodput']:.0%} of the same fleet's without them" if "goodput" in found else ""
        lines.append(f"faults       {done}{goodput}")
    lines += [
        f"moves        {found['moves']} peers went to another stage",
        f"control      {found['control_bytes_per_peer_s'] / 1e3:.2f} kB/s a peer",
        "every sum and all weights were those of one process",
    ]
    return "\n".join(lines)


# ------------------------------------------------------------ the picture


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Steps, where their time goes, and what control is made of."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    steps, where, control = figure.subplots(1, 3)
    figure.suptitle(
        f"{counted(found['peers'], 'peer')}, {counted(found['stages'], 'stage')}: "
        f"{found['of_optimal']:.0%} of what the devices could do"
    )
    steps.bar(range(found["steps_done"]), found["steps_s"])
    steps.axhline(found["microbatches"] / found["optimal"], linestyle="--", color="gray", label="optimal")
    steps.set(xlabel="step", ylabel="virtual seconds")
    steps.legend()
    where.bar(list(found["of_a_step"]), [found["step_s"] * share for share in found["of_a_step"].values()])
    where.set(ylabel="seconds of a step")
    sizes = sorted(found["control_bytes"].items(), key=lambda item: item[1])[-6:]
    control.barh([kind for kind, _ in sizes], [size / found["peers"] / found["virtual_s"] for _, size in sizes])
    control.set(xlabel="control bytes per peer and second")
    figure.savefig(path, dpi=120)
