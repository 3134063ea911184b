"""`swarmnet status`: what the swarm says of itself."""

from __future__ import annotations

from pathlib import Path
from string import hexdigits

import click

from swarmnet.cli.settings import LEVELS, MULTIADDR, SETTINGS
from swarmnet.errors import UsageError


@click.command("status", context_settings=SETTINGS)
@click.argument("run", metavar="LINK_OR_RUN_OR_MANIFEST")
@click.option("--bootstrap", multiple=True, metavar=MULTIADDR,
              help="Multiaddr of a peer that is up; repeatable. A link brings its own.")
@click.option("--output", type=click.Choice(["table", "json"]), default="table", show_default=True,
              help="How to print.")
@click.option("--log-level", type=LEVELS, default="warning", show_default=True, help="The least to log.")
def command(run: str, bootstrap: tuple[str, ...], output: str, log_level: str) -> int:
    """Ask the DHT how a run is doing, what is wrong with it and what to do.

    The run is named by the link that its peers print, by its manifest file, or by its id (64 hex digits). The exit code
    is 0 if somebody announces it, 1 if nobody does, 2 if nobody answers at the address.

    \b
    Examples:
      swarmnet status swarm:RUN_ID@/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
      swarmnet status run.toml --bootstrap /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
    """
    if run.strip().startswith("swarm:"):
        from swarmnet.net.swarm_link import SwarmLink

        link = SwarmLink.parse(run)
        if link.whole_run is None:
            raise UsageError(f"status needs the whole run id, 64 hex digits; the link has {len(link.run)} of them")
        run, bootstrap = link.whole_run, (link.address, *bootstrap)
    elif not _is_run_id(run) and not Path(run).expanduser().is_file():
        raise UsageError(f"{run}: no such file, and neither a link (swarm:RUN_ID@ADDRESS) nor a run id (64 hex digits)")
    if not bootstrap:
        raise UsageError("status needs to know a peer: give its link, or --bootstrap with the address it printed")
    run = run.lower() if _is_run_id(run) else str(Path(run).expanduser())

    from swarmnet import telemetry
    from swarmnet.peer.status import run_status

    telemetry.setup(log_level)  # type: ignore[arg-type]  # click has checked the choice
    return run_status(run, bootstrap, output)


def _is_run_id(text: str) -> bool:
    return len(text) == 64 and set(text) <= set(hexdigits)
