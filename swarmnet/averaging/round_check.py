"""Check reducers: what the members of a round sign, and how each member checks the aggregate that it received.

In an audited run the sender of a part of a vector signs what it sent together with its last chunk: a contributor to the
reducer, a reducer to each member that asks (`sign_part`). When a member holds the complete aggregate, it and all others
draw the same vector from the aggregate's digest, and every contributor signs a commitment (the message `Pledge`): the
product of its contribution with that vector. The products must add up to the aggregate's own product (`sums.linear`).
Then the aggregate holds contributions and nothing else, even if all reducers are Byzantine.

If something does not fit, each member determines the peer at fault and reports it to the leader (`averaging.watch`):

| what does not fit | peer at fault |
|---|---|
| two members hold different aggregates, and a reducer signed different parts to them | the reducer |
| different aggregates, and the same parts are signed | the member that claims to hold another aggregate |
| products; what a contributor sends this member now is not what it signed to a reducer | the contributor |
| products; it is, and does not add up to what the reducer sent this member | the reducer |
| products; all parts add up, and a contribution has another product than its commitment | the contributor |
| one contributor signed two commitments | the contributor |

A contributor and a reducer that collude can put a false contribution into the aggregate, as the contributor can alone:
its commitment then contradicts the gradient that it should have computed, which audits detect (docs/trust.md).

In a grid a part passes through several reducers. Each product is checked there in the same way. For a wrong one each
member blames the member of its row that sent it, which may have received it from another peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from blake3 import blake3

from swarmnet.averaging.grid import Group, grid_of
from swarmnet.averaging.parts import Range
from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, Refused, RejectCode
from swarmnet.ids import PeerId, RoundId, Signer
from swarmnet.messages import (
    PRIME,
    Answer,
    Busy,
    Packed,
    Part,
    PartData,
    Pledge,
    Rejected,
    Round,
    Running,
    Stamp,
    contributors_of,
)
from swarmnet.pledge import shares_of, vector_seed
from swarmnet.statement import statement
from swarmnet.transport import ask

if TYPE_CHECKING:
    from swarmnet.averaging.butterfly import Butterfly, ExchangeContext

PAUSE_S = 0.05
"""Pause before a member is asked again for a stream that broke, or for its commitments."""

_ALONE_S = 2.0
"""A member that was asked and does not get its own aggregate for so long signs for the asker's aggregate, because one
slow link must not delay the others."""

_MOST_DIGESTS = 4
"""Aggregates for which one member signs commitments in a round."""

_MOST_SAID = 1 << 12
"""Commitments that one member signs in a step: with an older one forgotten, it could contradict itself."""

Pledges = tuple[Pledge, ...]
Said = dict[tuple[RoundId, bytes], Pledge]
"""What one member has committed to in a step, by round and aggregate; without signatures."""

Contradiction = Callable[[Pledge, Pledge], None]
NOTHING = bytes(32)


# ---------------------------------------------------------------- what is signed of a part


def chunk_digest(packed: Packed) -> bytes:
    """Of a chunk as it travels."""
    return blake3(packed.data).digest()


def part_key(kind: Literal["contribution", "reduced"], current: Round, group: Group, reducer: PeerId) -> bytes:
    """32 bytes that name the part of a group's aggregate that a commitment of `sign_part` is about."""
    said = [(peer, of.incarnation, of.number, sorted(indexes)) for peer, of, indexes in current.contributions]
    words = repr((kind, group.hop, group.span, said, reducer, dict(group.chunks)[reducer]))
    return hashlib.sha256(b"swarmnet part 1\0" + words.encode()).digest()


def sign_part(signer: Signer, me: PeerId, current: Round, key: bytes, digests: Iterable[bytes]) -> Pledge:
    """Sign the chunks of a part that were sent. `shares` shows that it is no commitment to an aggregate."""
    digest = _of_part(key, digests)
    said = Pledge(current.stamp, current.id, digest, key, me, 0, NOTHING)
    return replace(said, signature=signer.sign(statement(said)))


