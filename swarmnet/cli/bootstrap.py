"""`swarmnet bootstrap`: a DHT node without a stage."""

from __future__ import annotations

from typing import Any

import click

from swarmnet.cli.settings import LOGS, NETWORK, SETTINGS, SchemaCommand, peer_options, read_config


@click.command("bootstrap", cls=SchemaCommand, context_settings=SETTINGS)
@peer_options("dir", "host", *NETWORK, *LOGS)
@click.pass_context
def command(ctx: click.Context, /, **_: Any) -> int:
    """Run a DHT node that others can join by; serves no stage.

    \b
    Example:
      swarmnet bootstrap --dht-port 31337

    Any peer that is up can do this too; a node of its own merely keeps one address alive.
    """
    config = read_config(ctx, "bootstrap")

    from swarmnet.peer.bootstrap import run_bootstrap

    return run_bootstrap(config)
