"""From a link to a place in the run, over real DHT nodes and real gRPC: liars, newcomers at once, and dead ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hivemind.dht.protocol import DHTProtocol

from swarmnet.config.peer import Caps, PeerConfig
from swarmnet.directory import Record, StageStatus
from swarmnet.errors import RejectCode, UsageError
from swarmnet.ids import Chain, first_chain
from swarmnet.manifest.extension import Extension
from swarmnet.manifest.file import load, override, run_id, to_toml
from swarmnet.manifest.schema import Manifest
from swarmnet.manifest.terms import RunTerms
from swarmnet.messages import ManifestData, ManifestRequest, Rejected, StateHeader
from swarmnet.net.dht_daemon import Daemon, Listen
from swarmnet.net.endpoint import Endpoint, open_endpoint
from swarmnet.net.identity import Identity
from swarmnet.net.swarm_link import SwarmLink
from swarmnet.peer import joining
from swarmnet.peer.joining import PreparedJoin, Tell, prepare_join
from swarmnet.peer.memory_fit import judge, setup_of
from swarmnet.ranks.layout import MeshLayout
from swarmnet.state.disk import CheckpointStore
from swarmnet.testing.doubles import FakeService
from swarmnet.wire.signed import sign, to_text

MANIFEST = Manifest(name="genuine")
RUN = run_id(MANIFEST)
HONEST, LIE = to_toml(MANIFEST), to_toml(override(MANIFEST, ["training.seed=1"]))


def gives(toml: str) -> FakeService:
    """A peer that has a manifest to give, and nothing else."""
    none = Rejected(RejectCode.NOT_SERVED)
    return FakeService(lambda caller, request, payload: ManifestData(toml) if request == ManifestRequest() else none)


@contextlib.asynccontextmanager
async def peers(
    tmp_path: Path, *stages: int, toml: str = HONEST, bootstrap: Sequence[str] = (), manifest: Manifest = MANIFEST
) -> AsyncIterator[list[Endpoint]]:
    """One endpoint a stage that announces it, gives `toml` and serves nothing."""
    found: list[Endpoint] = []
    async with contextlib.AsyncExitStack() as stack:
        for number, stage in enumerate(stages):
            first = (*bootstrap, *(address for end in found[:1] for address in end.directory.maddrs))
            directory = tmp_path / f"stage-{stage}-{number}"
            config = PeerConfig(dir=directory, host="127.0.0.1", bootstrap=first)
            end = await stack.enter_async_context(open_endpoint(RunTerms.of(manifest), config.network, numerics="cpu"))
            await stack.enter_async_context(end.serve(gives(toml)))
            status = StageStatus(stage, 3, first_chain(end.run, stage), synced=True, slots=4)
            await end.directory.publish(replace(end.record(), stages=(status,)))
            found.append(end)
        yield found


def newcomer(directory: Path, *bootstrap: str, stages: tuple[int, ...] = ()) -> PeerConfig:
    return PeerConfig(dir=directory, host="127.0.0.1", bootstrap=bootstrap, stages=stages)


async def placed(config: PeerConfig, invitation: SwarmLink | Manifest, tell: Tell) -> PreparedJoin:
    """The place that is found; the newcomer leaves at once."""
    async with prepare_join(config, invitation, tell) as place:
        return place


def link(end: Endpoint, digits: int = 64) -> SwarmLink:
    return SwarmLink(end.run[:digits], end.directory.maddrs[0])


async def test_a_link_leads_to_the_neediest_stage_and_the_manifest_stays(tmp_path: Path) -> None:
    async with peers(tmp_path, 0, 0, 1, 2, 2) as found:
        told: list[tuple[str, str]] = []
        place = await placed(
            newcomer(tmp_path / "me"), link(found[0], digits=12), lambda name, text: told.append((name, text))
        )
        kept = tmp_path / "me" / f"run-{RUN[:12]}.toml"
        assert place.manifest == MANIFEST == load(kept) and place.config.manifest == kept
        assert place.config.stages == (1,) and place.config.bootstrap == (found[0].directory.maddrs[0],)
        assert [name for name, _ in told] == ["identity", "asking", "swarm", "manifest", "stage"]
        assert told[2][1].startswith(f"run {RUN[:12]}: ") and "its hash is the run's id" in told[3][1]
        assert told[4][1] == "1: stage 1 has the fewest replicas, 1"

        again: list[str] = []
        named = newcomer(tmp_path / "me", stages=(2,))
        place = await placed(named, link(found[1]), lambda name, text: again.append(text))
        assert place.config.stages == (2,) and f"kept in {kept}" in again[3] and again[4] == "2, as you said"
        with pytest.raises(UsageError, match="--stage 3: there is no such stage: the run has stages 0 to 2"):
            await placed(newcomer(tmp_path / "me", stages=(3,)), link(found[1]), lambda name, text: None)


async def test_a_run_that_its_owner_has_extended_is_said_to_have_the_new_steps(tmp_path: Path) -> None:
    owner = Identity.from_seed(b"o" * 32)
    manifest = override(MANIFEST, [f"admission.key={owner.peer}"])
    run = run_id(manifest)
    longer = sign(Extension(run, 1, 5, 7777), owner.peer, owner.sign)
    (tmp_path / "stage-0-0").mkdir()
    (tmp_path / "stage-0-0" / f"run-{run[:12]}.notices").write_text(f"{to_text(longer)}\n")
    told: list[tuple[str, str]] = []
    async with peers(tmp_path, 0, toml=to_toml(manifest), manifest=manifest) as found:
        await placed(newcomer(tmp_path / "me"), link(found[0]), lambda name, text: told.append((name, text)))
    assert ("extended", "by the run's owner, to 7,777 steps") in told


@pytest.mark.parametrize("silent", [False, True])
async def test_what_finds_the_place_serves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: bool) -> None:
    """silent: its daemon does not answer in time when it is to rest; then another one takes its place."""
    started: list[Listen] = []
    start = Daemon.start

    async def never(*_: object, **__: object) -> None:
        raise TimeoutError

    async def counted(identity: Identity, listen: Listen) -> Daemon:
        started.append(listen)
        return await start(identity, listen)

    async with peers(tmp_path, 0, 1, 2) as found:
        monkeypatch.setattr(Daemon, "start", counted)
        asked = link(found[0], digits=12)
        async with prepare_join(newcomer(tmp_path / "me"), asked, lambda *_: None) as place:
            me, directory = place.joined.identity.peer, place.joined.directory
            assert not directory.maddrs and me not in found[0].directory.neighbours, "so far it only asks"
            end = place.joined.endpoint
            async with end.serve(gives(HONEST)):
                assert directory.maddrs and all(me in other.directory.neighbours for other in found)
                await directory.publish(replace(end.record(), trainer=True))
                assert me in {record.peer for record in await found[2].directory.records()}
            if silent:
                monkeypatch.setattr(DHTProtocol, "remove_p2p_handlers", never)
            await directory.rest()
            assert directory._mine is None, "it is announced no more"
            async with place.joined.restarted().endpoint.serve(gives(HONEST)):
                assert directory.maddrs and directory.neighbours
        assert len(started) == 1 + silent


async def test_a_liar_is_named_and_another_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with peers(tmp_path, 0, toml=LIE) as (liar,):
        told: list[str] = []
        with pytest.raises(UsageError, match=r"none of 1 peer gave the .* sent no genuine manifest") as error:
            await placed(newcomer(tmp_path / "me"), link(liar), lambda name, text: told.append(text))
        assert liar.me in str(error.value) and not list((tmp_path / "me").glob("*.toml"))

        async with peers(tmp_path, 1, bootstrap=liar.directory.maddrs) as (honest,):
            monkeypatch.setattr(joining.random, "shuffle", lambda asked: asked.sort(key=lambda peer: peer != liar.me))
            place = await placed(newcomer(tmp_path / "me"), link(honest), lambda name, text: told.append(text))
            assert place.manifest == MANIFEST
            assert any(liar.me in text and "asking another" in text for text in told)


async def test_after_the_end_nobody_joins_but_one_peer_alone_cannot_say_so(tmp_path: Path) -> None:
    async with peers(tmp_path, 0, 1, 1) as found:
        for number, end in enumerate(found):
            record = await own_record(end)
            await end.directory.publish(replace(record, finished=True))
            if number == len(found) - 2:
                place = await placed(newcomer(tmp_path / "me"), link(found[0]), lambda *_: None)
                assert place.config.stages == (2,)
        with pytest.raises(UsageError, match="has finished, nothing is left to compute"):
            await placed(newcomer(tmp_path / "me"), link(found[0]), lambda *_: None)


async def own_record(end: Endpoint) -> Record:
    (record,) = [record for record in await end.directory.records() if record.peer == end.me]
    return record


async def test_newcomers_at_once_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas of two stages and none of the last: five newcomers who see each other make it three each."""
    monkeypatch.setattr(joining, "SETTLE_S", 4.0)  # until the last of five has started its node
    async with peers(tmp_path, 0, 0, 1, 1) as found:
        places: list[PreparedJoin] = []

        async def come(number: int) -> None:
            places.append(await placed(newcomer(tmp_path / f"me-{number}"), link(found[0]), lambda *_: None))

        async with asyncio.TaskGroup() as tasks:
            for number in range(5):
                tasks.create_task(come(number))
        taken = sorted(place.config.stages[0] for place in places)
        assert taken == [0, 1, 2, 2, 2]


