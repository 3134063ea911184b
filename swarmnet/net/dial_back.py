"""Can others connect to this peer? Before it first serves it asks members to dial it back.

A peer behind a firewall sends as well as any other, so it looks like a mate to those who cannot call it. It finds that
out itself, before anybody waits for it, and is then reached through relays (`net.hidden`). Both ends are here: who asks
(`Asking`), and who is asked (`DialBacks`), who dials only where the caller's own signed record says that it listens,
and seldom.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from swarmnet.bounds import Recent
from swarmnet.directory import Record
from swarmnet.errors import PeerGone, PeerTimeout, SwarmError, UsageError
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Busy, DialBack, DialledBack
from swarmnet.net.address import Address
from swarmnet.transport import Transport, ask

AT_ONCE, ENOUGH_YES, MOST_NO, MOST_ASKED = 2, 2, 4, 8
"""Members are asked two at a time, until two more could connect than could not, four more could not, or eight were
asked."""

_PATIENCE_S = 10.0
_BUSY_TRIES, _LONGEST_BUSY_S = 5, 5.0

DIAL_S = 5.0
"""How long a member tries to connect."""

_RECORD_S = 2.0
"""How long a member waits for the record of a caller it does not know yet."""

_MOST_ADDRESSES = 4


# ---------------------------------------------------------------- who asks


Say = Callable[[str, dict[str, object]], None]
Hide = Callable[[Say], Awaitable[dict[str, object] | None]]
"""Has this peer be reached through relays, and says which come and go. Returns what to say of it; None: there are none.
"""

_FIRST_WATCH_S, _LONGEST_WATCH_S = 3.0, 60.0


async def _no_relays(say: Say) -> None:
    return None


class Asking:
    """Asks once in the life of a process, before any of its replicas first serves; later, if nobody could tell then.

    hide: what to do when most could not connect.
    """

    def __init__(
        self,
        record: Callable[[], Record],
        transport: Transport,
        records: Callable[[], Mapping[PeerId, Record]],
        say: Say,
        hide: Hide = _no_relays,
    ) -> None:
        self._record, self._transport, self._records, self._say = record, transport, records, say
        self._hide = hide
        self._asked: set[PeerId] = set()
        self._could: list[PeerId] = []
        """Who connected to me."""
        self._could_not: dict[PeerId, str] = {}
        """Who did not, and what stood in the way."""
        self._not_asked: dict[PeerId, str] = {}
        """Whom I could not ask, and why."""
        self._one, self._settled, self._known = asyncio.Lock(), False, False

    def settle(self) -> None:
        """A replica serves: others have been asked, or there was nobody to ask."""
        self._settled = True

    async def check(self) -> None:
        """Return if others can connect to this peer, or nobody can tell. Raises UsageError, with who could not."""
        async with self._one:
            if not self._settled:
                await self._ask_around()
            if self._settled or not self._asked:
                return
            await self._judge()
            self._settled = True

    async def watch(self) -> None:
        """Ask until somebody could tell: who comes first finds nobody to ask."""
        pause_s = _FIRST_WATCH_S
        while not self._known:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_WATCH_S)
            async with self._one:
                if self._known:
                    return
                for answers in (self._asked, self._could, self._could_not, self._not_asked):
                    answers.clear()
                await self._ask_around()
                if self._could or self._could_not:
                    # It serves, and nobody relays for it yet.
                    with contextlib.suppress(UsageError):
                        await self._judge()

    async def _ask_around(self) -> None:
        while members := self._next():
            self._asked.update(members)
            async with asyncio.TaskGroup() as group:
                for member in members:
                    group.create_task(self._ask(member))

    async def _judge(self) -> None:
        where, could_not = list(self._record().addresses), self._could_not
        if self._lead() < 0:
            if (found := await self._hide(self._say)) is not None:
                self._known = True
                self._say("hidden", {"addresses": where, "could_not": could_not, **found})
                return
            # Somebody tried, and nobody could: this peer would only look like a mate.
            if not self._could:
                self._say("unreachable", {"addresses": where, "could_not": could_not})
                raise UsageError(_in_words(where, could_not))
        self._known = bool(self._could)
        fields = {"addresses": where, "could": self._could, "could_not": could_not, "not_asked": self._not_asked}
        self._say("dialled_back", fields)

    def _next(self) -> list[PeerId]:
        lead = self._lead()
        if lead >= ENOUGH_YES or lead <= -MOST_NO or len(self._asked) >= MOST_ASKED:
            return []
        return [peer for peer in self._members() if peer not in self._asked][:AT_ONCE]

    def _lead(self) -> int:
        """How many more could than could not, of members with public addresses if such have answered."""
        # One of the same home connects where nobody else can.
        public = {peer for peer in (*self._could, *self._could_not) if self._is_public(peer)}
        could, could_not = (set(said) & public if public else said for said in (self._could, self._could_not))
        return len(could) - len(could_not)

    def _is_public(self, peer: PeerId) -> bool:
        record = self._records().get(peer)
        return record is not None and any(map(_public, record.addresses))

    def _members(self) -> list[PeerId]:
        """Who serves a stage, in an order that nobody can choose."""
        me = self._record()
        serving = [
            peer
            for peer, record in self._records().items()
            if record.addresses and any(status.synced for status in record.stages)
        ]

        def order(peer: PeerId) -> tuple[bool, bytes]:
            # One behind the same router proves nothing for the rest.
            return self._records()[peer].hidden, hashlib.sha256(f"{me.peer}/{me.incarnation}/{peer}".encode()).digest()

        return sorted(serving, key=order)

    async def _ask(self, member: PeerId) -> None:
        """One that is busy is asked again; one that does not answer cannot tell."""
        for _ in range(_BUSY_TRIES):
            try:
                answer = await ask(self._transport, member, DialBack(), patience=lambda: _PATIENCE_S)
            except SwarmError as error:
                self._not_asked[member] = error.message or type(error).__name__
                return
            if isinstance(answer, DialledBack):
                if answer.reached:
                    self._could.append(member)
                else:
                    self._could_not[member] = answer.reason
                return
            # It answers something else: it cannot tell, and is not asked again.
            if not isinstance(answer, Busy):
                return
            await asyncio.sleep(min(answer.retry_after_s, _LONGEST_BUSY_S))


def _in_words(addresses: Sequence[str], could_not: Mapping[PeerId, str]) -> str:
    where = ", ".join(text.partition("/p2p/")[0] for text in addresses)
    tried = [
        f"{', '.join(peer[-8:] for peer, why in could_not.items() if why == reason)} ({reason or 'no reason given'})"
        for reason in dict.fromkeys(could_not.values())
    ]
    return f"nobody can connect to this peer at {where}: tried by {', '.join(tried)}"


# ---------------------------------------------------------------- who is asked


@dataclass(slots=True)
class DialQuota:
    """Who may have what dialled, and when. Pure: `now` in seconds of any clock.

    Identities cost nothing, so an address counts as much as the caller: nobody is dialled often because many say so.
    """

    at_once: int = 4
    pause_s: float = 5.0
    under_way: int = 0
    _free_at: Recent[str, float] = field(default_factory=lambda: Recent(1024))
    """When a caller or an address may come again."""

    def wait_s(self, caller: PeerId, now: float) -> float:
        """Seconds until this caller may have something dialled; 0: now."""
        # Dials take seconds: strangers must not keep this peer busy with them.
        if self.under_way >= self.at_once:
            return 1.0
        return max(0.0, self._free_at.get(caller, 0.0) - now)

    def take(self, caller_or_address: str, now: float) -> bool:
        """Is it this one's turn? Then it is not again for a while."""
        if self._free_at.get(caller_or_address, 0.0) > now:
            return False
        self._free_at[caller_or_address] = now + self.pause_s
        return True


