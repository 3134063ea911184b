"""A peer that cannot be dialled: it keeps places at two relays, and comes when it is summoned (docs/nat.md).

It comes to the relay or, if the caller can be dialled, to the caller itself. TLS runs end to end and proves who accepts
a connection: a relay can only drop what it passes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import secrets
from collections.abc import Callable, Sequence

from swarmnet import telemetry
from swarmnet.bounds import Recent
from swarmnet.clock import loop_time, set_within
from swarmnet.errors import PeerGone, Refused, RejectCode, SwarmError, leaves
from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Rejected
from swarmnet.net.address import home_of
from swarmnet.net.background import BackgroundTasks, running
from swarmnet.net.grpc_channels import PeerChannels
from swarmnet.net.limits import REFUSALS_TOLD, SUMMONS_OF_RELAY
from swarmnet.net.nat.circuits import CallEnd, enter, hear
from swarmnet.net.nat.dial_back import Say
from swarmnet.net.nat.relay import ARRIVE, COME_S, CONNECT, PING_S, RESERVE, SILENCE_S
from swarmnet.net.nat.relay_book import too_many
from swarmnet.pacing import Budgets
from swarmnet.wire.convert import NONCE_BYTES, GreetFirst, Ping, Pong
from swarmnet.wire.relay import ID_BYTES, Arrive, Connect, Reserve, Reserved, Summon, read_reply, write_ask

WANTED = 2
"""Places to keep: when one relay is lost, callers try the other."""

_RELAY_AGAIN_S = 20.0
_LOOK_S = 0.5

_PROBE_S, _NOWHERE_AGAIN_S = 60.0, 600.0
"""How often a peer tries whether a relay leads to it, and for how long it does without one that twice did not."""

ChannelsTo = Callable[[PeerId], PeerChannels]

log = telemetry.get(__name__)


async def answer_of(end: CallEnd, channels: PeerChannels) -> object:
    """The callee's first word, if it is a good one. Raises SwarmError, TimeoutError."""
    reply = await hear(end, read_reply, COME_S + SILENCE_S / 2)
    if isinstance(reply, GreetFirst):
        channels.greet_again()
    if isinstance(reply, Rejected):
        raise Refused(reply.code, reply.reason, peer=channels.peer)
    if not isinstance(reply, Accepted | Reserved):
        raise Refused(RejectCode.NOT_READY, f"it says {type(reply).__name__}", peer=channels.peer)
    return reply


class Places:
    """Keeps places at relays while `run` runs.

    candidates(): members that can be dialled. local_socket: the socket at which this peer's own port listens inside
    this machine. say: takes the events `relay_reserved`, `relay_lost` and `callers_refused`.
    """

    def __init__(
        self,
        me: PeerId,
        channels: ChannelsTo,
        verified_hosts: Callable[[PeerId], Sequence[str]],
        candidates: Callable[[], Sequence[PeerId]],
        local_socket: str,
        say: Say,
    ) -> None:
        self._me, self._channels, self._verified_hosts = me, channels, verified_hosts
        self._candidates, self._local_socket, self._say = candidates, local_socket, say
        self.relays: list[PeerId] = []
        """The relays that have a reservation for this peer, the oldest first."""
        self.settled = asyncio.Event()
        """A relay has a reservation for this peer, or each one that could be asked has refused."""
        self._keeping: set[PeerId] = set()
        self._again_at: Recent[PeerId, float] = Recent(1024)
        self._changed = asyncio.Event()
        self._coming: dict[asyncio.Task[None], tuple[str, PeerId]] = {}
        """Streams to this peer: the caller's address and its peer id, which is the relay's claim until the caller has
        greeted."""
        self._tasks = BackgroundTasks()
        self._summons, self._says = Budgets[PeerId](SUMMONS_OF_RELAY), REFUSALS_TOLD.bucket()
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
        """The relays to ask now, at random: no peer can craft an id that is chosen, and hidden peers spread over the
        relays."""
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
                terms = await answer_of(end, channels)
                self.relays.append(relay)
                self.refused.pop(relay, None)
                self.settled.set()
                self._say("relay_reserved", {"relay": relay, "bytes_per_s": getattr(terms, "bytes_per_s", 0)})
                async with running(_ping(end), self._probe(relay, channels)):
                    await self._listen(relay, end)
        except* SwarmError as errors:
            reason = str(next(leaves(errors)))
        except* TimeoutError:
            reason = f"silent for {SILENCE_S:g} s"
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

    async def _listen(self, relay: PeerId, end: CallEnd) -> None:
        while True:
            match await hear(end, read_reply, SILENCE_S, gone="the relay ended the reservation"):
                case Summon() as summon:
                    self._summoned(relay, summon)
                case Pong():
                    pass
                case other:
                    raise PeerGone(f"the relay says {type(other).__name__}", peer=relay)

    def _summoned(self, relay: PeerId, summon: Summon) -> None:
        """Connect back, unless too many already have. Raises PeerGone for a relay with an endless stream of
        requests."""
        if self._summons.of(relay).ask(loop_time()):
            raise PeerGone("the relay sends connect-back requests without end", peer=relay)
        channels = self._channels(summon.caller if summon.reverse else relay)
        # A caller that cannot be dialled itself has no business in asking for it.
        if not any(address.direct for address in channels.addresses()):
            log.debug("cannot_be_dialled", caller=summon.caller, relay=relay)
            return
        # Until the caller has spoken its name is the relay's word, and takes none of what that caller may have.
        claimed, known = (self._home(relay), summon.caller), (self._home(channels.peer), summon.caller)
        reason = next(filter(None, (too_many(self._coming.values(), one) for one in (claimed, known))), "")
        task = self._tasks.spawn(self._come(channels, summon, full=bool(reason)))
        if not reason:
            self._coming[task] = claimed
            task.add_done_callback(self._coming.pop)
            return
        # A flood must not fill the log.
        if not self._says.ask(loop_time()):
            self._say("callers_refused", {"reason": reason, "caller": summon.caller, "relay": relay})

    async def _come(self, channels: PeerChannels, summon: Summon, *, full: bool) -> None:
        """Bring the caller's stream to my own port; or say that I do not."""
        try:
            async with channels.asked(ARRIVE, write_ask(Arrive(summon.id, full)), limit_s=COME_S) as far:
                await answer_of(far, channels)
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
                    self._coming[task] = self._home(channels.peer), summon.caller
                await enter(far, self._local_socket, first)
        except (SwarmError, TimeoutError, OSError) as error:
            log.debug("did_not_come", caller=summon.caller, at=channels.peer, reverse=summon.reverse, error=error)

    def _home(self, peer: PeerId) -> str:
        return home_of(next(iter(self._verified_hosts(peer)), ""))

    def _proof(self, ident: bytes) -> bytes:
        """The answer to a probe with this id: a relay that leads nowhere cannot give it in this peer's name."""
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
                    await answer_of(end, channels)
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


async def _ping(end: CallEnd) -> None:
    with contextlib.suppress(SwarmError):
        while True:
            await asyncio.sleep(PING_S)
            await end.write(write_ask(Ping(secrets.token_bytes(NONCE_BYTES))))
