"""`swarmnet status`: what the swarm says of itself."""

from __future__ import annotations

import click

from swarmnet.cli.settings import SETTINGS, with_bootstrap, with_json, with_log_level


@click.command("status", context_settings=SETTINGS)
@click.argument("run", metavar="LINK_OR_RUN_OR_MANIFEST")
@with_bootstrap
@with_json
@with_log_level
def command(run: str, bootstrap: tuple[str, ...], as_json: bool, log_level: str) -> int:
    """Ask the DHT how a run is doing, what is wrong with it and what to do.

    The run is named by the link that its peers print, by its manifest file, or by its id (64 hex digits, or the first
    12 or more). The exit code is 0 if somebody announces it, 1 if nobody does, 2 if nobody answers at the address.

    \b
    Examples:
      swarmnet status swarm:RUN_ID@/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
      swarmnet status run.toml --bootstrap /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
    """
    from swarmnet.net.swarm_link import find_run

    named, bootstrap = find_run(run, bootstrap)

    from swarmnet import telemetry
    from swarmnet.peer.status import run_status

    telemetry.setup(log_level)  # type: ignore[arg-type]  # click has checked the choice
    return run_status(named, bootstrap, as_json)
