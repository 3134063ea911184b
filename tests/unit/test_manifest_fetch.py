"""The manifest by its hash: liars, the silent and the dead are passed over by name, and one honest peer is enough."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, Refused, RejectCode, SwarmError
from swarmnet.ids import PeerId
from swarmnet.manifest.file import override, run_id, to_toml
from swarmnet.manifest.schema import Manifest
from swarmnet.messages import Accepted, Answer, Busy, ManifestData, ManifestRequest, Rejected, Running
from swarmnet.peer import joining
from swarmnet.peer.joining import fetch_manifest, genuine
from swarmnet.testing.doubles import FakeTransport, Script, in_turn

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


def fetch(*peers: str, **says: Script) -> tuple[Manifest | None, list[PeerId], dict[str, SwarmError]]:
    transport, failures = FakeTransport(lambda peer, request: [Accepted(), SAYS[peer]], **says), {}

    async def whom() -> list[PeerId]:
        return [PeerId(peer) for peer in peers if peer != "late" or transport.asked]

    on_failure = lambda peer, error: failures.update({peer: error})  # noqa: E731
    found = asyncio.run(fetch_manifest(transport, RUN, whom, on_failure=on_failure))
    assert {request for _, request in transport.requests} <= {ManifestRequest()} and not any(transport.payloads)
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

    assert fetch("soon", soon=in_turn(SAYS["busy"], SAYS["busy"], SAYS["honest"]))[0] == MANIFEST


def test_nobody_has_it() -> None:
    found, asked, failures = fetch("liar", "dead")
    assert found is None and asked == ["liar", "dead"] == list(failures)
    assert fetch() == (None, [], {})


@given(st.text(max_size=200))
def test_any_text_is_genuine_or_refused(text: str) -> None:
    with pytest.raises(BadMessage):
        genuine(text, RUN, peer=PeerId("liar"))
