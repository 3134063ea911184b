"""Members that sum vectors of integers over a grid: real exchanges that call each other directly, on virtual time."""

from __future__ import annotations

import asyncio
import itertools
import random
import struct
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmnet.averaging.butterfly import ExchangeContext
from swarmnet.averaging.exchange import Exchange
from swarmnet.errors import PeerGone
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.messages import PRIME, Answer, Finished, Packed, Part, Round, Stamp
from swarmnet.stage.interfaces import Contribution, Reduced
from swarmnet.step.ledger import Ledger
from swarmnet.step.rounds import RoundBuilder
from swarmnet.testing.doubles import FakeTransport
from swarmnet.testing.virtual_swarm import SimulatedSigner

STAMP = Stamp(3, 0, Chain("00" * 32))
TOKENS = 10


def pack(values: Sequence[int]) -> Packed:
    return Packed("int64", (len(values),), struct.pack(f"<{len(values)}q", *values))


def unpack(packed: Packed) -> list[int]:
    return list(struct.unpack(f"<{packed.shape[0]}q", bytes(packed.data)))


def product(seed: bytes, values: Sequence[int], start: int) -> int:
    """With a vector that the seed draws."""
    return (
        sum(value * random.Random(seed + bytes([at % 256])).randrange(PRIME) for at, value in enumerate(values, start))
        % PRIME
    )


@dataclass
class Work:
    """What all engines have done since `clear`: how many elements were read of whom, and reduced by
    whom, in which hop, which ones."""

    read: Counter[PeerId] = field(default_factory=Counter)
    reduced: dict[int, Counter[int]] = field(default_factory=dict)
    by: dict[int, Counter[PeerId]] = field(default_factory=dict)

    def clear(self) -> None:
        self.read, self.reduced, self.by = Counter(), {}, {}


class Vector:
    """An engine over a list of integers. said, made: what counts as sent, and as reduced, in the round that is open, as
    an engine with error feedback keeps it: by pieces."""

    block, element_bytes, draw, reference = 1, 8.0, (2, 0), b""

    def __init__(self, me: PeerId, values: list[int], phases: tuple[int, ...], private_phases: int, work: Work) -> None:
        self.me, self.values, self.work, self.sum = me, values, work, dict[int, int]()
        self.num_elements, self.phases, self.private_phases = len(values), phases, private_phases

    async def open_round(self, round_id: RoundId) -> None: ...

    async def open_sum(self) -> None:
        self.sum = {}

    async def contribution(self, start: int, stop: int, reference: bytes = b"") -> Packed:
        await asyncio.sleep(0.001)
        self.work.read[self.me] += stop - start
        return pack(self.values[start:stop])

    async def reduce(self, contributions: Sequence[Contribution], start: int, stop: int, *, hop: int) -> Reduced:
        await asyncio.sleep(0.001)
        self.work.reduced.setdefault(hop, Counter()).update(range(start, stop))
        self.work.by.setdefault(hop, Counter())[self.me] += stop - start
        assert all(contribution.num_microbatches > 0 for contribution in contributions)
        peers = [contribution.peer for contribution in contributions]
        assert self.private_phases or peers == sorted(peers), "in the round's order"
        columns = [unpack(contribution.packed) for contribution in contributions]
        return Reduced(pack([sum(column) for column in zip(*columns, strict=True)]))

    async def put(self, start: int, packed: Packed) -> None:
        for place, value in enumerate(unpack(packed), start):
            assert place not in self.sum, "put twice"
            self.sum[place] = value

    async def prove(self, seed: bytes) -> int:
        return product(seed, self.values, 0)

    async def weigh(self, packed: Packed | None, start: int, stop: int, seed: bytes) -> int:
        return product(seed, [self.sum[at] for at in range(start, stop)] if packed is None else unpack(packed), start)

    async def seal(self) -> tuple[bytes, float]:
        assert sorted(self.sum) == list(range(self.num_elements))
        first = sum(self.phases[: self.private_phases])
        return str([self.sum[place] for place in range(first, self.num_elements)]).encode()[:32], 1.0

    async def finished_sum(self, start: int, stop: int) -> Packed:
        return pack([self.sum[place] for place in range(start, stop)])


