"""`swarmnet watch` as a process: looks at a run from outside, again and again, and keeps what it learns.

It finds the run in the DHT as `swarmnet status` does, as a client that stores nothing, and asks a few members for the
figures of their last steps. It is no member, joins nothing and needs no invitation.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import sys
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from swarmnet.clock import run_loop, wall_time
from swarmnet.config.check import check_installed
from swarmnet.directory import Record
from swarmnet.errors import SwarmError
from swarmnet.ids import PeerId
from swarmnet.messages import Busy, History, HistoryRequest
from swarmnet.monitor.curve import Curve, told
from swarmnet.monitor.files import CsvFile, CurveFile, CurvePicture, TensorBoard, WeightsAndBiases
from swarmnet.monitor.page import fairly
from swarmnet.monitor.state import WatchedRun, synced
from swarmnet.monitor.view import JsonLines, WatchScreen, WatchView
from swarmnet.monitor.waterfall import StepBar, bars_of
from swarmnet.net.stop import stopped_by_signal, unless_stopped
from swarmnet.peer.status import Observer, Waiting, exit_code, looking_on
from swarmnet.peer.swarm_health import Assessment
from swarmnet.telemetry.figures import MAX_FIGURES, StepFigures
from swarmnet.telemetry.plot import check_ending
from swarmnet.transport import Transport, ask

MOST_ASKED, MOST_TRAINERS = 7, 3
"""Members that are asked for steps, and trainers for held-out losses."""

MOST_TIMED, AT_ONCE = 24, 16
"""Members that are asked how they spent the last step, and how many of them at a time."""

_NO_STEP = 1 << 53
"""No run comes so far: an answer since then has times alone."""

ASK_S, AGAIN_S = 3.0, 5.0
"""How long an answer may take, and when one that gave none is asked again."""

_MOST_MANIFESTS = 2
"""Members that are asked for the manifest in one look, until one has given it."""

_MOST_ANSWERS = 10
"""Of one member in one look: more than it remembers."""

GONE_S = 60.0
"""After so long without an announcement the run is over, or its peers cannot be reached from here."""

LAST_HELD_OUT_S = 20.0
"""After the last step, how long the held-out loss of the last version is waited for."""


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What `swarmnet watch` was asked for. every_s: between looks."""

    csv: Path | None = None
    png: Path | None = None
    tensorboard: Path | None = None
    wandb: str = ""
    once: bool = False
    as_json: bool = False
    every_s: float = 2.0
    page: bool = False
    """For the dashboard: look on when the run has finished, or no peer announces it, and ask more members how they have
    spent their last step."""


def run_watch(named: Path | str, bootstrap: tuple[str, ...], options: WatchOptions) -> int:
    """Watch until the run has finished, or Ctrl+C. Returns the exit code: 0, also after Ctrl+C; 1 if no peer
    announces the run; 2 if none answers. Raises UsageError, what `looking_on` raises, and KeyboardInterrupt if Ctrl+C
    came before the run was found."""
    if options.png:
        check_ending("--png", options.png)
    for flag, extra, wanted in (
        ("--png", "plot", options.png),
        ("--tensorboard", "tensorboard", options.tensorboard),
        ("--wandb", "wandb", options.wandb),
    ):
        if wanted:
            check_installed(flag, extra)
    # Refuses early what cannot be written, and reads what an earlier watch has.
    csv = CsvFile(options.csv) if options.csv else None
    view = JsonLines() if options.as_json else WatchScreen(Console())
    return until_stopped("watch", lambda waiting: look_on(named, bootstrap, options, csv, waiting, view))


def until_stopped(command: str, looking: Callable[[Waiting], Coroutine[None, None, int]]) -> int:
    """The exit code of what looks on; 0 after Ctrl+C. Raises KeyboardInterrupt if that came before there was a run."""

    async def main() -> int | None:
        with stopped_by_signal() as stop:
            return await unless_stopped(stop, looking(waiting))

    with Waiting(command=command) as waiting:
        code = run_loop(main())
        if code is None and not waiting.answered:
            raise KeyboardInterrupt
        return code or 0


async def look_on(
    named: Path | str,
    bootstrap: tuple[str, ...],
    options: WatchOptions,
    csv: CsvFile | None,
    waiting: Waiting,
    view: WatchView,
) -> int:
    """Find the run, then look at it until it is over. Returns the exit code. Raises what `looking_on` raises."""
    from swarmnet.net.grpc_transport import GrpcTransport
    from swarmnet.net.identity import Identity

    async with looking_on(named, bootstrap, waiting) as found, contextlib.AsyncExitStack() as stack:
        if isinstance(found, Assessment):
            waiting.over()
            print(f"swarmnet {waiting.command}: {found.problems[0].text}", file=sys.stderr)
            return exit_code(found)
        addresses: dict[PeerId, Sequence[str]] = {}
        transport = await stack.enter_async_context(
            GrpcTransport(Identity.generate(), None, addresses=lambda peer: addresses.get(peer, ()), listens=False)
        )
        watcher = Watcher(found, transport, addresses, options, csv, view)
        stack.callback(watcher.close)
        return await watcher.run(waiting)


