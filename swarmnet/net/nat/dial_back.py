"""Can others connect to this peer? Before it first serves it asks members to dial it back.

A peer behind a firewall sends as well as any other, so it looks like a replica to peers that cannot call it. It detects
that itself, before another peer waits for it, and is then reached through relays (`hidden`). Both ends are here: the
asking peer (`Asking`), and the asked one (`DialBacks`), which dials only addresses in the caller's own signed record,
and seldom.

A report may be false; a connection from outside is a proof. Members that dial say Hello on it, so what a correct
member can do is worth two others' words. It is not worth all of them: a firewall may let in one foreign network alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence, Set

from swarmnet.clock import loop_time
from swarmnet.directory import Record
from swarmnet.errors import PeerGone, PeerTimeout, SwarmError, UsageError
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Busy, DialBack, DialledBack
from swarmnet.net.address import Address, network_of
from swarmnet.net.limits import ASK_AROUND_AGAIN, DIAL_BACKS
from swarmnet.pacing import Budgets
from swarmnet.transport import Transport, ask

AT_ONCE, ENOUGH_YES, MOST_NO, MOST_ASKED, MOST_REPEATS = 2, 2, 4, 8, 24
"""Members are asked two at a time, or six where the first two gave no answer, until two more networks could than could
not, four more could not, or eight members were asked, not counting those of a network that had been asked."""

PROOF = 2
"""A network from which a peer has connected counts as so many reports that connecting works, or fails."""

_PATIENCE_S = 10.0
"""With one answer, whatever signs of life come before it."""

_BUSY_TRIES, _SHORTEST_BUSY_S, _LONGEST_BUSY_S = 5, 1.0, 5.0

DIAL_S = 5.0
"""How long a member tries to connect."""

_RECORD_S = 2.0
"""How long a member waits for the record of a caller it does not know yet."""

_RECORDS_AT_ONCE = 4
"""For so many callers; a slot is for callers with a record at hand."""

_MOST_ADDRESSES = 4
_NAME_S = 1.0


# ---------------------------------------------------------------- who asks


Say = Callable[[str, dict[str, object]], None]
Hide = Callable[[Say], Awaitable[dict[str, object] | None]]
"""Has this peer be reached through relays, and says which come and go. Returns what to say of it; None: there are none.
"""


async def _no_relays(say: Say) -> None:
    return None


class Proofs:
    """What connections have shown, whatever records and members say. Here: nothing."""

    def came_from(self) -> Set[str]:
        """Public networks, this peer's own left out, from which a peer has connected to its port."""
        return frozenset()

    def network_of(self, peer: PeerId) -> str:
        """The public network where the peer has answered or from which it has called; "": none."""
        return ""