async def test_a_checkpoint_in_the_directory_draws_its_owner_back(tmp_path: Path) -> None:
    """At equal need to the stage it has; away from it only where another one is needed more."""
    async with peers(tmp_path, 0, 1, 2) as found:
        store = CheckpointStore(tmp_path / "me", RUN)
        info = store.describe(1, StateHeader(2, Chain("0b" * 32), Chain("0a" * 32), Chain("0c" * 32)), b"weights")
        store.write(info, b"weights")
        told: list[str] = []
        place = await placed(newcomer(tmp_path / "me"), link(found[0]), lambda name, text: told.append(text))
        assert place.config.stages == (1,)
        assert told[-1] == "1: its checkpoint is here, and no stage has fewer replicas than its 1"


async def test_a_newcomer_takes_a_stage_that_fits_its_memory_however_much_another_is_missed(tmp_path: Path) -> None:
    large = override(MANIFEST, ["model.vocab_size=200000"])  # a matrix each in the first and the last stage
    needs = needed_by_stage(large)
    assert needs[1] < min(needs[0], needs[2])
    async with peers(tmp_path, 1, 1, toml=to_toml(large), manifest=large) as found:
        told: list[tuple[str, str]] = []
        lent = Caps(host_gib=(needs[1] + min(needs[0], needs[2])) / 2 / 2**30)
        config = newcomer(tmp_path / "me").model_copy(update={"caps": lent})
        place = await placed(config, link(found[0]), lambda name, text: told.append((name, text)))
        assert place.config.stages == (1,)
        assert told[-1][1].endswith("; 2 of 3 stages do not fit here"), told[-1]
        config = config.model_copy(update={"caps": Caps(host_gib=needs[1] / 2 / 2**30)})
        with pytest.raises(UsageError, match=r"^no stage of the run fits this machine; stage 1 does not fit: it needs"):
            await placed(config, link(found[0]), lambda name, text: None)


