"""`swarmnet status`: ask the DHT about a run, and show what `assess` makes of it.

Records are what peers say of themselves, up to a TTL old; this is an overview, not a proof. It answers soon, or says
after a few seconds what it waits for; after some more it makes do with what it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
import textwrap
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet.clock import boot_time, run_loop
from swarmnet.directory import Record
from swarmnet.errors import PeerTimeout, UsageError
from swarmnet.ids import PeerId, RunId
from swarmnet.manifest.file import load, run_id
from swarmnet.manifest.terms import RunTerms
from swarmnet.net.admission import Admissions
from swarmnet.net.admission_files import admissions_of
from swarmnet.net.swarm_link import SwarmLink
from swarmnet.peer.contributors import HEAD
from swarmnet.peer.swarm_health import NO_BOOTSTRAP, AdmissionLine, Assessment, ReplicaLine, assess, unanswered
from swarmnet.telemetry.journal import for_guests, loopback_last
from swarmnet.telemetry.text import duration, printable, short

if TYPE_CHECKING:
    from swarmnet.manifest.schema import Manifest
    from swarmnet.net.dht import DhtDirectory

READS = 3  # a newcomer's first lookup may meet nodes that are already gone
BETWEEN_READS_S = 0.3
WHOLE = 64  # digits of a run id

SAY_AFTER_S, SAY_EVERY_S = 4.0, 10.0
"""When it says what it waits for, and how often again."""

MOST_LINKS = 2
"""That are shown: one of the peers may leave."""

MOST_CONTRIBUTORS = 10
"""That are shown: those who have contributed the most."""

GIVEN_UP_AFTER_S = 20.0
"""After so long it answers with what is there."""


def run_status(named: Path | str, bootstrap: tuple[str, ...], as_json: bool = False) -> int:
    """Print the state of a run, as a table or as one JSON object.

    named: its manifest, or its id, or the first digits of that (`FIRST_DIGITS` or more).

    The exit code: 0 if it was seen, 1 if no peer announces it, 2 if no peer answers at `bootstrap`.

    Raises what `looking_on` raises.
    """
    codes: list[int] = []

    def answer(assessment: Assessment) -> None:
        waiting.over()
        codes.append(_answer(assessment, as_json))
        sys.stdout.flush()  # what ends now may take its time

    with Waiting() as waiting:
        run_loop(_ask(named, bootstrap, waiting, answer))
    return codes[0]


def read_status(named: Path | str, bootstrap: tuple[str, ...]) -> Assessment:
    """The state of a run, as `run_status` would print it. Raises what that raises."""
    found: list[Assessment] = []
    run_loop(_ask(named, bootstrap, Waiting(), found.append))
    return found[0]


def _answer(assessment: Assessment, as_json: bool) -> int:
    if as_json:
        print(json.dumps(asdict(assessment), indent=2))
    elif assessment.seen:
        _show(assessment)
    if not assessment.seen:
        print(f"swarmnet status: {assessment.problems[0].text}", file=sys.stderr)
    return exit_code(assessment)


def exit_code(assessment: Assessment) -> int:
    """0 if the run was seen, 1 if no peer announces it, 2 if no peer answered."""
    if assessment.seen:
        return 0
    return 2 if assessment.problems[0].kind == NO_BOOTSTRAP else 1


class Waiting:
    """Prints on standard error what is waited for, if that takes long; a thread, for some of it blocks. The waiting
    code sets `what`. command: the command's name."""

    def __init__(
        self,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
        command: str = "status",
    ) -> None:
        self.what = "Python to load what it needs"
        self.command = command
        self._say, self._began, self._over = say, boot_time(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="waiting", daemon=True)

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over()
        self._thread.join()

    def over(self) -> None:
        """There is an answer."""
        self._over.set()

    @property
    def answered(self) -> bool:
        """Is it over?"""
        return self._over.is_set()

    @property
    def so_far_s(self) -> float:
        """Seconds since it began."""
        return boot_time() - self._began

    def _watch(self) -> None:
        pause_s = SAY_AFTER_S
        while not self._over.wait(pause_s):
            pause_s = SAY_EVERY_S
            self._say(f"swarmnet {self.command}: waiting for {self.what}, {self.so_far_s:.0f} s so far")