class Asking:
    """Asks once in the life of a process, before any of its replicas first serves; later, if no member could tell then.

    hide: what to do when most could not connect.
    """

    def __init__(
        self,
        record: Callable[[], Record],
        transport: Transport,
        records: Callable[[], Mapping[PeerId, Record]],
        say: Say,
        hide: Hide = _no_relays,
        proofs: Proofs = Proofs(),  # noqa: B008
    ) -> None:
        self._record, self._transport, self._records, self._say = record, transport, records, say
        self._hide, self._proofs = hide, proofs
        self._asked: set[PeerId] = set()
        self._could: list[PeerId] = []
        """Who connected to me."""
        self._could_not: dict[PeerId, str] = {}
        """Who did not, and what stood in the way."""
        self._not_asked: dict[PeerId, str] = {}
        """Whom I could not ask, and why."""
        self._one, self._settled, self._known = asyncio.Lock(), False, False

    def settle(self) -> None:
        """A replica serves: others have been asked, or there was no peer to ask."""
        self._settled = True

    async def check(self) -> None:
        """Return if others can connect to this peer, or if no peer can tell. Raises UsageError, with the peers that
        failed."""
        async with self._one:
            if not self._settled:
                await self._ask_around()
            if self._settled or not self._asked:
                return
            await self._judge()
            self._settled = True

    async def watch(self) -> None:
        """Ask until a member could tell: the first peer of a run has no peer to ask."""
        pauses = ASK_AROUND_AGAIN()
        while not self._known:
            await asyncio.sleep(pauses.failed(loop_time()))
            async with self._one:
                if self._known:
                    break
                for answers in (self._asked, self._could, self._could_not, self._not_asked):
                    answers.clear()
                await self._ask_around()
                if self._could or self._could_not or self._proofs.came_from():
                    # It serves, and no peer relays for it yet.
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
                self._say("hidden", {"addresses": where, "could_not": dict(could_not), **found})
                return
            # A member tried, and none could connect: this peer would only look like a replica.
            if not self._could and not self._proofs.came_from():
                self._say("unreachable", {"addresses": where, "could_not": could_not})
                raise UsageError(_in_words(where, could_not))
        dialled = {"dialled": True} if self._proofs.came_from() else {}
        self._known = bool(self._could or dialled)
        fields = {"addresses": where, "could": self._could, "could_not": could_not, "not_asked": self._not_asked}
        self._say("dialled_back", fields | dialled)

    def _next(self) -> list[PeerId]:
        lead, homes = self._lead(), [home for peer in self._asked if (home := self._proofs.network_of(peer))]
        # Two are asked in any case, for the log. Many of one network do not delay the others.
        repeats = min(len(homes) - len(set(homes)), MOST_REPEATS)
        if self._asked and (lead >= ENOUGH_YES or lead <= -MOST_NO or len(self._asked) - repeats >= MOST_ASKED):
            return []
        # Made-up members never answer: two patiences are lost on them, not four.
        silent = self._asked and not (self._could or self._could_not)
        at_once = MOST_ASKED - AT_ONCE if silent else AT_ONCE
        return [peer for peer in self._members() if peer not in self._asked][:at_once]

    def _lead(self) -> int:
        """How many more networks could than could not, if one that is public has answered or come; else members."""
        votes: Counter[str] = Counter()
        for said, vote in ((self._could, 1), (self._could_not, -1)):
            for peer in said:
                # Where it is, not where its record says: made-up addresses would be as many votes.
                votes[self._proofs.network_of(peer)] += vote
        # A peer in the same subnet can connect where no other can. Members without a public address have one vote each.
        came_from = self._proofs.came_from()
        public = [vote for home, vote in votes.items() if home and home not in came_from]
        if not public and not came_from:
            return len(self._could) - len(self._could_not)
        return sum((vote > 0) - (vote < 0) for vote in public) + PROOF * len(came_from)

    def _home(self, peer: PeerId) -> str:
        """Where the member says it is: that decides who is asked first, and no more. "": nowhere public."""
        record = self._records().get(peer)
        return next(filter(None, map(_public_home, record.addresses)), "") if record else ""

    def _members(self) -> list[PeerId]:
        """The members that serve a stage, in an order that no peer can influence, one of each public subnet before a
        second."""
        me, of_home = self._record(), Counter[str]()
        serving = [
            peer
            for peer, record in self._records().items()
            if record.addresses and any(status.synced for status in record.stages)
        ]

        def order(peer: PeerId) -> bytes:
            return hashlib.sha256(f"{me.peer}/{me.incarnation}/{peer}".encode()).digest()

        def turn(peer: PeerId) -> tuple[bool, int]:
            if home := self._home(peer):
                of_home[home] += 1
            # One behind the same router proves nothing for the rest.
            return self._records()[peer].hidden, of_home[home] if home else 1

        return sorted(sorted(serving, key=order), key=turn)

    async def _ask(self, member: PeerId) -> None:
        """One that is busy is asked again; one that does not answer cannot tell."""
        for _ in range(_BUSY_TRIES):
            try:
                answer = await ask(self._transport, member, DialBack(), limit_s=_PATIENCE_S)
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
                self._not_asked[member] = f"it says {type(answer).__name__}"
                return
            await asyncio.sleep(min(max(answer.retry_after_s, _SHORTEST_BUSY_S), _LONGEST_BUSY_S))
        self._not_asked[member] = "busy"


def _in_words(addresses: Sequence[str], could_not: Mapping[PeerId, str]) -> str:
    where = ", ".join(text.partition("/p2p/")[0] for text in addresses)
    tried = [
        f"{', '.join(peer[-8:] for peer, why in could_not.items() if why == reason)} ({reason or 'no reason given'})"
        for reason in dict.fromkeys(could_not.values())
    ]
    return f"no peer can connect to this peer at {where}: tried by {', '.join(tried)}"


# ---------------------------------------------------------------- who is asked


