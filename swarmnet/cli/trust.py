"""The commands that check proofs offline: `verify` who did wrong, `receipts` who counted what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmnet.cli.settings import SETTINGS, TypedPath, with_json
from swarmnet.errors import UsageError
from swarmnet.telemetry.text import counted

if TYPE_CHECKING:
    from swarmnet.audit.evidence import Evidence
    from swarmnet.audit.histories import Account, StageHistory, Stretch
    from swarmnet.audit.receipts import Receipt


@click.command("verify", context_settings=SETTINGS)
@click.argument("files", nargs=-1, required=True, type=TypedPath(path_type=Path, dir_okay=False), metavar="EVIDENCE...")
def verify(files: tuple[Path, ...]) -> int:
    """Check evidence that a peer did wrong: who, in what, and what proves it. Needs no run and no network.

    EVIDENCE is a file that a replica wrote when it convicted somebody. Exit code: 0 if each file proves what it says, 1
    if one does not.

    \b
    Example:
      swarmnet verify ~/.swarmnet/peer/evidence/*.json
    """
    from swarmnet.audit.evidence import Evidence
    from swarmnet.net.identity import verify as signed

    refused = False
    for path in files:
        try:
            evidence = Evidence.from_json(path.read_text(encoding="utf-8"))
            why = evidence.refusal(signed)
        except ValueError as error:
            why = str(error)
        except OSError as error:
            raise UsageError(f"cannot read {path} ({error.strerror or error})") from error
        refused |= bool(why)
        click.echo(f"{path}: proves nothing: {why}" if why else f"{path}: {_words(evidence)}")
    return int(refused)


def _words(evidence: Evidence) -> str:
    from swarmnet.messages import Missent, Pair

    proof, stamp = evidence.proof, evidence.pledge.stamp
    where = f"in step {stamp.step} of stage {stamp.stage} of run {evidence.run[:12]}"
    if isinstance(proof, Pair):
        return f"{evidence.pledge.peer} lied {where}: it signed two different pledges for one sum"
    if isinstance(proof, Missent):
        what = f"the {proof.sent.kind} of microbatch {proof.sent.index}"
        return f"{evidence.pledge.peer} lied {where}: it counted {what}, and sent another one"
    what = "its contribution" if proof.work is None else f"microbatch {proof.work.index}"
    odd, agree, jury = evidence.count
    about = "" if odd == {evidence.pledge.peer} else f" of {evidence.pledge.peer}"
    if proof.sent is not None:
        what = f"the {proof.sent.kind} that it sent of {what}"
        about = f" ({evidence.pledge.peer} says who judges)"
    return f"{' and '.join(sorted(odd))} lied {where}, about {what}{about}: {agree} of a jury of {jury} found otherwise"


@click.command("receipts", context_settings=SETTINGS)
@click.argument("places", nargs=-1, required=True, type=TypedPath(path_type=Path), metavar="DIR_OR_FILE...")
@with_json
def receipts(places: tuple[Path, ...], as_json: bool) -> int:
    """Show who counted what in a run, proven by the receipts that replicas keep. Needs no run and no network.

    DIR is searched for receipts at any depth; those of several replicas are put together. Exit code: 0 if all of them
    are proven and tell one history of each stage, 1 if not. A history is the word of those who signed it.

    \b
    Example:
      swarmnet receipts ~/.swarmnet/peer
    """
    from swarmnet.audit.histories import account
    from swarmnet.net.identity import verify as signed
    from swarmnet.step.commits import evidence

    runs: dict[str, list[tuple[str, Receipt]]] = {}
    for file, receipt in _read(places):
        runs.setdefault(receipt.run, []).append((file, receipt))
    if not runs:
        raise UsageError(
            f"no receipts in {', '.join(map(str, places))}: name the --dir of a peer that has taken part in a run with "
            "audits (the manifest's table [audit])"
        )
    accounts = {run: account(told, signed, evidence) for run, told in runs.items()}
    if as_json:
        click.echo(json.dumps({run: _facts(found) for run, found in accounts.items()}, indent=2))
    else:
        for run, found in accounts.items():
            _show(run, found)
    for run, found in accounts.items():
        for stage in found.contested:
            click.echo(
                f"stage {stage} of run {run[:12]} has more than one history, each the word of its signers: ask more "
                "peers of the run for their receipts",
                err=True,
            )
    return int(any(found.refused or found.contested for found in accounts.values()))


def _read(places: tuple[Path, ...]) -> Iterator[tuple[str, Receipt]]:
    from swarmnet.audit.receipts import FILES, is_cut, read

    for place in places:
        for path in sorted(place.rglob(FILES)) if place.is_dir() else [place]:
            try:
                for receipt in read(path):
                    yield str(path), receipt
                if is_cut(path):
                    click.echo(f"{path}: its last line was cut short, and does not count", err=True)
            except ValueError as error:
                raise UsageError(f"{path}: {error}") from error
            except OSError as error:
                raise UsageError(f"cannot read {path} ({error.strerror or error})") from error


_MOST_NAMED = 8
"""Signers or files of a history that are shown."""


def _show(run: str, found: Account) -> None:
    click.echo(f"run {run[:12]}")
    number = 0
    for at, history in enumerate(found.histories):
        stage = history.stage
        number = number + 1 if at and found.histories[at - 1].stage == stage else 1
        which = f", history {number}" if stage in found.contested else ""
        missing = f", {counted(history.missing, 'step')} missing" if history.missing else ""
        proven = f"{counted(history.steps, 'step')}, {history.linked} of them with the chain"
        click.echo(f"  stage {stage}{which}: {proven}{missing}; {history.tokens:,} tokens")
        files = f"; told by {_some(history.files)}" if which else ""
        click.echo(f"    {_signed(history.own)}{files}")
        if history.given_up is not None:
            click.echo(f"    a restart gave up {counted(history.given_up.steps, 'step')}, {_signed(history.given_up)}")
        for peer, tally in sorted(history.tallies.items()):
            click.echo(f"    {peer} {tally.steps:>7} steps {tally.indexes:>9} indexes {tally.tokens:>15,} tokens")
    for line in found.refused:
        click.echo(f"  not counted: {line}")


def _signed(part: Stretch) -> str:
    names = _some([f"...{peer[-8:]}" for peer in sorted(part.signers)])
    return f"from step {part.first} on signed by {counted(len(part.signers), 'peer')}: {names}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _facts(found: Account) -> dict[str, object]:
    return {"histories": [_facts_of(history) for history in found.histories], "refused": found.refused}


def _facts_of(history: StageHistory) -> dict[str, object]:
    members = [
        {"peer": peer, "steps": tally.steps, "indexes": tally.indexes, "tokens": tally.tokens}
        for peer, tally in sorted(history.tallies.items())
    ]
    return {
        "stage": history.stage,
        "steps": history.steps,
        "linked": history.linked,
        "missing": history.missing,
        "tokens": history.tokens,
        "own": _facts_of_part(history.own),
        "files": history.files,
        "given_up": None if history.given_up is None else _facts_of_part(history.given_up),
        "members": members,
    }


def _facts_of_part(part: Stretch) -> dict[str, object]:
    return {"first": part.first, "steps": part.steps, "signers": sorted(part.signers)}
