"""A peer that nobody can dial, and how others get to it all the same (docs/relays.md).

`Places` is the hidden peer's side: it keeps a place at two relays, and comes when it is summoned, to the relay or, if
the caller can be dialled, to the caller itself. `Ways` is the caller's: how a byte stream to such a peer is opened.
Whoever accepts a connection on it is found out by TLS, end to end: a relay can only drop what it passes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from swarmnet import telemetry
from swarmnet.bounds import Recent
from swarmnet.clock import loop_time
from swarmnet.errors import PeerGone, PeerTimeout, Refused, RejectCode, SwarmError, leaves
from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Rejected
from swarmnet.net.address import home_of
from swarmnet.net.background import BackgroundTasks, beside, set_within
from swarmnet.net.greeting import Greeter
from swarmnet.net.grpc_channels import PeerChannels
from swarmnet.net.nat.circuits import Arrivals, Called, Connection, Doors, End, Tunnel, hear, splice
from swarmnet.net.nat.dial_back import Say
from swarmnet.net.nat.punch import Holes
from swarmnet.net.nat.relay import ARRIVE, COME_S, CONNECT, PING_S, RESERVE, SILENCE_S, Relay
from swarmnet.net.nat.relay_book import RelayCaps, too_many
from swarmnet.net.tls import Leaf
from swarmnet.net.traffic import Traffic
from swarmnet.pacing import Budgets, Rate
from swarmnet.wire.convert import NONCE_BYTES, GreetFirst, Ping, Pong
from swarmnet.wire.relay import ID_BYTES, Arrive, Connect, Reserve, Reserved, Summon, read_reply, write_ask

FIND_RELAY_S = 20.0
"""How long a peer that nobody can dial looks for its first relay."""

WANTED = 2
"""Places to keep: when one relay is lost, callers try the other."""

REVERSE_S = 3.0
"""A caller that can be dialled waits so long for the peer to come to it directly."""

_REVERSE_AGAIN_S = 60.0
"""And after it was in vain so long before it tries again."""

_RELAY_AGAIN_S = 20.0
_LOOK_S = 0.5

_PROBE_S, _NOWHERE_AGAIN_S = 60.0, 600.0
"""How often a peer tries whether a relay leads to it, and for how long it does without one that twice did not."""

_SUMMONS = Rate(per_s=8.0, burst_s=30.0)
"""Of one relay: what it lets through itself, and as many again after a stall."""
_SAY_S = 60.0

ChannelsTo = Callable[[PeerId], PeerChannels]

log = telemetry.get(__name__)


async def _answer_of(end: Called, channels: PeerChannels) -> object:
    """The callee's first word, if it is a good one. Raises SwarmError, TimeoutError."""
    reply = await hear(end, read_reply, COME_S + SILENCE_S / 2)
    if isinstance(reply, GreetFirst):
        channels.greet_again()
    if isinstance(reply, Rejected):
        raise Refused(reply.code, reply.reason, peer=channels.peer)
    if not isinstance(reply, Accepted | Reserved):
        raise Refused(RejectCode.NOT_READY, f"it says {type(reply).__name__}", peer=channels.peer)
    return reply


# ---------------------------------------------------------------- the hidden peer


