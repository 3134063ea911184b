"""A run by invitation over real gRPC and a real DHT: the uninvited and the banned get nowhere, guests everywhere."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from running import train_locally
from test_prepare_join import gives, placed

from swarmnet.config.peer import PeerConfig
from swarmnet.directory import Invitation, Pass, Record, StageStatus
from swarmnet.errors import RejectCode, UsageError
from swarmnet.ids import PeerId, RunId, first_chain
from swarmnet.manifest.file import load, run_id, to_toml
from swarmnet.manifest.schema import Admission, Manifest
from swarmnet.manifest.terms import RunTerms
from swarmnet.messages import (
    Answer,
    Fetch,
    Fetched,
    History,
    HistoryRequest,
    ManifestData,
    ManifestRequest,
    Rejected,
    Request,
)
from swarmnet.net import endpoint
from swarmnet.net.admission import Admissions, Bans
from swarmnet.net.admission_files import Owner, new_owner, write_owner
from swarmnet.net.dht import DhtDirectory
from swarmnet.net.dht_daemon import Listen
from swarmnet.net.dht_node import DhtNode
from swarmnet.net.endpoint import Endpoint, open_endpoint
from swarmnet.net.greeting import Greeter
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import Identity, verify
from swarmnet.net.records import TTL_S, Announcement, bans_key, dht_key, places_of, seal
from swarmnet.net.swarm_link import SwarmLink
from swarmnet.peer.status import run_status
from swarmnet.statement import SignedMessage
from swarmnet.telemetry.figures import Evaluation
from swarmnet.testing.doubles import FakeService
from swarmnet.transport import ReadPayload
from swarmnet.wire.signed import sign, to_bytes
from tests.contracts.transport_contract import LIMIT_S, PROCESS, packed

RUN = RunId("ab" * 32)
OWNER = Identity.generate()
FETCH = Fetch(0, 0, 0, "input", cached=False)


def doors() -> Admissions:
    return Admissions(RUN, OWNER.peer, verify)


def ban(number: int, peers: Sequence[PeerId], by: Identity = OWNER) -> SignedMessage[Bans]:
    return sign(Bans(RUN, number, tuple(peers)), by.peer, by.sign)


def pass_for(who: Identity) -> Pass:
    end = int(time.time()) + 3600
    return sign(Invitation(RUN, who.peer, ("stage",)), OWNER.peer, OWNER.sign, not_after=end * 1000)


# ---------------------------------------------------------------- gRPC


class Guest:
    """A transport with an identity, and what it thinks and shows."""

    def __init__(
        self, book: dict[PeerId, tuple[str, ...]], *, shows: Pass | Literal["its own"] | None = "its own"
    ) -> None:
        self.identity = Identity.generate()
        self.shown = pass_for(self.identity) if shows == "its own" else shows
        self.admissions, self.service, self.asked = doors(), FakeService(), 0
        self.service.answering = self._answer
        self.transport = GrpcTransport(
            self.identity,
            RUN,
            addresses=lambda peer: book.get(peer, ()),
            service=self.service,
            greeter=Greeter(RUN, 60.0, admissions=self.admissions, invitation=lambda: self.shown),
        )

    async def _answer(self, caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
        self.asked += 1
        match request:
            case ManifestRequest():
                yield ManifestData("format = 1")
            case HistoryRequest(since):
                yield History(evaluations=(Evaluation(since, 0.5),))
            case _:
                yield Fetched()

    async def call(self, other: Guest, request: Request = FETCH, payload=()) -> list[Answer]:
        deadline = asyncio.get_running_loop().time() + 10
        answers = self.transport.call(other.identity.peer, request, payload, deadline=deadline)
        return [answer async for answer in answers]


@contextlib.asynccontextmanager
async def pair(**second: str) -> AsyncIterator[tuple[Guest, Guest]]:
    """A guest of the run, and another transport, which shows what it likes."""
    book: dict[PeerId, tuple[str, ...]] = {}
    one, other = Guest(book), Guest(book, **second)
    async with asyncio.timeout(LIMIT_S), one.transport, other.transport:
        book |= {each.identity.peer: each.transport.addresses for each in (one, other)}
        yield one, other


def not_admitted(answers: list[Answer], reason: str) -> bool:
    (answer,) = answers
    return isinstance(answer, Rejected) and answer.code is RejectCode.NOT_ADMITTED and reason in answer.reason


def test_the_uninvited_are_refused_before_their_payload_is_read_and_may_ask_for_the_manifest_and_look_on() -> None:
    async def main() -> None:
        async with pair(shows=None) as (guest, stranger):
            answers = await stranger.call(guest, PROCESS, (packed(50_000_000),))
            assert not_admitted(answers, f"swarmnet owner invite run.toml {stranger.identity.peer}")
            traffic = guest.transport.traffic.rows()
            assert guest.asked == 0 and sum(row.get("received", 0) for row in traffic) == 0, traffic
            assert await stranger.call(guest, ManifestRequest()) == [ManifestData("format = 1")]
            assert await stranger.call(guest, HistoryRequest(3)) == [History(evaluations=(Evaluation(3, 0.5),))]

    asyncio.run(main())


def test_guests_work_together() -> None:
    async def main() -> None:
        async with pair() as (one, other):
            assert await one.call(other) == await other.call(one) == [Fetched()]

    asyncio.run(main())


def test_a_guest_calls_nobody_who_is_not_admitted() -> None:
    """A callee without an invitation does not get to see what a guest would upload."""

    async def main() -> None:
        async with pair(shows=None) as (guest, stranger):
            stranger.admissions.owner = None  # it greets everybody
            assert not_admitted(await guest.call(stranger), "has shown no invitation") and stranger.asked == 0

    asyncio.run(main())


def test_a_banned_peer_is_refused() -> None:
    async def main() -> None:
        async with pair() as (member, convict):
            member.admissions.ban_faulty(convict.identity.peer)
            assert not_admitted(await convict.call(member), "banned for proven faulty work") and member.asked == 0

    asyncio.run(main())


def test_anothers_pass_admits_nobody() -> None:
    async def main() -> None:
        stolen = pass_for(Identity.generate())  # passes are public: records and greetings show them
        async with pair(shows=stolen) as (guest, thief):
            assert not_admitted(await thief.call(guest), "its invitation is made out to") and guest.asked == 0

    asyncio.run(main())


def test_a_ban_takes_effect_on_who_has_greeted_and_a_later_list_lifts_it() -> None:
    async def main() -> None:
        async with pair() as (one, other):
            assert await other.call(one) == [Fetched()]
            one.admissions.learn(ban(1, [other.identity.peer]))
            assert not_admitted(await other.call(one), "banned by the run's owner") and one.asked == 1
            one.admissions.learn(ban(2, []))
            assert await other.call(one) == [Fetched()]

    asyncio.run(main())


# ---------------------------------------------------------------- the DHT


def record(who: Identity, shows: Pass | None) -> Record:
    status = StageStatus(0, 0, first_chain(RUN, 0), synced=True, slots=4)
    return Record(RUN, who.peer, 1, ("/ip4/127.0.0.1/tcp/4000",), (status,), invitation=shows)


@contextlib.asynccontextmanager
async def node(
    *others: DhtDirectory, who: Identity | None = None, run: RunId | None = RUN, **options
) -> AsyncIterator[DhtDirectory]:
    bootstrap = [address for other in others for address in other.maddrs]
    admissions = doors() if run else None
    async with DhtDirectory(
        who or Identity.generate(), run, num_stages=1, bootstrap=bootstrap, admissions=admissions, **options
    ) as directory:
        yield directory


async def peers_in(directory: DhtDirectory) -> set[PeerId]:
    return {found.peer for found in await directory.records()}


def test_records_of_the_uninvited_are_not_read_and_not_stored_by_the_runs_own_nodes() -> None:
    """A node of no run knows no owner: it stores them, and what is read along with them is read all the same."""

    async def main() -> None:
        guest, stranger = Identity.generate(), Identity.generate()
        async with node(run=None) as boot, node(boot, who=guest) as one, node(one, boot) as two:
            announced = record(stranger, "")
            expiry_ms = int((time.time() + TTL_S) * 1000)
            data = seal(Announcement(announced, places_of(announced)[0], expiry_ms, 1), stranger.sign)
            evil = await DhtNode.open(stranger, boot._gate, boot._listen, own_keys=())
            try:
                assert await evil.join([*boot.maddrs, *one.maddrs])
                await one.publish(record(guest, pass_for(guest)))
                key = DHTID.generate(source=dht_key(RUN, "0"))
                stored = [
                    await evil._dht.protocol.call_store(
                        PeerID.from_base58(directory.peer), [key], [data], [expiry_ms / 1000], [stranger.peer]
                    )
                    for directory in (boot, one, two)
                ]
                assert stored == [[True], [False], [False]]
                assert await peers_in(two) == {guest.peer}
            finally:
                await evil.close()

    asyncio.run(main())


def test_bans_spread_from_peer_to_peer_and_are_remembered(tmp_path: Path) -> None:
    async def main() -> None:
        guest, banned = Identity.generate(), Identity.generate()
        first = ban(1, [])
        newest = ban(2, [banned.peer])
        async with node(who=guest, state_dir=tmp_path / "one") as one, node(one, listen=Listen(client=True)) as owner:
            assert await owner.publish_word(newest)
            await one._look_for_words()
            assert one._admissions.bans == newest
            assert not await owner.publish_word(first), "an old list does not come back"
            async with node(one, state_dir=tmp_path / "two") as two:
                assert two._admissions.bans == newest  # heard while it joined
        async with node(state_dir=tmp_path / "two") as alone, node(alone, who=banned) as outcast:
            assert alone._admissions.bans == newest and not alone._admissions.admitted(banned.peer, now=time.time())
            await outcast.publish(record(banned, pass_for(banned)))
            assert await peers_in(alone) == set()
            await alone._look_for_words()  # who remembers tells the DHT again
            await outcast._look_for_words()
            assert outcast._admissions.bans == newest

    asyncio.run(main())


def test_only_the_owners_list_is_kept_under_the_runs_key() -> None:
    async def main() -> None:
        mallory = Identity.generate()
        async with node() as one:
            evil = await DhtNode.open(mallory, one._gate, one._listen, own_keys=())
            try:
                assert await evil.join(one.maddrs)
                forged = replace(ban(9, [one.peer], mallory), key=OWNER.peer)
                own = ban(9, [one.peer], mallory)
                for bans in (forged, own):
                    answer = await evil._dht.protocol.call_store(
                        PeerID.from_base58(one.peer),
                        [DHTID.generate(source=bans_key(RUN))],
                        [to_bytes(bans)],
                        [time.time() + 60],
                        [bans.key],
                    )
                    assert answer == [False] and one._admissions.bans is None
            finally:
                await evil.close()

    asyncio.run(main())


# ---------------------------------------------------------------- a whole swarm


def test_a_local_swarm_by_invitation_trains_as_an_open_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    size = ("--admission", "invite", "--stages", "2", "--replicas", "1", "--steps", "3", "--data", "corpus:small")
    settings = (
        "training.sequence_length=16",
        "training.microbatch_size=1",
        "model.hidden_size=16",
        "model.intermediate_size=32",
        "model.head_dim=8",
        "model.num_heads=2",
        "model.num_layers=2",
    )
    code, printed = train_locally(*size, "--verify", "--out", str(out), settings=settings)
    assert code == 0, printed
    assert "bit-equal" in printed and f"--invitation {out}/run.invitation" in printed
    secret = (out / "run.invitation").read_text().strip().rsplit(":", 1)[1]
    written = [path for path in out.rglob("*") if path.is_file() and path.name != "run.invitation"]
    assert not [path for path in written if secret.encode() in path.read_bytes()]


# ---------------------------------------------------------------- joining


@pytest.fixture
def owned(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    owner = new_owner(path)
    write_owner(path, owner)
    path.write_text(to_toml(Manifest(name="club", admission=Admission(policy="invite", key=owner.peer))))
    return path


@contextlib.asynccontextmanager
async def served(owned: Path) -> AsyncIterator[tuple[Endpoint, Owner]]:
    """A run by invitation with one guest, who serves stage 0."""
    manifest, owner = load(owned), Owner(owned, RunTerms.of(load(owned)))
    letter = owner.invite(None, ["stage"], int(time.time()) + 3600).text
    config = PeerConfig(dir=owned.parent / "host", host="127.0.0.1", manifest=owned, invitation=letter)
    async with (
        open_endpoint(RunTerms.of(manifest), config.network, numerics="cpu") as end,
        end.serve(gives(to_toml(manifest))),
    ):
        status = StageStatus(0, 3, first_chain(owner.run, 0), synced=True, slots=4)
        await end.directory.publish(replace(end.record(), stages=(status,)))
        yield end, owner


def test_join_needs_an_invitation_in_the_link_and_keeps_it(owned: Path) -> None:
    async def main() -> None:
        async with served(owned) as (end, owner):
            config = PeerConfig(dir=owned.parent / "me", host="127.0.0.1", stages=(1,))
            link = SwarmLink(owner.run, end.directory.maddrs[0])
            with pytest.raises(UsageError, match="by invitation, and this peer is not admitted: it has shown no"):
                await placed(config, link, lambda *words: None)
            told: list[tuple[str, str]] = []
            letter = owner.invite(None, ["stage"], int(time.time()) + 3600).text
            place = await placed(config, replace(link, invitation=letter), lambda *words: told.append(words))
            assert place.manifest.name == "club" and any(phase == "invitation" for phase, _ in told)
            assert (await placed(config, link, lambda *words: None)).config.stages == (1,)

    asyncio.run(main())


def test_a_peer_that_is_banned_ends_with_words(owned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "LOOK_S", 0.05)

    async def main() -> None:
        with pytest.raises(BaseExceptionGroup) as ended:
            async with served(owned) as (end, owner), asyncio.timeout(LIMIT_S):
                end.admissions.learn(owner.ban([end.me], lift=False, now=time.time()))
                await asyncio.Event().wait()
        assert ended.group_contains(UsageError, match="not admitted: banned by the run's owner, who alone can")

    asyncio.run(main())


def test_status_says_who_may_join(owned: Path, capsys) -> None:
    async def main() -> None:
        async with served(owned) as (end, _):
            address = end.directory.maddrs[0]
            await asyncio.to_thread(run_status, owned, (address,))
            checked = " ".join(capsys.readouterr().out.split())
            assert f"admission: by invitation of {load(owned).admission.key}, 0 banned" in checked
            await asyncio.to_thread(run_status, run_id(load(owned)), (address,), True)
            assert '"policy": "invite",\n    "checked": false' in capsys.readouterr().out

    asyncio.run(main())
