"""`swarmnet audit`: check proofs offline; `verify` says who did wrong, `receipts` who contributed what."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmnet.cli.frame import Commands
from swarmnet.cli.settings import SETTINGS, TypedPath, with_json
from swarmnet.errors import UsageError
from swarmnet.telemetry.log import plain
from swarmnet.telemetry.text import counted, printable, short

if TYPE_CHECKING:
    from swarmnet.audit.evidence import Evidence
    from swarmnet.audit.histories import Account, NamedFault, StageHistory, Stretch
    from swarmnet.audit.receipts import Receipt
    from swarmnet.ids import PeerId


def _paths(places: Iterable[Path], inside: Callable[[Path], Iterable[Path]]) -> list[Path]:
    """The files named, and of directories what `inside` finds there. Raises UsageError."""
    found: dict[Path, None] = {}
    for place in places:
        try:
            place.stat()
            found |= dict.fromkeys(sorted(inside(place)) if place.is_dir() else [place])
        except OSError as error:
            raise UsageError(f"cannot read {place} ({error.strerror or error})") from error
    return list(found)


_NOT_REGULAR = "it is not a regular file"
"""A pipe may never end."""


@click.group(cls=Commands, no_args_is_help=False, context_settings=SETTINGS)
def audit() -> None:
    """Check the proofs that peers keep, without a run and without a network: of wrong work, and of contributions.

    \b
    Example:
      swarmnet audit receipts ~/.swarmnet/peer
    """


@audit.command("verify", context_settings=SETTINGS)
@click.argument("places", nargs=-1, required=True, type=TypedPath(path_type=Path), metavar="DIR_OR_FILE...")
def verify(places: tuple[Path, ...]) -> int:
    """Check evidence that a peer did wrong: who, in what, and what proves it. Needs no run and no network.

    FILE is what a replica wrote when it proved a fault. Of DIR, all files *.proof at any depth are checked. Exit
    code: 0 if each file proves what it says, 1 if one does not. That it happened in the run that a file names is proven
    if the output says "of run", not if it says "the file calls".

    \b
    Examples:
      swarmnet audit verify ~/.swarmnet/peer
      swarmnet audit verify ~/.swarmnet/peer/evidence/*.proof
    """
    if not (paths := _paths(places, _evidence_in)):
        click.echo(f"no evidence in {', '.join(printable(str(place)) for place in places)}")
    refused = False
    for path in paths:
        try:
            words = _words(_proven(path))
        except ValueError as error:
            words, refused = f"this file proves nothing: {error}", True
        click.echo(f"{printable(str(path))}: {words}")
    return int(refused)


def _evidence_in(place: Path) -> Iterable[Path]:
    # Earlier versions wrote JSON there, which is refused in words.
    old = [*place.rglob("evidence/*.json"), *(place.glob("*.json") if place.name == "evidence" else ())]
    return [*place.rglob("*.proof"), *old]


def _proven(path: Path) -> Evidence:
    """Raises ValueError, in words: why it proves nothing."""
    from swarmnet.audit.evidence import MOST_READ, Evidence, from_line
    from swarmnet.net.identity import verify as signed

    if not path.is_file():
        raise ValueError(_NOT_REGULAR)
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            text = file.read(MOST_READ)
        evidence = from_line(text, Evidence, signed)
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise ValueError(f"it is {error}") from error
    if why := evidence.refusal(signed):
        raise ValueError(why)
    return evidence


def _words(evidence: Evidence) -> str:
    from swarmnet.audit.case import needs_no_recheck

    case, run = evidence.case, evidence.run[:12]
    peer, stamp = case.pledge.peer, case.pledge.stamp
    of = f"run {run}" if evidence.run_proven else f"a run that the file calls {run} (which nothing in it proves)"
    where = f"in step {stamp.step} of stage {stamp.stage} of {of}"
    if case.other is not None:
        return f"{peer} lied {where}: it signed two different commitments to one aggregate"
    if case.sent is not None and needs_no_recheck(case):
        what = f"the {case.sent.kind} of microbatch {case.sent.index}"
        return f"{peer} lied {where}: it counted {what}, and sent another one"
    what = "its contribution" if case.work is None else f"microbatch {case.work.index}"
    agree, number = evidence.count
    about = "" if evidence.at_fault == {peer} else f" of {peer}"
    known = ""
    if case.sent is not None:
        what, about = f"the {case.sent.kind} that it sent of {what}", ""
        known = (
            f". The list of verifiers was signed by {peer}, not by the suspect: believe it if you know that they took "
            "part in the run"
        )
    names = " and ".join(sorted(evidence.at_fault))
    return f"{names} lied {where}, about {what}{about}: {agree} of {number} verifiers found otherwise{known}"


@audit.command("receipts", context_settings=SETTINGS)
@click.argument("places", nargs=-1, required=True, type=TypedPath(path_type=Path), metavar="DIR_OR_FILE...")
@with_json
def receipts(places: tuple[Path, ...], as_json: bool) -> int:
    """Show who contributed what to a run, proven by the receipts that replicas keep. Needs no run and no network.

    DIR is searched for receipts at any depth; those of several replicas are put together. A peer that evidence there
    bans is marked. A step is proven by the chain if the next step's signers signed a hash of it. A member's steps are
    those in which it contributed a microbatch; `swarmnet control stats` has those that it applied.

    Exit code: 0 if all receipts are proven, tell one history of each stage, and reach the first step, which alone
    proves the run's id; 1 if not. A history is the word of those who signed it.

    \b
    Example:
      swarmnet audit receipts ~/.swarmnet/peer
    """
    from swarmnet.audit.histories import account
    from swarmnet.audit.receipts import FILES
    from swarmnet.net.identity import verify as signed
    from swarmnet.step.commits import evidence

    runs: dict[str, list[tuple[str, Receipt]]] = {}
    damaged = False
    for path in _paths(places, lambda place: place.rglob(FILES)):
        told, bad = _read(path)
        # Another kind of file: what is wrong with each of its lines helps nobody.
        if path in places and bad and not told and not path.match(FILES):
            raise UsageError(f"{printable(str(path))}: holds no receipt ({bad[0]}): name receipts, or a peer's --dir")
        for receipt in told:
            runs.setdefault(receipt.run, []).append((str(path), receipt))
        for line in bad[:_MOST_NAMED]:
            click.echo(f"{printable(str(path))}: {line}", err=True)
        if len(bad) > _MOST_NAMED:
            click.echo(f"{printable(str(path))}: {counted(len(bad) - _MOST_NAMED, 'more line')} like these", err=True)
        damaged |= bool(bad)
    if not runs and not damaged:
        raise UsageError(
            f"no receipts in {', '.join(map(str, places))}: name the --dir of a peer that has taken part in a run with "
            "audits (the manifest's table [audit])"
        )
    proofs = _proofs(path for path in places if path.is_dir())
    accounts = {run: account(told, signed, evidence) for run, told in runs.items()}
    if as_json:
        click.echo(json.dumps({run: _facts(run, found, proofs) for run, found in accounts.items()}, indent=2))
    else:
        for run, found in accounts.items():
            _show(run, found, proofs)
    for run, found in accounts.items():
        for stage in found.contested:
            click.echo(
                f"stage {stage} of run {run[:12]} has more than one history, each the word of its signers: ask more "
                "peers of the run for their receipts",
                err=True,
            )
        for stage in found.of_any_run:
            click.echo(
                f"stage {stage}: run {run[:12]} as the file says: without a receipt of the stage's first step nothing "
                "proves which run it is. Add those of a peer that was there from the start",
                err=True,
            )
    return int(damaged or any(found.refused or found.contested or found.of_any_run for found in accounts.values()))


def _read(path: Path) -> tuple[list[Receipt], list[str]]:
    """The receipts of a file, and what is wrong with it."""
    from swarmnet.audit.receipts import is_cut, read
    from swarmnet.net.identity import verify as signed

    found: list[Receipt] = []
    bad: list[str] = []
    try:
        if not path.is_file():
            return [], [_NOT_REGULAR]
        found.extend(read(path, bad, signed))
        if is_cut(path):
            click.echo(f"{printable(str(path))}: its last line was cut short, and does not count", err=True)
    except OSError as error:
        bad.append(f"it cannot be read ({error.strerror or error})")
    return found, bad


def _proofs(directories: Iterable[Path]) -> list[Evidence]:
    """The evidence next to receipts that proves something; what does not is said."""
    found = []
    for path in _paths(directories, _evidence_in):
        try:
            found.append(_proven(path))
        except ValueError as error:
            click.echo(f"{printable(str(path))}: this file proves nothing: {error}", err=True)
    return found


_MOST_NAMED = 8
"""Signers, files of a history, or damaged lines that are shown."""


def _show(run: str, found: Account, proofs: list[Evidence]) -> None:
    from swarmnet.audit.histories import faults_of

    proven = any(history.run_proven for history in found.histories)
    click.echo(f"run {run[:12]}{'' if proven else ' as the file says'}")
    number = 0
    for at, history in enumerate(found.histories):
        stage = history.stage
        number = number + 1 if at and found.histories[at - 1].stage == stage else 1
        which = f", history {number}" if stage in found.contested else ""
        of = "" if history.run_proven else f" of run {run[:12]} as the file says"
        steps = f"{counted(history.steps, 'step')}, {history.linked:,} of them proven by the chain"
        click.echo(f"  stage {stage}{of}{which}: {steps}; {history.tokens:,} tokens")
        files = f"; told by {_some(history.files)}" if which else ""
        click.echo(f"    {_signed(history.own)}{files}")
        if history.missing:
            click.echo(
                f"    {counted(history.missing, 'step')} missing in between: signers alone join what is before and "
                "after; add receipts of peers that were there"
            )
        for part in history.given_up:
            click.echo(f"    a restart gave up {counted(part.steps, 'step')}, {_signed(part)}")
        wrong = faults_of(history, run, proofs)
        for peer, tally in sorted(history.tallies.items()):
            work, where = counted(tally.microbatches, "microbatch"), counted(tally.steps, "step")
            marked = _marked(wrong[peer], stage) if peer in wrong else ""
            click.echo(f"    {peer} counted {work:>20} in {where:>13}, {tally.tokens:>15,} tokens{marked}")
    for line in found.refused:
        click.echo(f"  not counted: {line}")


def _marked(fault: NamedFault, stage: int) -> str:
    of = "" if fault.stage == stage else f" of stage {fault.stage}"
    says = "" if fault.proven else ", as a file says of this run"
    return f" (banned: step {fault.step}{of}{says})"


def _signed(part: Stretch) -> str:
    names = _some([short(peer) for peer in sorted(part.signers)])
    return f"from step {part.first} on signed by {counted(len(part.signers), 'peer')}: {names}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _facts(run: str, found: Account, proofs: list[Evidence]) -> dict[str, object]:
    from swarmnet.audit.histories import faults_of

    histories = [_facts_of(history, faults_of(history, run, proofs)) for history in found.histories]
    return {"histories": histories, "refused": found.refused}


def _facts_of(history: StageHistory, wrong: Mapping[PeerId, NamedFault]) -> dict[str, object]:
    members = [
        {"peer": peer, **plain(tally), "convicted": plain(wrong.get(peer))}
        for peer, tally in sorted(history.tallies.items())
    ]
    names = ("stage", "run_proven", "steps", "linked", "missing", "tokens", "own", "files", "given_up")
    return {name: plain(getattr(history, name)) for name in names} | {"members": members}
