"""Who is asked to dial a newcomer back and what follows; what a member dials for whom, and how seldom."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping

import pytest

from swarmnet.directory import Record, StageStatus
from swarmnet.errors import PeerGone, UsageError
from swarmnet.ids import Chain, PeerId, RunId
from swarmnet.messages import Answer, Busy, DialledBack
from swarmnet.net.nat.dial_back import MOST_ASKED, MOST_NO, Asking, DialBacks, Proofs, public_home
from swarmnet.testing.clock import VirtualLoop
from swarmnet.testing.doubles import FakeTransport, Script, in_turn, run_virtual

pytestmark = pytest.mark.virtual_time

ME = PeerId("me")
MEMBERS = [PeerId(name) for name in "ABCDEFGHIJ"]
YES, NO = DialledBack(True), DialledBack(False, "no answer")
AT = "/ip4/203.0.113.7/tcp/31340"


def record(peer: PeerId, *addresses: str, synced: bool = True) -> Record:
    status = StageStatus(0, 3, Chain("0" * 64), synced)
    return Record(RunId("0" * 64), peer, 7, addresses or (AT,), (status,))


def saying(**script: list[Script]) -> FakeTransport:
    """Each peer gives one answer a call, the last one again and again; the others refuse."""
    return FakeTransport(**{peer: in_turn(*answers) for peer, answers in script.items()})


# ---------------------------------------------------------------- asking


def asking(transport: FakeTransport, *members: str, synced: bool = True) -> tuple[Asking, list]:
    said: list[tuple[str, dict]] = []
    records = {PeerId(name): record(PeerId(name), synced=synced) for name in members}
    return Asking(
        lambda: record(ME), transport, lambda: records, lambda event, fields: said.append((event, fields))
    ), said


async def test_who_can_be_connected_to_goes_on_and_asks_once() -> None:
    transport = saying(A=[NO], B=[YES])
    one, said = asking(transport, "A", "B")
    async with asyncio.TaskGroup() as group:  # two stages of a peer ask at the same time
        group.create_task(one.check())
        group.create_task(one.check())
    await one.check()
    assert sorted(transport.asked) == ["A", "B"]
    assert said == [
        ("dialled_back", {"addresses": [AT], "could": ["B"], "could_not": {"A": "no answer"}, "not_asked": {}})
    ]


class Shown(Proofs):
    """Members were met in these networks, and somebody has come from those."""

    def __init__(self, met: Callable[[PeerId], str], came_from: Iterable[str] = ()) -> None:
        self._met, self._came_from = met, frozenset(came_from)

    def came_from(self) -> frozenset[str]:
        return self._came_from

    def network_of(self, peer: PeerId) -> str:
        return self._met(peer)


async def test_whom_nobody_can_connect_to_stops_and_says_who_tried_where() -> None:
    transport = saying(**{name: [NO] for name in "ABCDEF"})
    one, said = asking(transport, *"ABCDEF")
    with pytest.raises(UsageError, match=r"203\.0\.113\.7/tcp/31340: tried by .*, .*, .*, [A-F] \(no answer\)"):
        await one.check()
    assert len(transport.asked) == MOST_NO
    [(event, fields)] = said
    assert event == "unreachable" and fields["could_not"] == dict.fromkeys(transport.asked, "no answer")


def test_those_at_home_do_not_outvote_the_others() -> None:
    transport = saying(A=[NO], B=[YES], C=[YES], D=[NO], E=[YES])
    where = {name: "8.8.8.8" if name in "AD" else "192.168.1.3" for name in "ABCDE"}
    said: list[str] = []
    records = {PeerId(name): record(PeerId(name), f"/ip4/{host}/tcp/1") for name, host in where.items()}

    async def hide(_: object) -> dict[str, object]:
        return {"relays": ["A"]}

    proofs = Shown(lambda peer: public_home(where[peer]))
    one = Asking(lambda: record(ME), transport, lambda: records, lambda event, _: said.append(event), hide, proofs)
    run_virtual(one.check())
    assert said == ["hidden"]


def at_homes(
    script: dict[str, list[Answer | Exception]],
    hosts: dict[str, str],
    came_from: Collection[str] = (),
    *,
    said_to_be: Mapping[str, str] = {},
) -> list:
    """What is said of a peer whose members are at these hosts and answer so; some name other ones in their records."""
    transport, said = saying(**script), []
    records = {
        PeerId(name): record(PeerId(name), f"/ip4/{said_to_be.get(name, host)}/tcp/1") for name, host in hosts.items()
    }

    def proved(peer: PeerId) -> str:
        return public_home(hosts[peer]) if peer in transport.asked else ""

    async def hide(_: object) -> dict[str, object]:
        return {"relays": ["A"]}

    def say(event: str, fields: dict) -> None:
        said.append((event, fields))

    proofs = Shown(proved, map(public_home, came_from))
    run_virtual(Asking(lambda: record(ME), transport, lambda: records, say, hide, proofs).check())
    return [*said, ("asked", transport.asked)]


def test_identities_of_one_home_have_one_vote_and_are_asked_after_the_other_homes() -> None:
    liars = [f"L{number}" for number in range(20)]
    script = {"A": [YES], "B": [YES]} | {liar: [NO] for liar in liars}
    hosts = {"A": "44.1.0.1", "B": "44.2.0.1"} | {liar: f"44.3.0.{at}" for at, liar in enumerate(liars, 1)}
    (event, fields), (_, asked) = at_homes(script, hosts)
    assert event == "dialled_back" and sorted(fields["could"]) == ["A", "B"]
    assert {"A", "B"} <= set(asked[:3])


def test_made_up_addresses_in_its_record_give_a_liar_one_vote_and_take_nobodys_turn() -> None:
    names = [f"m{number}" for number in range(15)]
    order = sorted(names, key=lambda name: hashlib.sha256(f"{ME}/7/{name}".encode()).digest())
    liars, honest = order[:12], order[12:]
    script = {name: [YES] for name in honest} | {liar: [NO] for liar in liars}
    hosts = {name: f"44.{at}.0.1" for at, name in enumerate(honest)} | dict.fromkeys(liars, "44.9.0.1")
    made_up = {liar: f"45.{at}.0.1" for at, liar in enumerate(liars)}
    (event, fields), (_, asked) = at_homes(script, hosts, said_to_be=made_up)
    assert event == "dialled_back" and len(fields["could"]) >= 2
    assert len(asked) > MOST_ASKED, "many of the first eight were the liar's"


def test_what_one_has_done_outweighs_the_words_of_two() -> None:
    script = {name: [NO] for name in "ABC"}
    hosts = {name: f"44.{at}.0.1" for at, name in enumerate("ABC")}
    (event, fields), _ = at_homes(script, hosts, ["44.0.0.1"])
    assert event == "dialled_back" and fields["dialled"] and not fields["could"]
    (event, _), _ = at_homes(script, hosts)
    assert event == "hidden"


def test_a_firewall_that_lets_in_one_foreign_network_is_closed() -> None:
    script = {name: [YES if name in "AB" else NO] for name in "ABCDEF"}
    hosts = {name: f"44.{0 if name in 'AB' else at}.0.{at}" for at, name in enumerate("ABCDEF", 1)}
    (event, fields), _ = at_homes(script, hosts, ["44.0.0.1"])
    assert event == "hidden" and set(fields["could_not"]) >= set("CDE")


@pytest.mark.parametrize(
    ("host", "home"),
    [
        ("44.1.2.3", "44.1.2.0/24"),
        ("::ffff:44.1.2.3", "44.1.2.0/24"),
        ("2600:44:1:2::3", "2600:44:1::/48"),
        ("192.168.1.2", ""),
        ("100.64.0.1", ""),
        ("example.org", ""),
        ("", ""),
    ],
)
def test_the_home_of_a_host_is_its_public_network(host: str, home: str) -> None:
    assert public_home(host) == home


@pytest.mark.parametrize(("members", "synced"), [("", True), ("AB", False), ("AB", True)])
def test_where_nobody_serves_or_answers_nobody_can_tell(members: str, synced: bool) -> None:
    transport = saying()
    one, said = asking(transport, *members, synced=synced)
    run_virtual(one.check())
    assert len(transport.asked) == len(members) * synced
    assert all(event == "dialled_back" for event, _ in said)
    assert all(fields["not_asked"] == dict.fromkeys(members, "refused") for _, fields in said), "each is named"


async def test_eight_that_say_nothing_are_enough() -> None:
    transport = FakeTransport(lambda peer, request: None)
    one, said = asking(transport, *MEMBERS)
    began = asyncio.get_running_loop().time()
    await one.check()
    assert (asyncio.get_running_loop().time() - began) <= 20.0, "patience is lost twice, however many are made up"
    assert len(transport.asked) == len(set(transport.asked)) == MOST_ASKED < len(MEMBERS)
    assert [event for event, _ in said] == ["dialled_back"]


def test_a_busy_member_is_asked_again_and_a_malformed_one_is_not() -> None:
    transport = saying(A=[Busy(3.0, -1), Busy(3.0, -1), NO])
    one, _ = asking(transport, "A")

    async def work() -> None:
        with pytest.raises(UsageError):
            await one.check()
        assert asyncio.get_running_loop().time() == 6.0

    run_virtual(work())
    mute = saying(A=[Busy(3600.0, -1)])
    patient, said = asking(mute, "A")
    run_virtual(patient.check())
    assert 1 < len(mute.asked) < 10 and [event for event, _ in said] == ["dialled_back"]
    assert said[0][1]["not_asked"] == {"A": "busy"}


async def test_a_member_that_is_busy_for_no_time_is_not_asked_at_once() -> None:
    mute = saying(A=[Busy(0.0, -1)])
    one, _ = asking(mute, "A")
    await one.check()
    assert asyncio.get_running_loop().time() >= len(mute.asked) > 1


def test_who_serves_already_asks_nobody() -> None:
    transport = saying(A=[NO])
    one, said = asking(transport, "A")
    one.settle()
    run_virtual(one.check())
    assert not transport.asked and not said


# ---------------------------------------------------------------- being asked


def dialling(**outcomes: Script) -> FakeTransport:
    """A transport that dials as scripted, by host; the others say nothing."""
    transport = FakeTransport()
    transport.dials = lambda peer, address: outcomes.get("a" + address.split("/")[2].replace(".", "_"))
    return transport


async def served(backs: DialBacks, caller: PeerId = ME) -> Answer:
    [answer] = [answer async for answer in backs.serve(caller)]
    return answer


def at(host: str) -> str:
    return f"/ip4/{host}/tcp/31340"


GONE = PeerGone("refused")


def backs_of(transport: FakeTransport, *hosts: str) -> DialBacks:
    return DialBacks(transport, lambda: {ME: record(ME, *map(at, hosts))}, lambda: None)


async def test_a_caller_is_dialled_at_the_addresses_of_its_own_record() -> None:
    transport = dialling(a8_8_8_8=[], a9_9_9_9=GONE, a10_0_0_5=GONE)
    assert await served(backs_of(transport, "9.9.9.9", "8.8.8.8", "1.1.1.1")) == DialledBack(True)
    assert sorted(transport.dialled) == [(ME, at("1.1.1.1")), (ME, at("8.8.8.8")), (ME, at("9.9.9.9"))]
    assert asyncio.get_running_loop().time() < 1.0, "it does not wait for the slow ones"
    both = await served(backs_of(transport, "9.9.9.9", "10.0.0.5"))
    assert isinstance(both, DialledBack) and both.reason.count("9.9.9.9") == both.reason.count("10.0.0.5") == 1
    assert await served(backs_of(transport, "9.9.9.9")) == DialledBack(False, "refused")


async def test_who_answers_too_slowly_is_no_firewall_and_a_private_network_is_not_scouted() -> None:
    transport = dialling(a9_9_9_9=GONE, a10_0_0_5=GONE)
    assert isinstance(await served(backs_of(transport, "9.9.9.9", "8.8.8.8")), Busy)
    answer = await served(backs_of(transport, "10.0.0.5"))
    assert isinstance(answer, DialledBack) and "refused" not in answer.reason


async def test_the_same_caller_and_the_same_address_wait_for_their_turn() -> None:
    transport = dialling(a9_9_9_9=GONE)
    other = PeerId("other")
    records = {ME: record(ME, at("9.9.9.9")), other: record(other, at("9.9.9.9"))}
    backs = DialBacks(transport, lambda: records, lambda: None)
    assert await served(backs) == DialledBack(False, "refused")
    busy = await served(backs)
    assert isinstance(busy, Busy) and 0.0 < busy.retry_after_s <= 5.0
    assert isinstance(await served(backs, other), Busy), "the address was dialled a moment ago, for somebody else"
    assert len(transport.dialled) == 1
    await asyncio.sleep(5.0)
    assert await served(backs) == DialledBack(False, "refused")


async def test_a_caller_that_is_not_known_yet_is_looked_up_for_a_moment() -> None:
    transport = dialling(a9_9_9_9=[])
    records: dict[PeerId, Record] = {}
    looks: list[float] = []

    def look() -> None:
        looks.append(asyncio.get_running_loop().time())
        if len(looks) == 3:
            records[ME] = record(ME, at("9.9.9.9"))

    backs = DialBacks(transport, lambda: records, look)
    assert await served(backs) == DialledBack(True) and len(looks) == 3
    assert isinstance(await served(backs, PeerId("nobody")), Busy)
    assert len(transport.dialled) == 1


async def test_callers_without_a_record_take_no_slot_and_are_charged() -> None:
    transport = dialling(a9_9_9_9=[])
    looks: list[float] = []
    records = {ME: record(ME, at("9.9.9.9"))}
    backs = DialBacks(transport, lambda: records, lambda: looks.append(asyncio.get_running_loop().time()))
    async with asyncio.TaskGroup() as group:
        strangers = [group.create_task(served(backs, PeerId(f"stranger {number}"))) for number in range(50)]
        await asyncio.sleep(0.1)
        assert await served(backs) == DialledBack(True)
    assert all(isinstance(each.result(), Busy) for each in strangers)
    assert len(looks) < 100, "few are looked for at a time"
    again = await served(backs, PeerId("stranger 0"))
    assert isinstance(again, Busy) and again.retry_after_s > 1.0


async def test_names_of_one_host_are_one_address_and_are_dialled_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = dialling(a9_9_9_9=GONE)

    async def lookup(self: object, host: str, port: int, **_: object) -> list:
        if host.startswith("nowhere"):
            raise OSError("no such name")
        return [(2, 1, 6, "", ("9.9.9.9", port))]

    monkeypatch.setattr(VirtualLoop, "getaddrinfo", lookup)
    names = [PeerId(f"n{number}") for number in range(3)]
    records = {name: record(name, f"/dns4/{name}.example.org/tcp/31340") for name in names}
    backs = DialBacks(transport, lambda: records, lambda: None)
    answers = [await served(backs, name) for name in names]
    assert answers[0] == DialledBack(False, "refused")
    assert all(isinstance(answer, Busy) for answer in answers[1:])
    assert transport.dialled == [(names[0], at("9.9.9.9"))]
    records[ME] = record(ME, "/dns4/nowhere.example.org/tcp/31340")
    answer = await served(backs)
    assert isinstance(answer, DialledBack) and not answer.reached and len(transport.dialled) == 1
