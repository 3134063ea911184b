"""Whom a hidden peer asks to relay for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarmnet.config.peer import PeerConfig
from swarmnet.directory import Record, StageStatus
from swarmnet.errors import UsageError
from swarmnet.ids import Chain, PeerId, RunId
from swarmnet.manifest.file import run_id
from swarmnet.manifest.schema import Manifest
from swarmnet.manifest.terms import RunTerms
from swarmnet.net import endpoint
from swarmnet.net.admission_files import admissions_of
from swarmnet.net.away import remember
from swarmnet.net.endpoint import Endpoint, own_pass_of
from swarmnet.net.identity import Identity

RUN = RunId("0" * 64)


def test_only_members_that_are_there_and_can_be_dialled_are_asked_to_relay() -> None:
    trainer = Record(RUN, PeerId("feeds"), 7, ("/ip4/192.0.2.1/tcp/1",), (), trainer=True)
    known = (
        trainer,
        replace(trainer, peer=PeerId("serves"), trainer=False, stages=(StageStatus(0, 3, Chain("0" * 64), True),)),
        replace(trainer, peer=PeerId("has left"), finished=True),
        replace(trainer, peer=PeerId("only looks"), trainer=False),
        replace(trainer, peer=PeerId("hidden"), addresses=("/p2p/feeds/p2p-circuit/p2p/hidden",)),
        replace(trainer, peer=PeerId("nowhere"), addresses=()),
    )
    asked: list[PeerId] = []

    async def hide(members: Callable[[], Sequence[PeerId]], say: object) -> bool:
        asked.extend(members())
        return False

    asks = SimpleNamespace(directory=SimpleNamespace(known=lambda: known), transport=SimpleNamespace(hide=hide))
    assert asyncio.run(Endpoint.hide(asks, lambda name, fields: None)) is None  # type: ignore[arg-type]
    assert asked == ["feeds", "serves"]


@pytest.mark.parametrize("given", ["", "invitation:AAAA"])
def test_an_invitation_to_an_open_run_is_said_to_be_of_no_use(
    given: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = PeerConfig(dir=tmp_path, invitation=given).network
    own_pass = own_pass_of(admissions_of(RunTerms.of(Manifest())), Identity.from_seed(b"p" * 32), "stage", network)
    assert own_pass.shown is None
    assert [record.message for record in caplog.records] == (["invitation_unused"] if given else [])


@pytest.mark.parametrize(("before", "said"), [((), 0), (("old",), 1), (("old", "now"), 0)])
def test_a_directory_of_another_run_is_said_in_a_line(
    before: tuple[str, ...],
    said: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise UsageError("far enough")

    manifest = Manifest()
    runs = {"old": run_id(Manifest(name="as it was")), "now": run_id(manifest)}
    for name in before:
        remember(tmp_path, runs[name])
    monkeypatch.setattr(endpoint, "own_pass_of", refuse)

    async def join() -> None:
        async with endpoint.join_run(RunTerms.of(manifest), PeerConfig(dir=tmp_path).network):
            pass

    with pytest.raises(UsageError, match="far enough"):
        asyncio.run(join())
    assert [record.message for record in caplog.records] == ["another_run"] * said