_DIALLED_AT_ONCE = 4
"""Callers: dials take seconds, and strangers must not keep this peer busy with them."""


class DialBacks:
    """Dials callers back. look(): look into the directory for a caller that is not known yet."""

    def __init__(
        self, transport: Transport, records: Callable[[], Mapping[PeerId, Record]], look: Callable[[], None]
    ) -> None:
        self._transport, self._records, self._look = transport, records, look
        self._budgets, self._under_way, self._looking = Budgets[str](DIAL_BACKS), 0, 0

    async def serve(self, caller: PeerId) -> AsyncGenerator[Answer, None]:
        """Answer `DialBack`."""
        if self._under_way >= _DIALLED_AT_ONCE:
            yield Busy(1.0, -1)
            return
        # Charged first: a caller without a record costs looks into the directory.
        if wait_s := self._budgets.of(caller).ask(loop_time()):
            yield Busy(wait_s, -1)
            return
        record = self._records().get(caller) or await self._look_for(caller)
        if record is None or self._under_way >= _DIALLED_AT_ONCE:
            yield Busy(max(self._budgets.of(caller).wait_s(loop_time()), 1.0), -1)
            return
        self._under_way += 1
        try:
            found = await asyncio.gather(*map(_in_numbers, record.addresses[:_MOST_ADDRESSES]))
            addresses = [text for text in found if not self._budgets.of(_endpoint_text(text)).ask(loop_time())]
            answer = await self._dial(caller, addresses, deadline=loop_time() + DIAL_S)
        finally:
            self._under_way -= 1
        yield answer

    async def _look_for(self, caller: PeerId) -> Record | None:
        if self._looking >= _RECORDS_AT_ONCE:
            return None
        until = loop_time() + _RECORD_S
        self._looking += 1
        try:
            while (record := self._records().get(caller)) is None and loop_time() < until:
                self._look()
                await asyncio.sleep(_RECORD_S / 10)
            return record
        finally:
            self._looking -= 1

    async def _dial(self, caller: PeerId, addresses: Sequence[str], *, deadline: float) -> Answer:
        """Try all addresses at once until one connects. A slow answer does not mean a firewall: ask again."""
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
            return Busy(DIAL_BACKS.burst_s, -1)
        if len(set(reasons.values())) == 1:
            return DialledBack(False, next(iter(reasons.values())))
        return DialledBack(False, "; ".join(f"{reason} at {_endpoint_text(text)}" for text, reason in reasons.items()))

    async def _outcome(self, caller: PeerId, text: str, deadline: float) -> tuple[str, str | None]:
        """(address, what stands in the way): nothing in the way is "", None that it is not clear."""
        # Looked up again it might lead to a host that was dialled a moment ago.
        if _is_name(text):
            return text, "its name leads nowhere from here"
        try:
            await self._transport.dial(caller, text, deadline=deadline)
        except PeerGone as error:
            return text, error.message if _public(text) else "it cannot be reached from here"
        except PeerTimeout:
            return text, None
        return text, ""


def _endpoint_text(text: str) -> str:
    """Host and port: the same for every way to write an address down."""
    try:
        address = Address.parse(text)
    except UsageError:
        return text
    return text if address.relay else address.target


def _is_name(text: str) -> bool:
    return text.startswith("/dns")


async def _in_numbers(text: str) -> str:
    """The address that a name leads to now: one host may have any number of names. What leads nowhere stays."""
    if not _is_name(text):
        return text
    try:
        address = Address.parse(text)
        family = socket.AF_INET if address.kind == "dns4" else socket.AF_INET6
        async with asyncio.timeout(_NAME_S):
            looking = asyncio.get_running_loop().getaddrinfo(
                address.host, address.port, family=family, type=socket.SOCK_STREAM
            )
            found = [str(at[0]) for *_, at in await looking]
        return str(Address.of(found[0], address.port, address.peer))
    except (UsageError, OSError, UnicodeError, TimeoutError):
        return text


def _public(text: str) -> bool:
    """Is it public? An address inside this machine's own network is not probed for another peer."""
    return bool(_public_home(text))


def _public_home(text: str) -> str:
    try:
        return public_home(Address.parse(text).host)
    except UsageError:
        return ""


def public_home(host: str) -> str:
    """The network of a host: a /24 of IPv4, a /48 of IPv6 are often one customer's. "": no public address."""
    return network_of(host, 24, 48)
