"""The manifest by its hash: liars, the silent and the dead are passed over by name, and one honest peer is enough."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, Refused, RejectCode, SwarmError
from swarmnet.ids import PeerId
from swarmnet.manifest.file import override, run_id, to_toml
from swarmnet.manifest.schema import Manifest
from swarmnet.messages import Accepted, Answer, Busy, ManifestData, ManifestRequest, Packed, Rejected, Request, Running
from swarmnet.peer import joining
from swarmnet.peer.joining import fetch_manifest, genuine

MANIFEST = Manifest(name="genuine")
RUN = run_id(MANIFEST)
OTHER = to_toml(override(MANIFEST, ["training.seed=1"]))

SAYS: dict[str, Answer | Exception | None] = {
    "honest": ManifestData(to_toml(MANIFEST)),
    "reformatted": ManifestData("# a comment\n" + to_toml(MANIFEST)),
    "liar": ManifestData(OTHER),
    "junk": ManifestData("/etc/passwd"),
    "newer": ManifestData(to_toml(MANIFEST) + "\n[later]\nkey = 1\n"),
    "trainer": Rejected(RejectCode.NOT_SERVED, "a trainer serves tokens only"),
    "confused": Running(),
    "dead": PeerGone("refused", definite=True),
    "silent": None,
    "busy": Busy(1.0, version=-1),
}


class Scripted:
    """A transport on which every peer says what its name stands for."""

    def __init__(self) -> None:
        self.asked: list[PeerId] = []

    def says(self, peer: PeerId) -> Answer | Exception | None:
        return SAYS[peer]

    def tell(self, peer, message) -> None:
        raise AssertionError("nothing to tell")

    async def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        assert request == ManifestRequest() and not payload
        self.asked.append(peer)
        yield Accepted()
        match self.says(peer):
            case None:
                await asyncio.Event().wait()
            case Exception() as error:
                raise error
            case answer:
                yield answer


def fetch(*peers: str) -> tuple[Manifest | None, list[PeerId], dict[str, SwarmError]]:
    transport, failures = Scripted(), {}

    async def whom() -> list[PeerId]:
        return [PeerId(peer) for peer in peers if peer != "late" or transport.asked]

    on_failure = lambda peer, error: failures.update({peer: error})  # noqa: E731
    found = asyncio.run(fetch_manifest(transport, RUN, whom, on_failure=on_failure))
    return found, transport.asked, failures


def test_one_honest_peer_is_enough_and_the_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "PATIENCE_S", 0.01)
    found, asked, failures = fetch("liar", "junk", "newer", "trainer", "confused", "dead", "silent", "honest", "never")
    assert found == MANIFEST and asked[-1] == "honest"
    assert {peer: type(error) for peer, error in failures.items()} == {
        "liar": BadMessage,
        "junk": BadMessage,
        "newer": BadMessage,
        "trainer": Refused,
        "confused": PeerGone,
        "dead": PeerGone,
        "silent": PeerTimeout,
    }
    assert "manifest of another run" in str(failures["liar"]) and "'liar'" in str(failures["liar"])
    assert "unknown key" in str(failures["newer"]) and "\n" not in str(failures["newer"])


def test_the_first_genuine_answer_ends_it() -> None:
    assert fetch("reformatted", "liar") == (MANIFEST, ["reformatted"], {})


def test_who_appears_meanwhile_is_asked_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SAYS, "late", SAYS["honest"])
    assert fetch("late", "dead", "confused")[:2] == (MANIFEST, ["dead", "late"])


def test_who_is_busy_is_asked_again_and_not_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "BUSY_S", 0.0)
    found, asked, failures = fetch("busy", "dead")
    assert found is None and asked == ["busy", "dead", *["busy"] * (joining._ROUNDS - 1)]
    assert isinstance(failures["busy"], PeerTimeout) and "busy with other newcomers" in str(failures["busy"])

    said = iter([Busy(1.0, version=-1), Busy(1.0, version=-1), SAYS["honest"]])
    monkeypatch.setitem(SAYS, "in a moment", None)
    monkeypatch.setattr(Scripted, "says", lambda self, peer: next(said))
    assert fetch("in a moment")[0] == MANIFEST


def test_nobody_has_it() -> None:
    found, asked, failures = fetch("liar", "dead")
    assert found is None and asked == ["liar", "dead"] == list(failures)
    assert fetch() == (None, [], {})


@given(st.text(max_size=200))
def test_any_text_is_genuine_or_refused(text: str) -> None:
    with pytest.raises(BadMessage):
        genuine(text, RUN, peer=PeerId("liar"))
