"""`swarmnet owner`: `invite` lets peers take part in a run, `ban` shuts them out again, `extend` adds steps."""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmnet.cli.frame import Commands
from swarmnet.cli.settings import MULTIADDR, SETTINGS, CountRange
from swarmnet.clock import run_loop, wall_time
from swarmnet.errors import UsageError
from swarmnet.telemetry.text import typed

if TYPE_CHECKING:
    from swarmnet.directory import Role
    from swarmnet.ids import PeerId
    from swarmnet.manifest.schema import Manifest
    from swarmnet.net.dht_node import OwnersWord


_UNITS = {"m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}
_SPAN = re.compile(r"([1-9][0-9]{0,5})([mhdw])")
_MOST_S = 10 * 366 * 24 * 3600


@click.group(cls=Commands, no_args_is_help=False, context_settings=SETTINGS)
def owner() -> None:
    """What a run's owner signs: invitations, bans, and more steps. The owner's key is next to RUN.toml.

    \b
    Example:
      swarmnet owner invite run.toml 12D3KooW... --expires 30d
    """


@owner.command("invite", context_settings=SETTINGS)
@click.argument("named", nargs=-1, metavar="[RUN.toml] [PEER_ID]")
@click.option("--bearer", is_flag=True, allow_from_autoenv=False, help="Invite each peer that has what is printed.")
@click.option(
    "--uses",
    type=CountRange(1, 1 << 20),
    metavar="N",
    allow_from_autoenv=False,
    help="With --bearer: for so many peers at most, as each peer counts them [any number].",
)
@click.option(
    "--roles",
    default="stage,trainer",
    show_default=True,
    metavar="ROLE[,ROLE]",
    help="What the guest may be: stage, trainer, or both.",
)
@click.option(
    "--expires", default="7d", show_default=True, metavar="SPAN", help="How long it is good for: 90m, 12h, 7d, 4w."
)
@click.option(
    "--bootstrap",
    metavar=MULTIADDR,
    allow_from_autoenv=False,
    help="Print the whole command to join by, through this peer.",
)
def invite(
    named: tuple[str, ...], bearer: bool, uses: int | None, roles: str, expires: str, bootstrap: str | None
) -> int:
    """Print an invitation to a run by invitation; RUN.toml (run.toml) has its owner's key beside it.

    PEER_ID is what `swarmnet join` prints as the peer's identity: the invitation is good for that peer alone. With
    --bearer it is good for each peer that has it: pass it on as you would a password.

    \b
    Examples:
      swarmnet owner invite run.toml 12D3KooW... --expires 30d
      swarmnet owner invite run.toml --bearer --roles trainer > friends.invitation
    """
    from swarmnet.manifest.terms import RunTerms
    from swarmnet.net.admission import in_words
    from swarmnet.net.admission_files import Owner
    from swarmnet.net.swarm_link import SwarmLink

    path, manifest, peers = _run_and_peers(named)
    owner = Owner(path, RunTerms.of(manifest))
    # An invitation is for one peer or for whoever holds it: exactly one of them is said.
    if bool(peers) == bearer or len(peers) > 1:
        raise UsageError(
            "name the one peer to invite by its id (12D3KooW...), or say --bearer to invite each peer "
            "that has what is printed"
        )
    if uses and not bearer:
        raise UsageError("--uses says for how many peers a bearer's invitation is good: say --bearer, too")
    wanted, not_after = _roles(roles), int(wall_time()) + _seconds(expires)
    token = owner.invite(peers[0] if peers else None, wanted, not_after, uses=uses or 0)
    if bootstrap is None:
        click.echo(token.text)
    else:
        # Parsed again: a link that no guest could paste is refused here.
        link = SwarmLink.parse(str(SwarmLink(owner.run, bootstrap, token.text)))
        click.echo(f"swarmnet join {link}")
    guest, roles = token.invitation.value.guest, " and ".join(wanted)
    most = f", {uses} peer{'s' * (uses > 1)} at most" if uses else ""
    whom = f"peer {guest}" if peers else f"each peer that has it (it is a secret){most}"
    click.echo(f"good for {whom}, as {roles}, until {in_words(not_after)}", err=True)
    if bearer:
        click.echo(f"to withdraw it, with all that it has let in: swarmnet owner ban {typed(path)} {guest}", err=True)
    return 0


def _run_and_peers(named: tuple[str, ...]) -> tuple[Path, Manifest, list[PeerId]]:
    """The manifest's path (run.toml unless one is named), the manifest, and the peers. Raises UsageError."""
    from swarmnet.ids import PeerId
    from swarmnet.manifest.file import load
    from swarmnet.wire.peer_ids import is_peer_id

    # A manifest's path and a peer's id cannot be mistaken for each other.
    peers = [PeerId(text) for text in named if is_peer_id(text)]
    others = [text for text in named if not is_peer_id(text)]
    # A peer id that was cut while it was copied.
    if len(others) > 1 or (others and others[0].startswith("12D3")):
        raise UsageError(
            f"{others[-1]}: is no peer id, which has 52 characters and begins with 12D3Koo: "
            "`swarmnet status --json` has whole ids"
        )
    path = Path(others[0] if others else "run.toml").expanduser()
    return path, load(path), peers


def _roles(text: str) -> list[Role]:
    from swarmnet.net.admission import ROLES

    named = [part.strip() for part in text.split(",")]
    if unknown := [name for name in named if name not in ROLES]:
        raise UsageError(f"--roles {text}: {unknown[0]!r} is no role: roles are {', '.join(ROLES)}")
    # In our order, each once: equal invitations are equal bytes.
    return [role for role in ROLES if role in named]


def _seconds(text: str) -> int:
    span = _SPAN.fullmatch(text.strip())
    seconds = int(span[1]) * _UNITS[span[2]] if span else 0
    if not 0 < seconds <= _MOST_S:
        raise UsageError(
            f"--expires {text}: write minutes, hours, days or weeks, such as 90m, 12h, 7d or 4w, ten years at the most"
        )
    return seconds


@owner.command("ban", context_settings=SETTINGS)
@click.argument("named", nargs=-1, required=True, metavar="[RUN.toml] PEER_ID...")
@click.option("--lift", is_flag=True, allow_from_autoenv=False, help="Take these peers off the list again.")
@click.option(
    "--bootstrap", multiple=True, metavar=MULTIADDR, help="Tell the swarm now, through this peer; repeatable."
)
def ban(named: tuple[str, ...], lift: bool, bootstrap: tuple[str, ...]) -> int:
    """Ban peers from a run by invitation; RUN.toml (run.toml) has its owner's key beside it.

    PEER_ID is a peer's, or the id that `swarmnet owner invite --bearer` printed, for all peers that it let in. The
    signed list is written next to the manifest (run.bans); peers pass it on to each other within some seconds.

    \b
    Example:
      swarmnet owner ban run.toml 12D3KooW... --bootstrap /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
    """
    from swarmnet.manifest.terms import RunTerms
    from swarmnet.net.address import check_addresses
    from swarmnet.net.admission_files import Owner, bans_file

    path, manifest, peers = _run_and_peers(named)
    if not peers:
        raise UsageError("name the peers to ban by whole ids (12D3KooW...); `swarmnet status --json` has them")
    check_addresses(bootstrap)
    bans = Owner(path, RunTerms.of(manifest)).ban(peers, lift=lift, now=wall_time())
    click.echo(f"wrote {bans_file(path)}: list {bans.value.number}, {len(bans.value.peers)} banned")
    # The list is signed: whoever runs beside this file may spread it.
    if not bootstrap:
        _not_told(path)
        return 0
    _tell(bans, bootstrap, path)
    return 0


def _not_told(path: Path) -> None:
    click.echo(
        f"no peer has it yet: a peer or trainer that runs with --manifest {typed(path)} on this machine tells "
        "the others within some seconds, or say --bootstrap ADDRESS"
    )


def _tell(word: OwnersWord, bootstrap: tuple[str, ...], path: Path) -> None:
    """Raises UsageError if no peer takes it."""

    from swarmnet.net.dht_node import NoPeerAnswered

    told = False
    with contextlib.suppress(NoPeerAnswered):
        told = run_loop(_spread(word, bootstrap))
    if not told:
        raise UsageError(
            f"it is written, and no peer took it at {', '.join(bootstrap)}: say it again with the address "
            f"of a peer that is up, or run a peer or trainer with --manifest {typed(path)} here: it tells the others"
        )
    click.echo("told the swarm: every peer has it within some seconds")


async def _spread(word: OwnersWord, bootstrap: tuple[str, ...]) -> bool:
    from swarmnet.net.dht import DhtDirectory
    from swarmnet.net.dht_daemon import Listen
    from swarmnet.net.identity import Identity

    # A client of the DHT with a key of its own: who speaks does not count, the owner's signature does.
    client = Listen(client=True)
    async with DhtDirectory(Identity.generate(), word.value.run, bootstrap=bootstrap, listen=client) as directory:
        return await directory.publish_word(word)


_LEAD, _LEAD_S = 20, 30.0
"""Steps ahead of where the run is, and seconds at least: by then every leader has a new notice."""


@owner.command("extend", context_settings=SETTINGS)
@click.argument("path", metavar="[RUN.toml]", default="run.toml", type=click.Path(path_type=Path))
@click.option("--steps", type=CountRange(1), required=True, metavar="N", help="Steps that the run has from then on.")
@click.option(
    "--from",
    "since",
    type=CountRange(1),
    metavar="STEP",
    help=f"The first step to which that applies [the run's end; with --bootstrap {_LEAD} steps from now, "
    f"and {_LEAD_S:.0f} s at least].",
)
@click.option(
    "--bootstrap", multiple=True, metavar=MULTIADDR, help="Tell the swarm now, through this peer; repeatable."
)
def extend(path: Path, steps: int, since: int | None, bootstrap: tuple[str, ...]) -> int:
    """Give a run more steps while it goes on, or after its end; RUN.toml (run.toml) has its owner's key beside it.

    The run id stays the same. The signed notice is written next to the manifest (run.notices); every peer applies it
    from the same step on, and the learning rate follows the schedule of the longer run.

    \b
    Example:
      swarmnet owner extend run.toml --steps 20000
      swarmnet owner extend run.toml --steps 20000 --bootstrap /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
    """
    from swarmnet.manifest.file import load
    from swarmnet.manifest.terms import RunTerms
    from swarmnet.net.address import check_addresses
    from swarmnet.net.admission_files import Owner, notices_file

    check_addresses(bootstrap)
    terms = RunTerms.of(load(path.expanduser()))
    owner = Owner(path, terms, admits=False)
    known = owner.notices()
    end = known.end
    version, steps_per_s = _stands(path, bootstrap) if bootstrap else (None, 0.0)
    if since is None:
        since = end if version is None else min(version + max(_LEAD, math.ceil(_LEAD_S * steps_per_s)), end)
    if version is not None and since <= version < end:
        raise UsageError(f"--from {since}: the run is at step {version} already: say a later step, or leave it out")
    # Whoever has signed too much says it again from the same step on.
    corrects = [each for each in known.known if each.value.since == since]
    if since > end:
        raise UsageError(f"--from {since}: the run ends at step {end}: say {end} or less")
    if steps <= (terms.total_steps if corrects else end) or steps <= since:
        raise UsageError(f"--steps {steps}: the run has {end} already: say more")
    notice = owner.extend(steps, since)
    click.echo(f"wrote {notices_file(path)}: notice {notice.value.number}, {steps} steps from step {since} on")
    if corrects:
        click.echo(f"it replaces notice {corrects[-1].value.number}, unless step {since} is over by then")
    if bootstrap:
        _tell(notice, bootstrap, path)
        return 0
    _not_told(path)
    return 0


def _stands(path: Path, bootstrap: tuple[str, ...]) -> tuple[int, float]:
    """Where the run is, and steps per second, 0 if no peer has measured them.

    Raises UsageError if no peer says it, or a peer would not understand a notice.
    """
    from swarmnet.manifest.file import load
    from swarmnet.peer.status import read_status

    found, training = read_status(path, bootstrap), load(path.expanduser()).training
    if found.version is None:
        words = found.problems[0].text if found.problems else "no stage says where it is"
        raise UsageError(f"no peer says where the run is ({words}): say --from STEP, and leave --bootstrap out")
    old = [replica.peer for line in found.stages for replica in line.replicas if not replica.software]
    if old:
        raise UsageError(f"{', '.join(old)}: runs a version that knows no notices: update it first (docs/upgrading.md)")
    num_tokens = training.microbatches * training.microbatch_size * training.sequence_length
    return found.version, found.tokens_per_second / num_tokens