class Places:
    """Keeps places at relays while `run` runs.

    candidates(): members that can be dialled. door: the socket at which this peer's own port listens inside this
    machine. say: takes the events `relay_reserved`, `relay_lost` and `callers_refused`.
    """

    def __init__(
        self, me: PeerId, channels: ChannelsTo, candidates: Callable[[], Sequence[PeerId]], door: str, say: Say
    ) -> None:
        self._me, self._channels, self._candidates, self._door, self._say = me, channels, candidates, door, say
        self.relays: list[PeerId] = []
        """Where there is a place now, the oldest first."""
        self.settled = asyncio.Event()
        """There is a place, or everybody who could be asked has refused one."""
        self._keeping: set[PeerId] = set()
        self._again_at: Recent[PeerId, float] = Recent(1024)
        self._changed = asyncio.Event()
        self._coming: dict[asyncio.Task[None], tuple[str, PeerId]] = {}
        """Streams that lead here: from which address, and whose; by the relay's word until the caller has spoken."""
        self._tasks = BackgroundTasks()
        self._summons, self._says = Budgets[PeerId](_SUMMONS), Rate.every(_SAY_S).bucket()
        self._secret = secrets.token_bytes(32)
        self._probes: set[bytes] = set()
        self.refused: dict[PeerId, str] = {}
        """Who did not relay, and why."""

    async def run(self) -> None:
        """Until cancelled: find relays, keep the places, and replace what is lost."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._changed.clear()
                    for relay in self._next():
                        self._keeping.add(relay)
                        group.create_task(self._keep(relay))
                    if not self._keeping and self.refused:
                        self.settled.set()
                    # A candidate may be new, or may be tried again.
                    await set_within(self._changed, _LOOK_S)
        finally:
            self._tasks.cancel()

    def _next(self) -> list[PeerId]:
        """Whom to ask now, at random: nobody can make up an id that is chosen, and hidden peers spread."""
        now = loop_time()
        able = [
            peer
            for peer in self._candidates()
            if peer != self._me and peer not in self._keeping and self._again_at.get(peer, now) <= now
        ]
        return random.sample(able, max(min(WANTED - len(self._keeping), len(able)), 0))

    async def _keep(self, relay: PeerId) -> None:
        reason = ""
        try:
            channels = self._channels(relay)
            async with channels.asked(RESERVE, write_ask(Reserve()), limit_s=SILENCE_S, calls=False) as end:
                terms = await _answer_of(end, channels)
                self.relays.append(relay)
                self.refused.pop(relay, None)
                self.settled.set()
                self._say("relay_reserved", {"relay": relay, "bytes_per_s": getattr(terms, "bytes_per_s", 0)})
                async with beside(_ping(end), self._probe(relay, channels)):
                    await self._listen(relay, end)
        except* SwarmError as errors:
            reason = str(next(leaves(errors)))
        except* TimeoutError:
            reason = f"nothing was heard for {SILENCE_S:g} s"
        finally:
            self._keeping.discard(relay)
            again_at = loop_time() + _RELAY_AGAIN_S
            self._again_at[relay] = max(again_at, self._again_at.get(relay, again_at))
            self._changed.set()
            if relay in self.relays:
                self.relays.remove(relay)
                self._say("relay_lost", {"relay": relay, "reason": reason})
            else:
                self.refused[relay] = reason
                log.debug("no_place", relay=relay, reason=reason)

    async def _listen(self, relay: PeerId, end: Called) -> None:
        while True:
            match await hear(end, read_reply, SILENCE_S, gone="the relay gave the place away"):
                case Summon() as summon:
                    self._summoned(relay, summon)
                case Pong():
                    pass
                case other:
                    raise PeerGone(f"the relay says {type(other).__name__}", peer=relay)

    def _summoned(self, relay: PeerId, summon: Summon) -> None:
        """Come, unless too many have. Raises PeerGone for a relay that summons without end."""
        if self._summons.of(relay).ask(loop_time()):
            raise PeerGone("the relay summons without end", peer=relay)
        channels = self._channels(summon.caller if summon.reverse else relay)
        # A caller that cannot be dialled itself has no business in asking for it.
        if all(address.relay for address in channels.addresses()):
            log.debug("cannot_be_dialled", caller=summon.caller, relay=relay)
            return
        # Until the caller has spoken its name is the relay's word, and takes none of what that caller may have.
        claimed = home_of(self._channels(relay).shown_host), summon.caller
        known = home_of(channels.shown_host), summon.caller
        reason = next(filter(None, (too_many(self._coming.values(), one) for one in (claimed, known))), "")
        task = self._tasks.spawn(self._come(channels, summon, full=bool(reason)))
        if not reason:
            self._coming[task] = claimed
            task.add_done_callback(self._coming.pop)
            return
        # Whoever floods does not fill the log.
        if not self._says.ask(loop_time()):
            self._say("callers_refused", {"reason": reason, "caller": summon.caller, "relay": relay})

    async def _come(self, channels: PeerChannels, summon: Summon, *, full: bool) -> None:
        """Bring the caller's stream to my own port; or say that I do not."""
        try:
            async with channels.asked(ARRIVE, write_ask(Arrive(summon.id, full)), limit_s=COME_S) as far:
                await _answer_of(far, channels)
                if full:
                    return
                # Any other call under my identity comes from a twin, and goes to my port as all do.
                if summon.caller == self._me and summon.id in self._probes:
                    await far.write(self._proof(summon.id))  # what `_probe` waits for
                    await far.read()
                    return
                # TLS begins with the caller's word.
                async with asyncio.timeout(COME_S):
                    first = await far.read()
                if not first:
                    return
                if (task := asyncio.current_task()) in self._coming and summon.reverse:
                    self._coming[task] = home_of(channels.shown_host), summon.caller
                near = Connection(*await asyncio.open_unix_connection(self._door))
                try:
                    await near.write(first)
                    await splice(far, near)
                finally:
                    near.close()
        except (SwarmError, TimeoutError, OSError) as error:
            log.debug("did_not_come", caller=summon.caller, at=channels.peer, reverse=summon.reverse, error=error)

    def _proof(self, ident: bytes) -> bytes:
        """What a probe with this id is answered: a relay that leads nowhere cannot answer in my place."""
        return hashlib.blake2b(ident, key=self._secret, digest_size=ID_BYTES).digest()

    async def _probe(self, relay: PeerId, channels: PeerChannels) -> None:
        """Now and then call myself through the relay. Raises PeerGone if it twice leads nowhere."""
        in_vain = 0
        while in_vain < 2:
            await asyncio.sleep(_PROBE_S)
            connect, said = Connect(self._me, secrets.token_bytes(ID_BYTES)), b""
            self._probes.add(connect.id)
            try:
                async with channels.asked(CONNECT, write_ask(connect), limit_s=COME_S) as end:
                    await _answer_of(end, channels)
                    async with asyncio.timeout(SILENCE_S):
                        said = await end.read()
            except Refused:
                said = self._proof(connect.id)  # it tells callers as well, who take another
            except (SwarmError, TimeoutError) as error:
                log.debug("leads_nowhere", relay=relay, error=error)
            finally:
                self._probes.discard(connect.id)
            in_vain = 0 if said == self._proof(connect.id) else in_vain + 1
        self._again_at[relay] = loop_time() + _NOWHERE_AGAIN_S
        raise PeerGone("it leads nowhere", peer=relay)