class Members:
    """`num_members` replicas of which each has counted one microbatch, of its own number. A leader's own `RoundBuilder`
    makes their rounds. signs: they check reducers. dead: they answer nothing any more."""

    def __init__(
        self,
        num_members: int,
        num_elements: int,
        *,
        group_size: int = 16,
        seed: int = 0,
        breaks: float = 0.0,
        phases: tuple[int, ...] = (),
        private_phases: int = 0,
        signs: bool = False,
    ) -> None:
        self.peers = tuple(PeerId(f"p{place:03}") for place in range(num_members))
        self.rng, self.breaks, self.work = random.Random(seed), breaks, Work()
        self.transport = FakeTransport(self.serve)
        self.engines = {
            peer: Vector(
                peer,
                [(place + 1) * (element + 1) for element in range(num_elements)],
                phases or (num_elements,),
                private_phases,
                self.work,
            )
            for place, peer in enumerate(self.peers)
        }
        self.events: list[tuple[PeerId, str, dict[str, object]]] = []
        engines: dict[PeerId, Any] = dict(self.engines)
        self.exchanges = {
            peer: Exchange(
                ExchangeContext(
                    peer,
                    engines[peer],
                    self.transport,
                    num_tokens=TOKENS,
                    group_size=group_size,
                    signer=SimulatedSigner(peer) if signs else None,
                    on_event=lambda event, fields, peer=peer: self.events.append((peer, event, fields)),
                )
            )
            for peer in self.peers
        }
        self.ballot = Ballot(1, self.peers[0])
        self.opening = RoundBuilder(STAMP, self.ballot, group_size, itertools.count())
        self.ledger = Ledger(num_members)
        self.held = {peer: frozenset({place}) for place, peer in enumerate(self.peers)}
        self.generation = dict.fromkeys(self.peers, Generation(1, 0))
        for peer, indexes in self.held.items():
            self.ledger.enter((peer, self.generation[peer]), indexes)
        self.dead: set[PeerId] = set()
        self.on_part: Callable[[PeerId, Part], None] = lambda peer, part: None

    @property
    def alive(self) -> list[PeerId]:
        return [peer for peer in self.peers if peer not in self.dead]

    # ------------------------------------------------------------ what a leader does

    def round(self) -> Round:
        return self.opening.open(self.alive, self.ledger)

    def lose(self, *lost: PeerId) -> None:
        """They are gone, and what they had counted is executed again where the leader would have it."""
        for peer in lost:
            self.dead.add(peer)
            self.ledger.evict((peer, self.generation[peer]))
        for index in self.ledger.free():
            peer = min(self.alive, key=lambda p: (len(self.ledger.of(p)), p))
            self.ledger.claim((peer, self.generation[peer]), index)
            self.held[peer] |= {index}
            element = self.engines[self.peers[index]].values
            self.engines[peer].values = [a + (index + 1) * (at + 1) for at, a in enumerate(self.engines[peer].values)]
            assert len(element) == len(self.engines[peer].values)

    def discard(self, peer: PeerId) -> None:
        """The same microbatches under the next generation, and, to see whether it counts, with other values."""
        self.ledger.evict((peer, self.generation[peer]))
        self.generation[peer] = self.generation[peer].next()
        self.ledger.enter((peer, self.generation[peer]), self.held[peer])
        self.engines[peer].values = [value + 1000 for value in self.engines[peer].values]

    # ------------------------------------------------------------ rounds

    async def serve(self, peer: PeerId, request: Part) -> AsyncGenerator[Answer, None]:
        """What arrives of a peer's answers, for as long as the line holds."""
        self.on_part(peer, request)
        if peer in self.dead:
            raise PeerGone("dead", peer=peer)
        async for answer in self.exchanges[peer].serve(request):
            await asyncio.sleep(self.rng.random() / 100)
            if peer in self.dead or self.rng.random() < self.breaks:
                raise PeerGone("broken", peer=peer)
            yield answer

    async def sum(self, current: Round) -> dict[PeerId, Finished]:
        """All of the living take part until they have it."""
        async with asyncio.timeout(3600.0), asyncio.TaskGroup() as group:
            tasks = {peer: group.create_task(self.take_part(peer, current)) for peer in self.alive}
        return {peer: task.result() for peer, task in tasks.items()}

    async def take_part(self, peer: PeerId, current: Round) -> Finished:
        return await self.exchanges[peer].sum(current, dict.fromkeys(self.held[peer], (1.0, TOKENS)))

    async def give_up(self, current: Round, seconds: float, deaf: Collection[PeerId] = ()) -> bool:
        """The living take part for so long, but for those that have not heard of it. Did nobody get it whole?"""
        tasks = [asyncio.ensure_future(self.take_part(peer, current)) for peer in self.alive if peer not in deaf]
        await asyncio.sleep(seconds)
        nobody = not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in self.alive:
            self.exchanges[peer].close()
        return nobody

    def check(self, told: Mapping[PeerId, Finished]) -> None:
        """Everybody has the whole sum of all that is held, and says the same of it."""
        size = self.engines[self.peers[0]].num_elements
        whole = [sum(self.engines[peer].values[at] for peer in self.alive) for at in range(size)]
        for peer in self.alive:
            assert [self.engines[peer].sum[at] for at in range(size)] == whole
        assert len(set(told.values())) == 1
        assert next(iter(told.values())).num_tokens == len(self.peers) * TOKENS
