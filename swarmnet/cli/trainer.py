"""`swarmnet trainer`: feed the swarm with microbatches."""

from __future__ import annotations

from typing import Any

import click

from swarmnet.cli.settings import LOGS, NETWORK, SETTINGS, SchemaCommand, peer_options, read_config, read_manifest


@click.command("trainer", cls=SchemaCommand, context_settings=SETTINGS)
@peer_options("manifest", "dir", "data", "host", "port", *NETWORK, "invitation", *LOGS)
@click.pass_context
def command(ctx: click.Context, /, **_: Any) -> int:
    """Feed microbatches into stage 0; holds no weights.

    \b
    Example:
      swarmnet trainer --manifest run.toml \\
          --bootstrap /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
    """
    config = read_config(ctx, "trainer")
    manifest = read_manifest(config, "trainer")

    from swarmnet.trainer import run_trainer

    return run_trainer(config, manifest)
