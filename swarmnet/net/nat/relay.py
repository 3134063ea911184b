"""The relay's side: reservations for unreachable peers, and circuits to them (docs/nat.md).

Any member is one, within caps. It cannot read what it passes on, and learns who speaks to whom and how much. It
answers those who have greeted: members of the run, who are admitted. What it passes on waits its turn for a share of
this peer's line, which the callers' homes share.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable

import grpc

from swarmnet import telemetry
from swarmnet.clock import loop_time
from swarmnet.errors import BadMessage, Coded, RejectCode, SwarmError
from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Busy, Rejected
from swarmnet.net.address import endpoint_of, home_of
from swarmnet.net.greeting import Greeter
from swarmnet.net.limits import RELAY_ASKS, RELAY_SUMMONS
from swarmnet.net.nat.circuits import Arrivals, CallEnd, Handler, for_members, hear, splice
from swarmnet.net.nat.relay_book import RelayBook, RelayCaps
from swarmnet.net.traffic import Shares, Traffic
from swarmnet.pacing import Budgets, Rate
from swarmnet.wire.convert import Ping, Pong
from swarmnet.wire.relay import Arrive, Connect, Reply, Reserve, Reserved, Summon, read_ask, write_reply

RESERVE, CONNECT, ARRIVE = (f"/swarmnet.v1.Relay/{name}" for name in ("Reserve", "Connect", "Arrive"))

PING_S, SILENCE_S = 2.5, 8.0
"""The keepalive interval of a peer with a reservation, and after how much silence either side takes the other for gone:
a link that fails silently is noticed."""

COME_S = 6.0
"""A caller waits so long for the peer to come."""

_FIRST_WORD_S = 5.0
_AGAIN_S = 2.0
_LOOK_S = 5.0
"""How often a circuit is looked at: is it idle, is one of its ends banned?"""

log = telemetry.get(__name__)


class Relay:
    """One transport's. welcome(peer): has it greeted, and is it admitted? bytes_per_s(): what may be passed on, in all.
    What is passed on counts in `traffic`."""

    def __init__(
        self,
        me: PeerId,
        caps: RelayCaps,
        arrivals: Arrivals,
        greeter: Greeter,
        welcome: Callable[[PeerId], bool],
        traffic: Traffic,
        bytes_per_s: Callable[[], float],
    ) -> None:
        self.me, self._arrivals, self._bytes_per_s = me, arrivals, bytes_per_s
        self._unwelcome = greeter.unwelcome
        self.book = RelayBook(caps)
        self._summons: dict[PeerId, asyncio.Queue[Reply | None]] = {}
        """Messages to a peer with a reservation; None ends its queue."""
        self._asks, self._arrivals_of = Budgets[PeerId](RELAY_ASKS), Budgets[PeerId](RELAY_SUMMONS)
        self._summoned, self._summoned_from = Budgets[PeerId](RELAY_SUMMONS), Budgets[tuple[PeerId, str]](RELAY_ASKS)
        # After a stall many come together.
        self._pings = Budgets[PeerId](Rate(2 / PING_S, burst_s=SILENCE_S))
        self._shares, self._traffic = Shares(bytes_per_s), traffic
        self.open = True
        self.methods: dict[str, Handler] = {
            method: for_members(welcome, write_reply, functools.partial(self._answer, kind))
            for method, kind in {RESERVE: Reserve, CONNECT: Connect, ARRIVE: Arrive}.items()
        }

    def close(self) -> None:
        """This peer itself is unreachable now: it refuses new reservations and ends those that it has."""
        self.open = False
        for waiting in self._summons.values():
            waiting.put_nowait(None)

    # ------------------------------------------------------------ answering

    async def _answer(self, expected: type, caller: PeerId, end: CallEnd, context: grpc.aio.ServicerContext) -> None:
        home = home_of(endpoint_of(context.peer())[0])
        try:
            # Others have asked for an arrival.
            budgets = self._arrivals_of if expected is Arrive else self._asks
            if (pause_s := budgets.of(caller).ask(loop_time())) > 0:
                await _say(end, Busy(pause_s, -1))
                return
            match ask := await hear(end, read_ask, _FIRST_WORD_S):
                case Reserve() if expected is Reserve:
                    await self._reserve(caller, end, home)
                case Connect() if expected is Connect:
                    await self._connect(caller, ask, end, home)
                case Arrive() if expected is Arrive:
                    await self._arrive(caller, ask, end)
                case _:
                    raise BadMessage(RejectCode.MALFORMED, "the request belongs to another method")
        except Coded as error:
            await _say(end, Rejected(error.code, error.reason))

    async def _reserve(self, peer: PeerId, end: CallEnd, home: str) -> None:
        reason = self.book.reserve(peer, home) if self.open else "this relay is itself unreachable"
        if reason:
            await _say(end, Rejected(RejectCode.NOT_SERVED, reason))
            return
        # It has come again: the line of its last reservation is dead.
        if (before := self._summons.get(peer)) is not None:
            before.put_nowait(None)
        self._summons[peer] = saying = asyncio.Queue[Reply | None]()
        log.info("relays_for", peer=peer, places=len(self.book.places))
        saying.put_nowait(Reserved(round(self._bytes_per_s()), SILENCE_S))
        hearing = asyncio.create_task(self._hear(peer, end, saying))
        try:
            while (reply := await saying.get()) is not None:
                await _say(end, reply)
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
            if self._summons.get(peer) is saying:
                del self._summons[peer]
                self.book.leave(peer)
                log.info("relays_no_more_for", peer=peer, places=len(self.book.places))

    async def _hear(self, peer: PeerId, end: CallEnd, saying: asyncio.Queue[Reply | None]) -> None:
        """Answer pings; whatever else comes, or silence, ends the reservation, and so does a ban."""
        with contextlib.suppress(SwarmError, TimeoutError):
            while True:
                ask = await hear(end, read_ask, SILENCE_S)
                # It says more than that it is there.
                if not isinstance(ask, Ping) or self._pings.of(peer).ask(loop_time()) > 0:
                    break
                if self._unwelcome(peer):
                    break
                saying.put_nowait(Pong(ask.nonce))
        saying.put_nowait(None)

    async def _connect(self, caller: PeerId, ask: Connect, end: CallEnd, home: str) -> None:
        reason = self.book.call(caller, ask.peer, ask.id, loop_time(), home=home)
        if reason:
            await _say(end, Rejected(RejectCode.NOT_SERVED, reason))
            return
        try:
            if (pause_s := self.request_connect_back(caller, ask.peer, ask.id, reverse=ask.reverse, home=home)) > 0:
                await _say(end, Busy(pause_s, -1))
                return
            # The rest is between the two of them.
            if ask.reverse:
                await _say(end, Accepted())
                return
            with self._arrivals.expect(ask.peer, ask.id) as coming:
                async with asyncio.timeout(COME_S):
                    far = await coming
                if self.book.arrive(ask.peer, ask.id, loop_time()):
                    await _say(end, Accepted())
                    await self._join(caller, ask, home, end, far)
        finally:
            self.book.end(ask.peer, ask.id)

    def request_connect_back(
        self, caller: PeerId, peer: PeerId, ident: bytes, *, reverse: bool, home: str = ""
    ) -> float:
        """Ask a peer with a reservation to connect back. Returns 0, or the seconds until it may be asked again.

        home: where the caller calls from; identities cost nothing. "": this machine.
        """
        if peer not in self._summons:
            return _AGAIN_S
        now = loop_time()
        pause_s = self._summoned_from.of((peer, home)).ask(now) if home else 0.0
        if (pause_s := pause_s or self._summoned.of(peer).ask(now)) > 0:
            return pause_s
        self._summons[peer].put_nowait(Summon(caller, ident, reverse))
        return 0.0

    async def _arrive(self, peer: PeerId, ask: Arrive, end: CallEnd) -> None:
        if ask.full:
            self._arrivals.refuse(peer, ask.id)
            await _say(end, Accepted())
            return
        # Said before anything is passed on: the first byte must not overtake it.
        await _say(end, Accepted())
        if not self._arrivals.come(peer, ask.id, end):
            return
        try:
            await end.over.wait()
        finally:
            end.over.set()

    async def _join(self, caller: PeerId, ask: Connect, home: str, near: CallEnd, far: CallEnd) -> None:
        async def watch() -> None:
            while not (self._unwelcome(caller) or self._unwelcome(ask.peer)):
                await asyncio.sleep(_LOOK_S)
                if self.book.idle(ask.peer, ask.id, loop_time()):
                    break
            near.over.set()

        async def turn(num_bytes: int) -> None:
            self.book.carried(ask.peer, ask.id, num_bytes)
            await self._shares.turn(home, num_bytes)
            # Tensors of this peer's own make up for it.
            self._traffic.down.spend(num_bytes)
            self._traffic.up.spend(num_bytes)

        watching = asyncio.create_task(watch())
        try:
            await splice(near, far, turn=turn)
        finally:
            watching.cancel()


async def _say(end: CallEnd, reply: Reply) -> None:
    async with asyncio.timeout(SILENCE_S):
        await end.write(write_reply(reply))