@dataclass(slots=True)
class Observer:
    """An observer of a run from outside: a client of its DHT that stores nothing.

    admissions: the admitted peers; None: unknown, no peer has sent the manifest yet. until: loop time at which it makes
    do with what it has. name: of the run, in its manifest; empty: unknown.
    """

    run: RunId
    directory: DhtDirectory
    admissions: Admissions | None
    until: float
    name: str = ""

    async def first_records(self, waiting: Waiting) -> tuple[Record, ...]:
        """The records of all peers; after `until` those that have come, with a note that they take long."""
        waiting.what = "records of the run from the DHT"
        records: tuple[Record, ...] = ()
        try:
            async with asyncio.timeout_at(self.until):
                for _ in range(READS):
                    if records := await self.directory.records():
                        break
                    await asyncio.sleep(BETWEEN_READS_S)
        except TimeoutError:
            records = self.directory.known()
            print(
                f"swarmnet {waiting.command}: gave up waiting for {waiting.what} after {waiting.so_far_s:.0f} s: this "
                "is what had come by then",
                file=sys.stderr,
            )
        return records

    def learn(self, manifest: Manifest) -> None:
        """The run's manifest has come: from now on only records of admitted peers are read."""
        terms = RunTerms.of(manifest)
        self.admissions, self.name = admissions_of(terms), manifest.name
        self.directory.learn(terms.num_stages, self.admissions)

    def assess(self, records: tuple[Record, ...]) -> Assessment:
        """What they amount to."""
        return assess(self.run, records, self.directory.num_stages, self.admissions)

    def assess_with_links(self, records: tuple[Record, ...]) -> Assessment:
        """The same, with links by which other peers join."""
        found = self.assess(records)
        out = {each.peer for each in found.convicts}
        peers = [record.peer for record in records if record.stages and not record.hidden and record.peer not in out]
        links = [str(SwarmLink(self.run, at)) for peer in peers for at in self.directory.dht_addresses(peer)[:1]]
        return replace(found, links=tuple(loopback_last(links)))


@contextlib.asynccontextmanager
async def looking_on(
    named: Path | str, bootstrap: tuple[str, ...], waiting: Waiting
) -> AsyncGenerator[Observer | Assessment, None]:
    """Find the run in the DHT of `bootstrap`; or what to report if it is not there, or no peer answers.

    Raises UsageError if the manifest cannot be read, `bootstrap` is empty or malformed, or several runs begin so;
    PeerTimeout if not even one peer could be asked.
    """
    run, num_stages, admissions, name = _which(named)
    if not bootstrap:
        raise UsageError(
            f"{waiting.command} needs to know a peer: give --bootstrap with the address that a running peer printed"
        )
    from swarmnet.net.dht import DhtDirectory  # hivemind takes a second to import
    from swarmnet.net.dht_daemon import Listen
    from swarmnet.net.dht_node import NoPeerAnswered
    from swarmnet.net.identity import Identity

    def client(run: RunId | None) -> DhtDirectory:
        waiting.what = f"this machine's libp2p daemon, and for an answer from {', '.join(bootstrap)}"
        return DhtDirectory(
            Identity.generate(),
            run,
            num_stages=num_stages,
            bootstrap=bootstrap,
            listen=Listen(client=True),
            admissions=admissions if run else None,
        )

    until = asyncio.get_running_loop().time() + max(GIVEN_UP_AFTER_S - waiting.so_far_s, GIVEN_UP_AFTER_S / 2)
    async with contextlib.AsyncExitStack() as stack:
        found: Observer | Assessment
        try:
            async with asyncio.timeout_at(until):
                whole: RunId | None = run
                # A node without a run finds the rest of the id first.
                if len(run) < WHOLE:
                    from swarmnet.peer.joining import announced

                    async with client(None) as directory:
                        waiting.what = f"a peer that announces a run with an id that begins with {run}"
                        whole = await announced(directory, run, READS * BETWEEN_READS_S, lambda *_: None)
                if whole is None:
                    found = assess(run, (), num_stages)
                else:
                    directory = await stack.enter_async_context(client(whole))
                    found = Observer(whole, directory, admissions, until, name)
        except NoPeerAnswered:
            found = unanswered(run, num_stages, bootstrap)
        except TimeoutError:
            raise PeerTimeout(
                f"gave up waiting for {waiting.what}, after {waiting.so_far_s:.0f} s: this machine or "
                "its network is busy, so try again"
            ) from None
        yield found


async def _ask(
    named: Path | str, bootstrap: tuple[str, ...], waiting: Waiting, answer: Callable[[Assessment], None]
) -> None:
    """Find out, answer, and then leave the DHT."""
    async with looking_on(named, bootstrap, waiting) as found:
        if isinstance(found, Observer):
            answer(found.assess_with_links(await found.first_records(waiting)))
        else:
            answer(found)


def _which(named: Path | str) -> tuple[RunId, int, Admissions | None, str]:
    """The run or the first digits of its id, its number of stages (0: unknown), who is admitted (None: unknown), and
    its name ("": unknown)."""
    # Only a manifest says how many stages there are, who is admitted, and the name.
    if isinstance(named, str):
        return RunId(named), 0, None, ""
    manifest = load(named)
    run = run_id(manifest)
    return run, manifest.cut.stages, admissions_of(RunTerms.of(manifest)), manifest.name


