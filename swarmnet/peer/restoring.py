"""Give a replica the state of its mates: fetch a copy, follow their trail until level, say how far it is.

Wires `state.snapshot_fetch`, `state.replay` and the exchange of sums to one replica's engine and step machine. It
decides neither when state is needed nor who might have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarmnet.averaging.exchange import Exchange
from swarmnet.errors import BadMessage, Refused, RejectCode, SwarmError
from swarmnet.ids import PeerId, Restart, next_chain
from swarmnet.messages import Commit, Finished, Round, Snapshot, Stamp
from swarmnet.stage.seams import Compute
from swarmnet.state.header import StateHeader
from swarmnet.state.replay import Level, Replay, ReplayLogEnds
from swarmnet.state.snapshot_fetch import Donors, Fetcher, TransferProgress
from swarmnet.state.snapshot_index import Seal
from swarmnet.step.gate import Shape, commit_refusal
from swarmnet.step.membership import evidence
from swarmnet.transport import Transport

Event = Callable[[str, dict[str, object]], None]


@dataclass(frozen=True, slots=True)
class Footing:
    """What is asked of the replica, and told to it.

    restart(): the restart of the run it follows. touch(): from now on the engine may hold other weights than those the
    replica stands on, also if whoever wanted them gives up. stand(header): the engine holds this version. event(name,
    fields): `fetching`, `following` and `fetching_again` say how far it is, `join_failed` who did not deliver.
    """

    restart: Callable[[], Restart]
    touch: Callable[[], None]
    stand: Callable[[StateHeader], None]
    event: Event


class Restoring:
    """Brings one (peer, stage) to where its mates are."""

    def __init__(
        self,
        transport: Transport,
        engine: Compute,
        exchange: Exchange,
        seal: Seal,
        footing: Footing,
        *,
        stage: int,
        shape: Shape,
    ) -> None:
        self._engine, self._exchange, self._footing, self._shape = engine, exchange, footing, shape
        self._fetcher = Fetcher(
            transport,
            stage,
            seal,
            max_bytes=engine.snapshot_bytes(stage),
            failed=self.say_failed,
            progress=self._say_progress,
            unfit=self.unfit,
        )
        self._replay = Replay(
            transport,
            engine,
            stage,
            shape.num_stages,
            collect=self._collect,
            after=self._after,
            moved=self._moved,
            failed=self._fetcher.failed,
            refusal=lambda commit: commit_refusal(commit, shape),
        )
        self._failed: set[tuple[object, ...]] = set()

    async def run(self, donors: Donors, *, version: int = -1) -> tuple[Level, int]:
        """Fetch and follow; returns where the engine stands then, and the bytes of the copy.

        donors() is asked again and again. Raises NoReplica if they hand nothing over, or what the last of them raised;
        the engine may then stand at an older version (`stand` was told).
        """
        while True:
            snapshot, data = await self._fetcher.fetch(donors, version=version)
            num_bytes = len(data)
            # A checkpoint of a mate may be older than the restart that goes on from it.
            header = StateHeader.of(snapshot, self._footing.restart())
            self._footing.touch()
            try:
                await self._engine.restore(data, version=snapshot.version)
            except BadMessage as error:
                self._fetcher.useless(error)
                continue
            del data
            self._footing.stand(header)
            try:
                level = await self._replay.run(header, lambda: self._fetcher.trusted(donors()))
            except ReplayLogEnds as error:
                self._footing.event("fetching_again", {"version": snapshot.version, "reason": str(error)})
                continue
            self._failed.clear()
            return level, num_bytes

    def forget(self) -> None:
        """The run has gone back: half a copy of a past that was given up is of no use."""
        self._fetcher.forget()

    def unfit(self, snapshot: Snapshot, version: int) -> Refused | BadMessage | None:
        """Why a described copy is not to be had. One asked for by number may come from a disk, and is then as good as
        any up to where the run has last gone back to; the newest one is of the present, or of no use."""
        if snapshot.version > self._shape.total_steps:
            return BadMessage(RejectCode.MALFORMED, "a copy of a step after the last", version=snapshot.version)
        restart = self._footing.restart()
        if snapshot.restart == restart or (version >= 0 and snapshot.version <= restart.version):
            return None
        return Refused(RejectCode.STALE, "a copy from before the run went back", version=snapshot.version)

    def say_failed(self, donor: PeerId, error: SwarmError) -> None:
        """Once per donor and kind of failure until a join succeeds: it is tried again at every heartbeat."""
        self._say({"donor": donor, "reason": str(error)}, donor, type(error), error.facts.get("code"))

    def say_given_up(self, error: SwarmError, words: str = "") -> None:
        """No donor has delivered. Once per reason until a join succeeds."""
        self._say({"reason": f"{words}{error}"}, words, type(error), error.message)

    # ------------------------------------------------------------ inside

    async def _collect(self, stamp: Stamp, finished: Finished, holders: Sequence[PeerId]) -> None:
        wanted = Round(stamp, finished.id.ballot, finished.id, (), (), tuple(holders))
        if await self._exchange.collect_from(wanted, finished.digest, *holders) != finished:
            raise BadMessage(RejectCode.MALFORMED, "not the sum its holders describe", step=stamp.step)

    def _after(self, header: StateHeader, commits: tuple[Commit, ...]) -> StateHeader:
        """Where a replica stands that has applied on these commits of all stages; as Member.applied."""
        chain = next_chain(header.chain, evidence(commits))
        begins_term = (header.version + 1) % self._shape.keeper_term_steps == 0
        return StateHeader(
            header.version + 1, chain, header.chain, chain if begins_term else header.term_chain, header.restart
        )

    def _moved(self, header: StateHeader) -> None:
        self._footing.stand(header)
        self._footing.event("following", {"version": header.version})

    def _say(self, fields: dict[str, object], *known: object) -> None:
        if known not in self._failed:
            self._failed.add(known)
            self._footing.event("join_failed", fields)

    def _say_progress(self, progress: TransferProgress) -> None:
        left = progress.seconds_left
        self._footing.event(
            "fetching",
            {
                "version": progress.version,
                "bytes": progress.done_bytes,
                "total": progress.total_bytes,
                "donors": progress.donors,
                "seconds_left": None if left is None else round(left, 1),
            },
        )