class Watcher:
    """Looks, decides through `Curve`, writes and shows. addresses: filled with what records say."""

    def __init__(
        self,
        observer: Observer,
        transport: Transport,
        addresses: dict[PeerId, Sequence[str]],
        options: WatchOptions,
        csv: CsvFile | None,
        view: WatchView,
    ) -> None:
        self._view = view
        self._observer, self._transport, self._addresses, self._options = observer, transport, addresses, options
        self._curve = Curve(csv.points if csv else ())
        self._seen = WatchedRun(self._curve, now=wall_time())
        self._steps = 0  # of the run, as last heard
        self._disputed: int | None = None
        self._csv = csv
        if csv is not None:
            csv.check(observer.run)
        self._bars: dict[PeerId, list[StepBar]] = {}  # how members have spent their last step, of this look
        self._silent: dict[PeerId, tuple[float, bool]] = {}  # whom to ask again only then; was it busy?
        self._evaluated: dict[PeerId, int] = {}  # trainer -> the version after its last
        self._order = random.random()
        self._files: list[CurveFile] = []  # opened once the run is found

    def _opened(self) -> Iterable[CurveFile]:
        run, options = self._observer.run, self._options
        # First, for it may refuse.
        if options.tensorboard:
            yield TensorBoard(options.tensorboard, run)
        if self._csv:
            yield self._csv
        if options.png:
            yield CurvePicture(options.png, run, self._seen, self._view.note)
        if options.wandb:
            yield WeightsAndBiases(options.wandb, run)

    def close(self) -> None:
        """Write what is still to be written."""
        for file in self._files:
            file.close()

    async def run(self, waiting: Waiting) -> int:
        """Until the run is over; one look with `once`. Returns the exit code."""
        clock = asyncio.get_running_loop().time
        records = await self._observer.first_records(waiting)
        waiting.over()
        heard_at, last_at = clock(), math.inf
        with self._view as screen:
            while True:
                began = clock()
                found = self._observer.assess(records)
                heard_at = began if found.seen else heard_at
                self._steps = found.steps or self._steps
                gone, stays = began - heard_at > GONE_S, self._options.page
                # A DHT that is silent for a moment does not mean that all have left.
                if found.seen or (gone and stays):
                    await self._look(found, records)
                if self._options.once or (gone and not stays):
                    if not found.seen:
                        screen.end(f"swarmnet watch: {found.problems[0].text}")
                    return exit_code(found)
                newest = self._curve.newest
                if not stays and self._steps and newest is not None and newest.step >= self._steps - 1:
                    last_at = min(last_at, began)
                    evaluated = self._steps in self._curve.evaluations or not found.trainers
                    if evaluated or began - last_at > LAST_HELD_OUT_S:
                        screen.end(f"the run has finished: {self._steps} steps")
                        return 0
                await asyncio.sleep(max(self._options.every_s - (clock() - began), 0.0))
                records = await self._observer.directory.records()

    async def _look(self, found: Assessment, records: Sequence[Record]) -> None:
        convicts = {each.peer for each in found.convicts}
        records = [each for each in records if each.peer not in convicts]
        if self._curve.went_back(found.restart):
            self._evaluated.clear()
        answers, versions = await self._ask_all(found, records)
        busy = sum(self._silent.get(each.peer, (0.0, False))[1] for each in records if each.stages)
        live_s = self._options.every_s + ASK_S
        steps = self._curve.settle(answers, now=wall_time(), replicas=synced(found), live_s=live_s, busy=busy)
        bars = [bar for of_peer in self._bars.values() for bar in of_peer]
        self._seen.name = self._observer.name
        self._seen.look(found, now=wall_time(), steps=steps, versions=versions, bars=bars)
        self._write(steps, versions)
        self._view.look(self._seen)
        if (step := self._curve.disputed) is not None and step != self._disputed:
            self._view.note(f"members say different things of step {step}, and none can be believed: it is left out")
        self._disputed = self._curve.disputed

    def _write(self, steps: Collection[int], versions: Collection[int]) -> None:
        opened = bool(self._files)
        self._files = self._files or list(self._opened())
        for file in self._files:
            if opened or file is self._csv:
                file.write(self._curve, steps, versions)
            else:  # what the CSV file has, too
                file.write(self._curve, [point.step for point in self._curve.points], list(self._curve.evaluations))

    # ------------------------------------------------------------ asking

    async def _ask_all(
        self, found: Assessment, records: Sequence[Record]
    ) -> tuple[dict[PeerId, dict[int, StepFigures]], list[int]]:
        """What those who answered say of steps, and the versions that have a new held-out loss."""
        now = asyncio.get_running_loop().time()
        # Through a relay only peers of the run speak to each other.
        able = [each for each in records if each.addresses and not each.hidden]
        self._addresses.clear()
        self._addresses |= {each.peer: each.addresses for each in able}
        ready = [each for each in able if self._silent.get(each.peer, (now, False))[0] <= now]
        if self._observer.admissions is None:
            ready = await self._admitted(ready)
        serving = [each for each in ready if each.stages]
        # Those of the last stage first, which made the commits; all others believe them by their signatures.
        serving.sort(key=lambda each: (-max(status.stage for status in each.stages), self._shuffled(each.peer)))
        trainers = sorted((each for each in ready if each.feeds), key=lambda each: self._shuffled(each.peer))
        # The answer about steps has the times of the last one, too. Others are asked for their times alone: the first
        # of each stage, then the second, and so on.
        asked, stages = serving[:MOST_ASKED], dict[int, list[PeerId]]()
        for each in serving[MOST_ASKED:] if self._options.page else ():
            stages.setdefault(each.stages[0].stage, []).append(each.peer)
        places, self._bars = asyncio.Semaphore(AT_ONCE), {}

        async def times_of(peer: PeerId) -> None:
            async with places:
                await self._history(peer, _NO_STEP)

        heard, evaluations, _ = await asyncio.gather(
            asyncio.gather(*(self._steps_of(each.peer, found.steps) for each in asked)),
            asyncio.gather(*(self._evaluations_of(each.peer) for each in trainers[:MOST_TRAINERS])),
            asyncio.gather(*map(times_of, fairly(stages.values())[: MOST_TIMED - len(asked)])),
        )
        held_out = {found.eval_loss.step: found.eval_loss.value} if found.eval_loss else {}
        for losses in reversed(evaluations):
            held_out |= losses
        versions = self._curve.evaluated(held_out, steps=found.steps)
        return {each.peer: steps for each, steps in zip(asked, heard, strict=True) if steps is not None}, versions

    async def _admitted(self, ready: list[Record]) -> list[Record]:
        """Those of them that the run's manifest admits, once a peer has sent it: its hash is the run's id."""
        from swarmnet.peer.joining import fetch_manifest  # imports torch: bad options are refused without it

        some = sorted(ready, key=lambda each: self._shuffled(each.peer))[:_MOST_MANIFESTS]
        failed = lambda peer, error: None  # noqa: E731  # another one will have it

        async def whom() -> list[PeerId]:
            return [each.peer for each in some if each.stages or each.feeds]

        manifest = await fetch_manifest(self._transport, self._observer.run, whom, on_failure=failed)
        if manifest is None:
            return ready
        self._observer.learn(manifest)
        admitted = {each.peer for each in self._observer.directory.known()}
        return [each for each in ready if each.peer in admitted]

    def _shuffled(self, peer: PeerId) -> int:
        """The same order for as long as this process lives, another one in each."""
        return hash((self._order, peer))

    async def _steps_of(self, peer: PeerId, steps: int) -> dict[int, StepFigures] | None:
        """What it says, by step; None: it has not answered."""
        since, found = self._curve.wanted, dict[int, StepFigures]()
        for _ in range(_MOST_ANSWERS):
            answer = await self._history(peer, since)
            if answer is None:
                return found or None
            some = told(answer, since, steps)
            found |= some
            if len(some) < MAX_FIGURES:
                break
            since = max(some) + 1
        return found

    async def _evaluations_of(self, peer: PeerId) -> dict[int, float]:
        answer = await self._history(peer, self._evaluated.get(peer, 0))
        if answer is None or not answer.evaluations:
            return {}
        self._evaluated[peer] = max(each.version for each in answer.evaluations) + 1
        return {each.version: each.loss for each in answer.evaluations}

    async def _history(self, peer: PeerId, since: int) -> History | None:
        try:
            answer = await ask(self._transport, peer, HistoryRequest(since), limit_s=ASK_S)
        except SwarmError:
            answer = None
        if isinstance(answer, History):
            self._silent.pop(peer, None)
            self._bars[peer] = bars_of(peer, answer, now=wall_time(), num_stages=self._observer.directory.num_stages)
            return answer
        # It is gone, busy, or of an earlier version that does not know the question. Busy counts as a vote that may
        # come; that of who is asked for times alone would be none.
        again = asyncio.get_running_loop().time() + AGAIN_S
        self._silent[peer] = again, isinstance(answer, Busy) and since != _NO_STEP
        return None