def _show(assessment: Assessment) -> None:
    loss = f", loss {assessment.loss.value:.4f} at step {assessment.loss.step}" if assessment.loss else ""
    held_out = assessment.eval_loss
    evaluated = f", held-out {held_out.value:.4f} at version {held_out.step}" if held_out else ""
    of = f" of {assessment.steps}" if assessment.steps else ""
    state = "finished" if assessment.finished else f"version {'?' if (v := assessment.version) is None else v}{of}"
    going = not assessment.finished
    pace = f", {assessment.tokens_per_second:,.0f} tokens/s" if assessment.tokens_per_second and going else ""
    twice = f", executions per index {assessment.executions_per_index:.3f}" if assessment.executions_per_index else ""
    eta = f", ETA {duration(assessment.eta_s)}" if assessment.eta_s is not None and going else ""
    kept = "no version of all stages yet"
    if assessment.on_disk is not None:
        kept = f"version {assessment.on_disk}"
    # Disks of peers that are down are not seen.
    elif any(replica.disk for line in assessment.stages for replica in line.replicas):
        kept = "no version of all stages at the peers that are up"
    _say(f"run {assessment.run[:12]}: {state}{loss}{evaluated}{pace}{eta}{twice}", f"on disk: {kept}")
    if assessment.finished:
        _say("the run is complete: `swarmnet export` writes its model, and then its peers can be stopped")
    if assessment.admission is not None:
        _say(f"admission: {_admission(assessment.admission)}")
    rows: list[tuple[str, ...]] = [("stage", "peer", "version", "state", "load", "speed", "on disk", "compared")]
    for line in assessment.stages:
        rows += [_row(line.stage, replica) for replica in line.replicas]
        # A stage without a replica is what the reader looks for.
        if not line.replicas:
            rows.append((str(line.stage), "none", "", "", "", "", "", ""))
    _table(rows)
    replicas = list({each.peer: each for line in assessment.stages for each in line.replicas}.values())
    for name in ("numerics", "region", "software"):
        _say(*_alike(name, {each.peer: str(getattr(each, name)) for each in replicas}))
    names = ", ".join(short(trainer.peer) for trainer in assessment.trainers) or "none"
    _say(f"trainers: {names}")
    if assessment.contributors:
        _table([HEAD, *(each.cells for each in assessment.contributors[:MOST_CONTRIBUTORS])])
    if (more := len(assessment.contributors) - MOST_CONTRIBUTORS) > 0:
        _say(f"and {more:,} more, whom --json has")
    # Whole, on lines of their own: they are copied.
    invited = assessment.admission is not None and assessment.admission.policy == "invite"
    for link in assessment.links[:MOST_LINKS] if going else ():
        print(f"join: swarmnet join {printable(link)}{for_guests(invited)}")
    _say(*(f"{problem.severity}: {problem.text}" for problem in assessment.problems))


def _table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _say(*texts: str) -> None:
    """Print each, broken between words where the terminal ends (80 columns where there is none)."""
    width = shutil.get_terminal_size().columns
    for text in texts:
        print(
            "\n".join(
                textwrap.wrap(
                    printable(text), width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
                )
            )
        )


def _row(stage: int, replica: ReplicaLine) -> tuple[str, ...]:
    older = f" +{len(replica.disk) - 1}" if len(replica.disk) > 1 else ""
    return (
        str(stage),
        printable(f"{replica.nickname} {short(replica.peer)}".strip()),
        str(replica.version),
        replica.state,
        f"{replica.queue}/{replica.slots}",
        f"{replica.speed:.3g}/s" if replica.speed else "",
        f"{max(replica.disk)}{older}" if replica.disk else "",
        # Were its weights those of the stage, and at which version was that looked at?
        "" if replica.drift is None else f"{replica.drift}{' off' if replica.stray else ''}",
    )


def _alike(name: str, values: Mapping[PeerId, str]) -> list[str]:
    """A line for each value that replicas have, with those that have it unless all do."""
    peers: dict[str, list[str]] = {}
    for peer, value in values.items():
        if value:
            peers.setdefault(value, []).append(short(peer))
    return [
        f"{name}: {value}" + f" ({', '.join(some)})" * (len(some) < len(values))
        for value, some in sorted(peers.items())
    ]


def _admission(line: AdmissionLine) -> str:
    said = "" if line.checked else ", as its peers say (the manifest tells for sure)"
    if line.policy == "open":
        return f"open, anyone may join{said}"
    return f"by invitation of {line.owner}, {line.banned} banned" if line.checked else f"by invitation{said}"
