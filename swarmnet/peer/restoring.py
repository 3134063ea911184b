"""Give a replica the state of its mates: fetch a copy, follow their trail until level, say how far it is.

Wires `state.fetch`, `state.catch_up` and the exchange of sums to one replica's engine and step machine. It decides
neither when state is needed nor who might have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarmnet.averaging.exchange import Exchange
from swarmnet.errors import BadMessage, RejectCode, SwarmError
from swarmnet.ids import PeerId, next_chain
from swarmnet.messages import Commit, Finished, Round, Stamp
from swarmnet.net.transport import Transport
from swarmnet.stage.engine import Engine
from swarmnet.state.catch_up import CatchUp, Level, TrailEnds
from swarmnet.state.copies import Seal
from swarmnet.state.cut import Cut
from swarmnet.state.fetch import Donors, Fetcher, Progress
from swarmnet.step.barrier import evidence

_BYTES_PER_ELEMENT, _NAMES_BYTES = 16, 64 << 20
"""No snapshot is larger: a weight and two moments of 4 bytes each take 12, names and shapes a few MiB."""

Event = Callable[[str, dict[str, object]], None]


class Restoring:
    """Brings one (peer, stage) to where its mates are.

    term_steps: steps of a keeper's term. stand(cut): the engine holds this version from now on. event(name, fields):
    `fetching`, `following` and `fetching_again` say how far it is, `join_failed` who did not deliver.
    """

    def __init__(
        self, transport: Transport, engine: Engine, exchange: Exchange, seal: Seal, *, stage: int, num_stages: int,
        term_steps: int, stand: Callable[[Cut], None], event: Event,
    ) -> None:
        self._engine, self._exchange, self._term_steps = engine, exchange, term_steps
        self._stand, self._event = stand, event
        self._fetcher = Fetcher(
            transport, stage, seal, max_bytes=_BYTES_PER_ELEMENT * engine.num_elements + _NAMES_BYTES,
            failed=self._say_failed, progress=self._say_progress,
        )
        self._catch_up = CatchUp(
            transport, engine, stage, num_stages, collect=self._collect, after=self._after, moved=self._moved,
            failed=self._say_failed,
        )
        self._failed: set[tuple[PeerId, type[SwarmError], object]] = set()

    async def run(self, donors: Donors, *, version: int = -1) -> tuple[Level, int]:
        """Fetch and follow; returns where the engine stands then, and the bytes of the copy.

        donors() is asked again and again. Raises NoReplica if they hand nothing over, or what the last of them raised;
        the engine may then stand at an older version (`stand` was told).
        """
        while True:
            snapshot, data = await self._fetcher.fetch(donors, version=version)
            num_bytes = len(data)
            try:
                await self._engine.restore(data, version=snapshot.version)
            except BadMessage as error:
                self._fetcher.useless(error)
                continue
            del data
            cut = Cut(snapshot.version, snapshot.chain, snapshot.term_chain, snapshot.restart)
            self._stand(cut)
            try:
                level = await self._catch_up.run(cut, donors)
            except TrailEnds as error:
                self._event("fetching_again", {"version": snapshot.version, "reason": str(error)})
                continue
            self._failed.clear()
            return level, num_bytes

    async def _collect(self, stamp: Stamp, finished: Finished, holders: Sequence[PeerId]) -> None:
        wanted = Round(stamp, finished.id.ballot, finished.id, (), (), tuple(holders))
        if await self._exchange.collect_from(wanted, *holders) != finished:
            raise BadMessage(RejectCode.MALFORMED, "not the sum its holders describe", step=stamp.step)

    def _after(self, cut: Cut, commits: tuple[Commit, ...]) -> Cut:
        """Where a replica stands that has applied on these commits of all stages; as Member.applied."""
        chain = next_chain(cut.chain, evidence(commits))
        begins_term = (cut.version + 1) % self._term_steps == 0
        return Cut(cut.version + 1, chain, chain if begins_term else cut.term_chain, cut.restart)

    def _moved(self, cut: Cut) -> None:
        self._stand(cut)
        self._event("following", {"version": cut.version})

    def _say_failed(self, donor: PeerId, error: SwarmError) -> None:
        """Once per donor and kind of failure until a join succeeds: it is tried again at every heartbeat."""
        known = donor, type(error), error.facts.get("code")
        if known not in self._failed:
            self._failed.add(known)
            self._event("join_failed", {"donor": donor, "reason": str(error)})

    def _say_progress(self, progress: Progress) -> None:
        left = progress.seconds_left
        self._event("fetching", {
            "version": progress.version, "bytes": progress.done_bytes, "total": progress.total_bytes,
            "donors": progress.donors, "seconds_left": None if left is None else round(left, 1),
        })