def needed_by_stage(manifest: Manifest) -> list[int]:
    """Bytes that a peer on the CPU needs to serve each stage."""
    setup = setup_of(PeerConfig(slots=1), manifest, MeshLayout())
    return [judge(setup, [stage], None).need for stage in range(manifest.cut.stages)]


async def test_a_link_that_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "LOOK_S", 0.5)
    async with peers(tmp_path, 0) as (end,):
        for wanted, words in (
            (SwarmLink("cd" * 32, end.directory.maddrs[0]), "no peer that serves a stage of run cdcdcdcdcdcd"),
            (
                SwarmLink("cd" * 8, end.directory.maddrs[0]),
                "no peer announces a run with an id that begins with cdcdcd",
            ),
            (SwarmLink(RUN, f"/ip4/127.0.0.1/tcp/1/p2p/{end.me}"), "no peer answers at /ip4/127.0.0.1/tcp/1"),
        ):
            with pytest.raises(UsageError, match=words):
                await placed(newcomer(tmp_path / "me"), wanted, lambda name, text: None)
        (tmp_path / "me" / f"run-{RUN[:12]}.toml").write_text(HONEST)  # it has been in the run before
        with pytest.raises(UsageError, match="be the first one back with `swarmnet peer --manifest"):
            await placed(newcomer(tmp_path / "me"), wanted, lambda name, text: None)


async def test_a_dead_address_is_named_where_remembered_peers_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its --dir was in a run that is up: its peers answer, of another run they know nothing."""
    monkeypatch.setattr(joining, "LOOK_S", 3.0)  # longer than one look takes at most
    monkeypatch.setattr(joining, "SILENT_S", 0.2)
    async with peers(tmp_path, 0) as (end,):
        await placed(newcomer(tmp_path / "me"), link(end), lambda name, text: None)
        dead = f"/ip4/127.0.0.1/tcp/1/p2p/{end.me}"
        told: list[tuple[str, str]] = []
        for wanted in (SwarmLink("cd" * 6, dead), SwarmLink("cd" * 32, dead)):
            told.clear()
            with pytest.raises(
                UsageError,
                match=f"(?s)cdcdcdcdcdcd.*no peer answers at {dead}; peers that were met before.*ask for a link",
            ):
                await placed(newcomer(tmp_path / "me"), wanted, lambda *words: told.append(words))
            assert [name for name, _ in told][:4] == ["identity", "asking", "asking", "swarm"]
            assert told[2][1].startswith(f"no peer answers at {dead}; peers that were met before, in this run or")
            assert told[3][1].startswith("no peer announces the run so far; looking for ")
        place = await placed(newcomer(tmp_path / "me"), SwarmLink(RUN[:12], dead), lambda *words: None)
        assert place.manifest == MANIFEST  # into the run that it remembers it finds its way


async def test_a_manifest_file_is_an_invitation_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "LOOK_S", 0.5)
    async with peers(tmp_path, 0, 1) as found:
        config = newcomer(tmp_path / "me", *found[0].directory.maddrs)
        place = await placed(config, MANIFEST, lambda name, text: None)
        assert place.config.stages == (2,) and place.manifest == MANIFEST
        other = override(MANIFEST, ["cut.stages=1"])  # nobody is in that run yet: whoever comes first begins
        place = await placed(config, other, lambda name, text: None)
        assert place.config.stages == (0,) and place.manifest == other