class DialBacks:
    """Dials callers back. look(): look into the directory for a caller that is not known yet."""

    def __init__(
        self, transport: Transport, records: Callable[[], Mapping[PeerId, Record]], look: Callable[[], None]
    ) -> None:
        self._transport, self._records, self._look = transport, records, look
        self._quota = DialQuota()

    async def serve(self, caller: PeerId) -> AsyncGenerator[Answer, None]:
        """Answer `DialBack`."""
        loop = asyncio.get_running_loop()
        if (wait_s := self._quota.wait_s(caller, loop.time())) > 0:
            yield Busy(wait_s, -1)
            return
        self._quota.under_way += 1
        try:
            record = await self._record_of(caller)
            if record is None or not self._quota.take(caller, loop.time()):
                yield Busy(1.0, -1)
                return
            addresses = [
                text for text in record.addresses[:_MOST_ADDRESSES] if self._quota.take(_place(text), loop.time())
            ]
            answer = await self._dial(caller, addresses, deadline=loop.time() + DIAL_S)
        finally:
            self._quota.under_way -= 1
        yield answer

    async def _record_of(self, caller: PeerId) -> Record | None:
        loop = asyncio.get_running_loop()
        until = loop.time() + _RECORD_S
        while (record := self._records().get(caller)) is None and loop.time() < until:
            self._look()
            await asyncio.sleep(_RECORD_S / 10)
        return record

    async def _dial(self, caller: PeerId, addresses: Sequence[str], *, deadline: float) -> Answer:
        """Try all addresses at once until one connects. Somebody who answers too slowly is no firewall: ask again."""
        reasons: dict[str, str] = {}
        undecided = not addresses
        async with asyncio.TaskGroup() as group:
            dials = [group.create_task(self._outcome(caller, text, deadline)) for text in addresses]
            for dialled in asyncio.as_completed(dials):
                text, reason = await dialled
                # One way in is enough.
                if reason == "":
                    for other in dials:
                        other.cancel()
                    return DialledBack(True)
                undecided = undecided or reason is None
                reasons[text] = reason or ""
        if undecided:
            return Busy(self._quota.pause_s, -1)
        if len(set(reasons.values())) == 1:
            return DialledBack(False, next(iter(reasons.values())))
        return DialledBack(False, "; ".join(f"{reason} at {_place(text)}" for text, reason in reasons.items()))

    async def _outcome(self, caller: PeerId, text: str, deadline: float) -> tuple[str, str | None]:
        """(address, what stands in the way): nothing in the way is "", None that it is not clear."""
        try:
            await self._transport.dial(caller, text, deadline=deadline)
        except PeerGone as error:
            return text, error.message if _public(text) else "it cannot be reached from here"
        except PeerTimeout:
            return text, None
        return text, ""


def _place(text: str) -> str:
    """Host and port: the same for every way to write an address down."""
    try:
        address = Address.parse(text)
    except UsageError:
        return text
    return text if address.relay else address.target


def _public(text: str) -> bool:
    """What answers inside this machine's own network is nobody else's business."""
    try:
        return ipaddress.ip_address(Address.parse(text).host).is_global
    except (UsageError, ValueError):
        return False