def signed_part(signer: Signer, pledges: Iterable[Pledge], stamp: Stamp, peer: PeerId, key: bytes) -> Pledge | None:
    """Of these commitments, the one that the peer signed for that part."""
    for pledge in pledges:
        if (pledge.stamp, pledge.peer, pledge.shares) == (stamp, peer, key):
            return pledge if signer.verify(peer, statement(pledge), pledge.signature) else None
    return None


def says(pledge: Pledge | None, digests: Iterable[bytes]) -> bool:
    """Does it sign chunks with these digests?"""
    return pledge is not None and pledge.digest == _of_part(pledge.shares, digests)


def _of_part(key: bytes, digests: Iterable[bytes]) -> bytes:
    # Parts may be equal, such as zeros, and two commitments to one digest would prove a fault of their signer.
    return hashlib.sha256(key + b"".join(digests)).digest()


# ---------------------------------------------------------------- the check of a round


class RoundCheck:
    """One member's check of one round. `run` it once the aggregate is sealed; `serve` others from the beginning.

    work_root: the root of this peer's computation records. said: what it signed in this step, in earlier checks, too.
    """

    def __init__(
        self,
        context: ExchangeContext,
        signer: Signer,
        current: Round,
        hops: Sequence[Butterfly],
        work_root: bytes,
        said: Said,
    ) -> None:
        self.round, self._hops, self._signer, self._work_root = current, hops, signer, work_root
        self._context, self._me = context, context.me
        self._rows = grid_of(current).rows
        self._contributors = contributors_of(current)
        self._lives = {peer: of.incarnation for peer, of, _ in current.contributions}
        self._shares = shares_of(current.contributions, current.discarded)
        self._digest = b""  # of the whole sum, once it is here
        self._product = 0  # of the whole sum
        self._heard: dict[PeerId, Pledge] = {}  # for this member's aggregate
        self._second: dict[PeerId, Pledge] = {}  # where a contributor has signed two for it
        self._others: dict[PeerId, Pledges] = {}  # what members answered that hold another aggregate
        self._said, self._mine = said, dict[bytes, Pledge]()
        self._changed = asyncio.Event()
        self._compared: set[PeerId] = set()
        self._blamed: set[PeerId] = set()
        self.closed = self.passed = False

    @property
    def commitments(self) -> Pledges:
        """Of all contributors, once the check has passed."""
        return tuple(self._heard[peer] for peer in sorted(self._heard))

    def close(self) -> None:
        """The round is over or abandoned. What has passed is still served."""
        self.closed = True
        self._change()

    async def run(self, digest: bytes) -> None:
        """Return once the commitments of all contributors add up to this aggregate. Cancel to abandon.

        Raises Refused: they do not; the peer at fault has been reported to the watch.
        """
        sums, stamp = self._context.sums, self.round.stamp
        self._digest, self._seed = digest, vector_seed(stamp, self.round.id, digest)
        if self._me in self._contributors:
            self._heard[self._me] = await self._sign(digest)
        self._change()
        async with asyncio.TaskGroup() as group:
            # Others wait for this member's commitment, but not for the result of its check.
            weighing = group.create_task(sums.weigh(None, 0, sums.num_elements, self._seed))
            tasks = [group.create_task(self._gather(*way)) for way in self._ways()]
            while not self._contributors <= self._heard.keys() | self._others.keys():
                await self._changed.wait()
            for task in tasks:
                task.cancel()
        self._product = weighing.result()
        if odd := [peer for peer, pledge in self._heard.items() if pledge.shares != self._shares]:
            for peer in odd:
                self._blame(peer, "pledge_lied", why="another round under the same number")
            raise Refused(RejectCode.MALFORMED, "members speak of different rounds")
        if self._others:
            self._settle_digests()
        elif not self._add_up():
            # A contributor may have signed one commitment to this member and another one to others, which send it on.
            await self._ask_again()
            if not self._add_up():
                await self._adjudicate()
        self.passed = True

    async def serve(self, request: Part, caller: PeerId | None) -> AsyncGenerator[Answer, None]:
        """Answer one `Part` call for commitments."""
        if request.start < request.stop:
            hop = next((hop for hop in self._hops if hop.is_of(request)), None)
            yield PartData(pledges=tuple(hop.given.values()) if hop is not None else ())
            return
        loop = asyncio.get_running_loop()
        asked = loop.time()
        while not self._ready(request):
            if self.closed and not self.passed:
                yield Rejected(RejectCode.NOT_READY, "that round was abandoned")
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._context.running_s):
                    await self._changed.wait()
            if not self._ready(request):
                yield Running()
            if not self._digest and self._may_sign(request) and loop.time() - asked > _ALONE_S:
                yield PartData(pledges=(await self._sign(request.reference),))
                return
        told = self.commitments
        if request.reference != self._digest:
            if caller is not None:
                await self._compare_with(caller)
            told += tuple(self._hops[0].signed.values())
        yield PartData(pledges=told)

    # ------------------------------------------------------------ inside

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _ready(self, request: Part) -> bool:
        if not self._digest or (self._me in self._contributors and self._me not in self._heard):
            return False
        mine = next((row for row in self._rows if self._me in row), ())
        return not request.hop or self._heard.keys() >= self._contributors & set(mine)

    def _may_sign(self, request: Part) -> bool:
        known = request.reference in self._mine or len(self._mine) < _MOST_DIGESTS
        return self._me in self._contributors and not request.hop and bool(request.reference) and known

    async def _sign(self, digest: bytes) -> Pledge:
        """This member's commitment to that aggregate. Raises Refused(NOT_READY): the round is over."""
        if digest not in self._mine:
            current, life = self.round, self._lives[self._me]
            # Another process of this peer made that contribution; a restarted peer signs nothing for the previous one.
            if self._context.incarnation not in (None, life):
                raise Refused(RejectCode.NOT_READY, "another process of mine has contributed to that round")
            product = await self._context.sums.prove(vector_seed(current.stamp, current.id, digest))
            # If the accumulator was discarded meanwhile, a signed product would prove a fault of a correct replica.
            if self.closed:
                raise Refused(RejectCode.NOT_READY, "that round was abandoned")
            words = current.stamp, current.id, digest, self._shares, self._me, product, self._work_root
            said = Pledge(*words, incarnation=life)
            # A leader that opens a round twice, with other contributions, would make this peer contradict itself.
            if len(self._said) >= _MOST_SAID or self._said.setdefault((current.id, digest), said) != said:
                raise Refused(RejectCode.NOT_READY, "something else was committed to in a round of that number")
            self._mine[digest] = replace(said, signature=self._signer.sign(statement(said)))
        return self._mine[digest]

    def _ways(self) -> Iterator[tuple[Sequence[PeerId], Sequence[PeerId], bool]]:
        """How the commitments of all contributors are collected: of each in this member's row from itself; if its link
        to this member is cut, or it has died since, from another member that has received it; of another row from its
        members.

        Yields (peers to ask in turn, contributors, whether a peer answers once it has those of its whole row).
        """
        reducers = {reducer for hop in self._hops for reducer, _ in hop.group.chunks}
        place = self.round.receivers.index(self._me) if self._me in self.round.receivers else 0
        others = (*self.round.receivers[place:], *self.round.receivers[:place])
        for row in self._rows:
            wanted = [peer for peer in row if peer in self._contributors and peer != self._me]
            if self._me not in row and len(self._rows) > 1:
                turn = place % len(row)
                yield (*row[turn:], *row[:turn]), wanted, True
                continue
            for peer in wanted:
                replicas = [replica for replica in others if replica not in (peer, self._me)]
                yield (peer, *replicas), [peer], False
                # Some cannot call a peer that reduces nothing, and a call into silence takes longer than a step.
                if peer not in reducers and (summing := [replica for replica in replicas if replica in reducers]):
                    yield summing, [peer], True
        # Contributors that came after the grid was opened, or are in no row of it.
        for peer in self._contributors - {peer for row in self._rows for peer in row} - {self._me}:
            yield (peer,), [peer], False

    async def _gather(self, peers: Sequence[PeerId], wanted: Sequence[PeerId], whole_row: bool) -> None:
        """Collect the commitments of these contributors, see `_ways`."""
        loop, asked = asyncio.get_running_loop(), itertools.cycle(peers)
        request = self._request(hop=int(whole_row))
        while missing := [peer for peer in wanted if peer not in self._heard and peer not in self._others]:
            peer = next(asked)
            with self._context.watch.stream(peer, owes=False, now=loop.time()) as wait:
                with contextlib.suppress(PeerGone, PeerTimeout, BadMessage, Refused):
                    match await ask(self._context.transport, peer, request):
                        case PartData() as data:
                            for pledge in data.pledges:
                                self._hear(pledge)
                            if peer in missing and peer not in self._heard and self._is_other(peer, data.pledges):
                                self._others[peer] = data.pledges
                                self._change()
                        case Busy():
                            wait.excused()
                if all(peer in self._heard or peer in self._others for peer in missing):
                    return
                wait.broke(now=loop.time())
                await asyncio.sleep(PAUSE_S)

    def _request(self, start: int = 0, stop: int = 0, *, hop: int = 0) -> Part:
        return Part(self.round.stamp, self.round.id, "pledges", start, stop, hop, self._digest)

    async def _told(self, peer: PeerId, request: Part, limit_s: float = 3600.0) -> Pledges:
        """What that peer answers; nothing if it does not."""
        with contextlib.suppress(PeerGone, PeerTimeout, BadMessage):
            answer = await ask(self._context.transport, peer, request, limit_s=limit_s)
            if isinstance(answer, PartData):
                return answer.pledges
        return ()

    def _hear(self, pledge: Pledge) -> None:
        """Remember it, if it is signed by a contributor and about this member's aggregate."""
        of = pledge.stamp, pledge.id, pledge.digest
        if of != (self.round.stamp, self.round.id, self._digest) or pledge.peer not in self._contributors:
            return
        if pledge.incarnation != self._lives[pledge.peer]:
            return
        known = self._heard.get(pledge.peer)
        if known is not None and statement(known) == statement(pledge):
            return
        if not self._signer.verify(pledge.peer, statement(pledge), pledge.signature):
            return
        if known is None:
            self._heard[pledge.peer] = pledge
            self._change()
        elif pledge.peer not in self._second:
            self._second[pledge.peer] = pledge
            self._context.on_contradiction(known, pledge)
            self._blame(pledge.peer, "pledge_lied", why="two pledges for one sum")

    def _add_up(self) -> bool:
        """Do the products? If a contributor signed two commitments, take the one with which they do."""
        for peer, pledge in [*self._heard.items()]:
            others = sum(each.product for of, each in self._heard.items() if of != peer)
            for known in dict.fromkeys((pledge, self._second.get(peer, pledge))):
                if (others + known.product) % PRIME == self._product:
                    self._heard[peer] = known
                    return True
            if not self._second:
                break
        return False

    async def _ask_again(self) -> None:
        others = set(self.round.receivers) - {self._me}
        for told in await asyncio.gather(*(self._told(peer, self._request(), _ALONE_S) for peer in others)):
            for pledge in told:
                self._hear(pledge)

    def _is_other(self, peer: PeerId, pledges: Iterable[Pledge]) -> bool:
        """Has that contributor signed a commitment to another aggregate of this round?"""
        return any(
            (pledge.peer, pledge.stamp, pledge.id) == (peer, self.round.stamp, self.round.id)
            and pledge.digest != self._digest
            and self._signer.verify(peer, statement(pledge), pledge.signature)
            for pledge in pledges
        )

    def _blame(self, peer: PeerId, event: str, **facts: object) -> None:
        self._context.watch.refused(peer)
        if peer not in self._blamed:
            self._context.on_event(event, {"step": self.round.stamp.step, "peer": peer, **facts})
        self._blamed.add(peer)

    def _settle_digests(self) -> None:
        """Others hold another aggregate than this member: a reducer or a member has sent two."""
        if len(self._rows) > 1:
            raise Refused(RejectCode.NOT_READY, "members hold different sums")
        guilty = set[PeerId]().union(*(self._guilty_of(peer, told) for peer, told in self._others.items()))
        for peer in sorted(guilty):
            self._blame(peer, "pledge_lied" if peer in self._others else "reducer_lied", why="another sum")
        raise Refused(RejectCode.MALFORMED, "members hold different sums")

    def _guilty_of(self, peer: PeerId, told: Pledges) -> set[PeerId]:
        """That peer holds another sum, and has told what reducers signed to it: who has signed something else to me;
        itself, if it cannot show what all have signed, or if all is the same."""
        hop, found, same = self._hops[0], set[PeerId](), {peer}
        for reducer, mine in hop.signed.items():
            # A reducer does not fetch its own part from itself.
            if reducer == peer:
                continue
            key = part_key("reduced", self.round, hop.group, reducer)
            theirs = signed_part(self._signer, told, self.round.stamp, reducer, key)
            if theirs is None:
                found.add(peer)
            elif theirs.digest != mine.digest:
                found.add(reducer)
        return found or same

    async def _compare_with(self, caller: PeerId) -> None:
        """The caller asks for commitments to another aggregate than this member's. If a reducer signed two different
        parts to the two, this member reports it."""
        if len(self._rows) > 1 or caller not in self.round.receivers or caller in self._compared:
            return
        self._compared.add(caller)
        told = await self._told(caller, self._request(), _ALONE_S)
        if told and not self.closed:
            for peer in sorted(self._guilty_of(caller, told) - {caller}):
                self._blame(peer, "reducer_lied", why="another sum")

    async def _adjudicate(self) -> None:
        """The products do not add up: check every part again, as its contributors send it to this member."""
        hop, sums, seed = self._hops[0], self._context.sums, self._seed
        products = dict.fromkeys(self._contributors, 0)
        guilty = False
        for reducer, cut in hop.group.chunks:
            digests: dict[PeerId, list[bytes]] = {peer: [] for peer in self._contributors}
            own, total = dict.fromkeys(self._contributors, 0), 0
            async with contextlib.AsyncExitStack() as stack:
                streams = {}
                for peer in sorted(self._contributors):
                    streams[peer] = await stack.enter_async_context(contextlib.aclosing(hop.contribution_of(peer, cut)))
                for chunk in cut:
                    for peer, stream in streams.items():
                        packed = await anext(stream)
                        digests[peer].append(chunk_digest(packed))
                        with hop.noted(peer):
                            own[peer] += await sums.weigh(packed, *chunk, seed)
                    total += await sums.weigh(None, *chunk, seed)
            for peer, product in own.items():
                products[peer] += product
            if (sum(own.values()) - total) % PRIME:
                guilty = True
                for peer in await self._who_made(reducer, cut, digests):
                    part = [cut[0][0], cut[-1][1]]
                    self._blame(
                        peer, "reducer_lied" if peer == reducer else "pledge_lied", why="a wrong sum", part=part
                    )
        for peer, pledge in sorted(self._heard.items()):
            if pledge.product != products[peer] % PRIME:
                guilty = True
                self._blame(peer, "pledge_lied", why="another product than its contribution has")
        code = RejectCode.MALFORMED if guilty else RejectCode.NOT_READY
        raise Refused(code, "the sum is not that of its contributions")

    async def _who_made(
        self, reducer: PeerId, cut: Sequence[Range], digests: Mapping[PeerId, Sequence[bytes]]
    ) -> set[PeerId]:
        """A part is not the sum of what its contributors hand me: those of them that have signed something else to its
        reducer; else the reducer."""
        hop = self._hops[0]
        if len(self._rows) > 1:
            return {reducer}
        if reducer == self._me:
            told = tuple(hop.given.values())
        else:
            told = await self._told(reducer, self._request(cut[0][0], cut[-1][1]))
        guilty: set[PeerId] = set()
        key = part_key("contribution", self.round, hop.group, reducer)
        for peer in self._contributors - {reducer}:
            signed = signed_part(self._signer, told, self.round.stamp, peer, key)
            if signed is None:
                return {reducer}  # it must not take a part that its contributor has not signed
            if not says(signed, digests[peer]):
                guilty.add(peer)
        return guilty or {reducer}
