"""`swarmnet watch` and `swarmnet dashboard`: follow a run from anywhere, and keep its curve; or see it in a browser."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnet.cli.control import with_dir
from swarmnet.cli.settings import SETTINGS, CountRange, NumberRange, check_writable, with_bootstrap, with_log_level


@click.command("watch", context_settings=SETTINGS)
@click.argument("run", metavar="LINK_OR_RUN_OR_MANIFEST")
@with_bootstrap
@click.option("--csv", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="A line for each step.")
@click.option(
    "--png",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="A picture of the curve (pip install 'swarmnet-train[plot]').",
)
@click.option(
    "--tensorboard",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Event files for TensorBoard (pip install 'swarmnet-train[tensorboard]').",
)
@click.option(
    "--wandb",
    metavar="PROJECT",
    default="",
    help="A run at Weights & Biases, or with WANDB_MODE=offline on this disk (pip install 'swarmnet-train[wandb]').",
)
@click.option(
    "--every",
    type=NumberRange(0.1, 3600),
    metavar="SECONDS",
    default=2.0,
    show_default=True,
    help="From one look to the next.",
)
@click.option("--once", is_flag=True, help="Look once, write what members remember, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each step and each change.")
@with_log_level
def watch(
    run: str,
    bootstrap: tuple[str, ...],
    csv: Path | None,
    png: Path | None,
    tensorboard: Path | None,
    wandb: str,
    every: float,
    once: bool,
    as_json: bool,
    log_level: str,
) -> int:
    """Follow a run from any machine: losses, pace, how long it will take, who joins and leaves.

    It is no member and needs no invitation: it asks members for the figures of their last steps, and takes what most of
    them say. Files that an earlier watch wrote are gone on with. It ends with the run, or with Ctrl+C.

    The run is named as for `swarmnet status`. The exit code is 0; 1 if no peer announces the run, 2 if none answers,
    130 if it is interrupted before the run was found.

    \b
    Examples:
      swarmnet watch swarm:RUN_ID@/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
      swarmnet watch LINK --csv run.csv --png run.png
    """
    from swarmnet.net.swarm_link import find_run

    # What is typed is checked before hivemind is imported, which takes a second.
    named, bootstrap = find_run(run, bootstrap, "watch")
    for flag, file in (("--csv", csv), ("--png", png), ("--tensorboard", tensorboard and tensorboard / "events")):
        if file is not None and not file.exists():
            check_writable(file.parent, flag)

    from swarmnet import telemetry
    from swarmnet.monitor.run import WatchOptions, run_watch

    telemetry.setup(log_level)  # type: ignore[arg-type]  # click has checked the choice
    return run_watch(named, bootstrap, WatchOptions(csv, png, tensorboard, wandb, once, as_json, every))


@click.command("dashboard", context_settings=SETTINGS)
@click.argument("run", metavar="[LINK_OR_RUN_OR_MANIFEST]", required=False)
@with_bootstrap
@with_dir
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDR",
    allow_from_autoenv=False,
    help="Where to listen; another one than this machine's own shows the page to all who reach it.",
)
@click.option(
    "--port",
    type=CountRange(0, 65535),
    default=0,
    metavar="N",
    allow_from_autoenv=False,
    help="Port of the page; 0: any free one, which is printed.  [0]",
)
@click.option("--json", "as_json", is_flag=True, help="Serve nothing: print what the page shows, a line for each look.")
@with_log_level
def dashboard(
    run: str | None, bootstrap: tuple[str, ...], directory: Path, host: str, port: int, as_json: bool, log_level: str
) -> int:
    """Serve a page about a run to this machine's browser: curve, stages and replicas, who came and went, each peer.

    It looks on as `swarmnet watch` does, is no member, and changes nothing. Without a link it shows the run of the peer
    that runs on this machine with --dir. It goes on until Ctrl+C. The exit code is that of `swarmnet watch`.

    \b
    Examples:
      swarmnet dashboard swarm:RUN_ID@/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
      swarmnet dashboard --port 8080
    """
    from swarmnet.net.swarm_link import find_run

    if run is None:
        run, more = _own_run(directory.expanduser())
        bootstrap = (*bootstrap, *more)
    named, bootstrap = find_run(run, bootstrap, "dashboard")

    from swarmnet import telemetry
    from swarmnet.monitor.dashboard import run_dashboard

    telemetry.setup(log_level)  # type: ignore[arg-type]  # click has checked the choice
    return run_dashboard(named, bootstrap, host, port, as_json)


def _own_run(directory: Path) -> tuple[str, tuple[str, ...]]:
    """A link to the run of the peer of that directory, and its other addresses. Raises UsageError."""
    from swarmnet.errors import UsageError
    from swarmnet.net.swarm_link import SwarmLink
    from swarmnet.peer.control_socket import PeerNotRunning, ask_peer

    not_running = f"no peer runs with --dir {directory}: name a run by its link, or a running peer by its --dir"
    if not directory.is_dir():
        raise UsageError(not_running)
    try:
        links = ask_peer(directory, "links")["facts"]["links"]
    except PeerNotRunning as error:
        raise UsageError(not_running) from error
    # This machine's own address comes last.
    return links[-1], tuple(SwarmLink.parse(each).address for each in links[:-1])