async def _ping(end: Called) -> None:
    with contextlib.suppress(SwarmError):
        while True:
            await asyncio.sleep(PING_S)
            await end.write(write_ask(Ping(secrets.token_bytes(NONCE_BYTES))))


# ---------------------------------------------------------------- the caller


class Ways:
    """How this peer gets to peers that nobody can dial, and how others get to it if nobody can dial it.

    A stream to such a peer goes through a hole, or it comes to us itself, or a relay carries it. Who opens one does not
    know which.

    listens: False: it has no port. welcome(peer): has it greeted, and is it admitted? on_better(peer): a way to it that
    needs no relay was found, while circuits lead to it as well.
    """

    def __init__(
        self,
        leaf: Leaf,
        channels: ChannelsTo,
        greeter: Greeter,
        traffic: Traffic,
        caps: RelayCaps,
        relay_bytes_per_s: float,
        *,
        listens: bool,
        welcome: Callable[[PeerId], bool],
        on_better: Callable[[PeerId], None],
    ) -> None:
        self._me, self._channels, self._listens, self._on_better = leaf.peer, channels, listens, on_better
        self._doors, self._arrivals = Doors(), Arrivals()
        self._door = ""
        self.relay = Relay(
            leaf.peer, caps, self._arrivals, greeter, welcome, traffic, lambda: traffic.relays(relay_bytes_per_s)
        )
        self.holes = Holes(leaf, channels, self._doors, welcome, on_better)
        self.places: Places | None = None
        """Where this peer is reached, if nobody can dial it."""
        self.methods = {**self.relay.methods, **self.holes.methods}
        self._in_vain: Recent[tuple[PeerId, PeerId], float] = Recent(4096)
        """Peers that did not come to us directly when a relay summoned them, and when."""
        self._by_relay: Recent[PeerId, None] = Recent(4096)
        """Peers whose last stream goes through a relay."""

    @property
    def hidden(self) -> bool:
        """Can nobody dial this peer?"""
        return self.places is not None or not self._listens

    def open_door(self) -> str:
        """A path for the socket inside this machine at which its own port listens: where streams to it end."""
        self._door = self._doors.path()
        return self._door

    async def hide(
        self,
        candidates: Callable[[], Sequence[PeerId]],
        say: Say,
        spawn: Callable[[Coroutine[object, object, None]], asyncio.Task[None]],
    ) -> bool:
        """Nobody can dial this peer: from now on it is reached through relays, which it chooses among members that can
        be dialled. Returns whether one was found; if not, all is as before.
        """
        places = Places(self._me, self._channels, candidates, self._door, say)
        self.relay.close()
        keeping = spawn(places.run())
        await set_within(places.settled, FIND_RELAY_S)
        if not places.relays:
            self.relay.open = True
            keeping.cancel()
            return False

        def observers() -> list[PeerId]:
            return [*places.relays, *(peer for peer in candidates() if peer not in places.relays)]

        self.places = places
        self.holes.begin(self._door, observers, say)
        return True

    def remove(self) -> None:
        """Leave nothing in this machine. Idempotent."""
        self._doors.remove()

    def tunnel(self, peer: PeerId, relay: PeerId) -> Tunnel:
        """Where to dial in this machine to get to `peer` through `relay`."""
        return Tunnel(self._doors.path(), partial(self.connect, peer, relay))

    def relays(self, peer: PeerId) -> bool:
        """Does a relay carry what we say to this peer, which nobody can dial?"""
        return not self.holes.leads_to(peer) and (self.hidden or peer in self._by_relay)

    def _may_come(self, peer: PeerId, relay: PeerId) -> bool:
        """Is it worth while to have the relay send the peer to us?"""
        now = loop_time()
        # A twin cannot be sent to me: it would dial itself.
        since_s = now - self._in_vain.get((peer, relay), -_REVERSE_AGAIN_S)
        return not self.hidden and peer != self._me and since_s >= _REVERSE_AGAIN_S

    @asynccontextmanager
    async def connect(self, peer: PeerId, relay: PeerId) -> AsyncGenerator[End, None]:
        """A byte stream to the peer: through a hole, direct because it comes to us, or through `relay`. Raises
        SwarmError, TimeoutError."""
        async with AsyncExitStack() as stack:
            yield await self._way(stack, peer, relay)

    async def _way(self, stack: AsyncExitStack, peer: PeerId, relay: PeerId) -> End:
        if relay == peer:
            return await stack.enter_async_context(self.holes.stream(peer))
        if relay == self._me:
            if (came := await self._expect(stack, peer, self._summon)) is None:
                raise PeerTimeout("it does not come", peer=peer)
            return came
        channels = self._channels(relay)
        # Circuits do not lead through circuits.
        if all(address.relay for address in channels.addresses()):
            raise PeerGone("its relay cannot be dialled", peer=peer, relay=relay)
        if self._may_come(peer, relay):
            if (came := await self._expect(stack, peer, partial(self._reverse, channels))) is not None:
                return came
            self._in_vain[peer, relay] = loop_time()
            log.debug("does_not_come", peer=peer, relay=relay)
        connect = Connect(peer, secrets.token_bytes(ID_BYTES))
        end = await stack.enter_async_context(channels.asked(CONNECT, write_ask(connect), limit_s=COME_S))
        await _answer_of(end, channels)
        self._by_relay[peer] = None
        if peer != self._me:
            self.holes.want(peer)
        return end

    async def _expect(
        self, stack: AsyncExitStack, peer: PeerId, call: Callable[[PeerId, bytes], Coroutine[object, object, None]]
    ) -> End | None:
        """The peer's own stream to us, once it was called; None if it does not come. Raises what `call` does, and
        Refused."""
        ident = secrets.token_bytes(ID_BYTES)
        coming = stack.enter_context(self._arrivals.expect(peer, ident))
        # If the relay does not answer, that is no word about the peer.
        await call(peer, ident)
        try:
            async with asyncio.timeout(REVERSE_S):
                came = await coming
        except TimeoutError:
            return None
        if peer in self._by_relay:
            del self._by_relay[peer]
            self._on_better(peer)
        return came

    async def _summon(self, peer: PeerId, ident: bytes) -> None:
        if self.relay.summon(self._me, peer, ident, reverse=False) > 0:
            raise PeerTimeout("it has no place here now, or was called too often", peer=peer)

    async def _reverse(self, channels: PeerChannels, peer: PeerId, ident: bytes) -> None:
        ask = Connect(peer, ident, reverse=True)
        async with channels.asked(CONNECT, write_ask(ask), limit_s=COME_S) as end:
            await _answer_of(end, channels)
