"""`swarmnet ban`: shut a peer, or everybody that a bearer invitation let in, out of a run by invitation."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from swarmnet.cli.invite import run_and_peers
from swarmnet.cli.settings import MULTIADDR, SETTINGS
from swarmnet.errors import UsageError

if TYPE_CHECKING:
    from swarmnet.net.admission import Bans


@click.command("ban", context_settings=SETTINGS)
@click.argument("named", nargs=-1, required=True, metavar="[RUN.toml] PEER_ID...")
@click.option("--lift", is_flag=True, allow_from_autoenv=False, help="Take these peers off the list again.")
@click.option(
    "--bootstrap", multiple=True, metavar=MULTIADDR, help="Tell the swarm now, through this peer; repeatable."
)
def command(named: tuple[str, ...], lift: bool, bootstrap: tuple[str, ...]) -> int:
    """Ban peers from a run by invitation; RUN.toml (run.toml) has its owner's key beside it.

    PEER_ID is a peer's, or the id that `swarmnet invite --bearer` printed: then everybody whom that let in is banned.
    The signed list is kept beside the manifest (run.bans); peers hear of it from each other within some seconds.

    \b
    Example:
      swarmnet ban run.toml 12D3KooW... --bootstrap /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
    """
    import asyncio

    from swarmnet.manifest.terms import RunTerms
    from swarmnet.net.admission_files import Owner, bans_beside

    path, manifest, peers = run_and_peers(named)
    if not peers:
        raise UsageError("name the peers to ban by whole ids (12D3KooW...); `swarmnet status --json` has them")
    bans = Owner(path, RunTerms.of(manifest)).ban(peers, lift=lift, now=time.time())
    click.echo(f"wrote {bans_beside(path)}: list {bans.number}, {len(bans.peers)} banned")
    if not bootstrap:
        click.echo(
            f"nobody has been told: a peer or trainer that runs with --manifest {path} on this machine tells "
            "the others within some seconds, or say --bootstrap ADDRESS"
        )
        return 0
    if not asyncio.run(_spread(bans, bootstrap)):
        raise UsageError(f"nobody keeps the list at {', '.join(bootstrap)}: try another peer's address")
    click.echo("told the swarm: every peer hears of it within some seconds")
    return 0


async def _spread(bans: Bans, bootstrap: tuple[str, ...]) -> bool:
    from swarmnet.net.dht import DhtDirectory
    from swarmnet.net.identity import Identity

    directory = await DhtDirectory.start(Identity.generate(), bans.run, num_stages=0, bootstrap=bootstrap, client=True)
    try:
        return await directory.publish_bans(bans)
    finally:
        await directory.close()
