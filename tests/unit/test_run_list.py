"""A signed list of runs: what is in it is what the signer wrote, whoever hosts it."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.cli import serve
from swarmnet.cli.frame import run
from swarmnet.errors import UsageError
from swarmnet.net.identity import Identity
from swarmnet.net.run_list import MAX_RUNS, ListedRun, RunList, fetch
from swarmnet.net.swarm_link import SwarmLink

SIGNER = Identity.from_seed(b"1" * 32)
NODE = Identity.from_seed(b"2" * 32).peer
LINK = f"swarm:{'ab' * 32}@/ip4/203.0.113.7/tcp/31337/p2p/{NODE}"
TOML = f'[[runs]]\nname = "books"\nlink = "{LINK}"\nabout = "100M on old books"\n'
LIST = RunList(SIGNER.peer, 1_764_000_000, (ListedRun("books", SwarmLink.parse(LINK), "100M on old books"),))
TEXT = LIST.text(SIGNER.sign)


def test_who_runs_publish_is_who_signed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "public.toml"
    path.write_text(TOML)
    assert run(["publish", str(path)]) == 0 and run(["publish", str(path)]) == 0  # the same key again
    address = capsys.readouterr().out.split("swarmnet join ")[-1].split(",")[0]
    assert run(["join", address]) == 0
    said = capsys.readouterr().out
    assert "books  100M on old books" in said and f"{address}#books" in said
    assert str(serve._listed(f"{address}#books")) == LINK
    assert run(["join", f"{address}#films"]) == 2
    assert "the list has no run 'films'; it has books" in capsys.readouterr().err


def test_another_key_or_host_changes_nothing(tmp_path: Path) -> None:
    assert RunList.parse(TEXT, SIGNER.peer) == LIST
    with pytest.raises(UsageError, match=f"not signed by {NODE}"):
        RunList.parse(TEXT, NODE)
    other = RunList(SIGNER.peer, 1, ()).signed
    with pytest.raises(UsageError, match="not signed by"):
        RunList.parse(f"{other}signature\t{TEXT.rpartition('signature')[2].strip()}\n", SIGNER.peer)
    (tmp_path / "list").write_text(TEXT.replace("old", "new"))
    with pytest.raises(UsageError, match="not signed by"):
        fetch(f"runs:{SIGNER.peer}@{tmp_path / 'list'}")


@given(st.integers(0, len(TEXT) - 2), st.characters(max_codepoint=127))
def test_no_character_can_be_another(at: int, char: str) -> None:
    changed = f"{TEXT[:at]}{char}{TEXT[at + 1 :]}"
    try:
        assert RunList.parse(changed, SIGNER.peer) == LIST and changed.rpartition("\t")[0] == TEXT.rpartition("\t")[0]
    except UsageError:
        assert changed != TEXT


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("", "write [[runs]]"),
        ("[[runs]]\nname = 'a'\n", "write [[runs]]"),
        ("runs = 3\n", "write [[runs]]"),
        (TOML.replace("about", "abut"), "there is no 'abut'"),
        (TOML.replace("books", "Old Books"), "is no name of a run"),
        (TOML.replace("100M", "\\u001b[2J"), "printable characters"),
        (TOML.replace("ab" * 32, "ab" * 8), "the whole run id"),
        (TOML * 2, "a name of its own"),
        (TOML.replace("swarm:", "swam:"), "is not a link"),
    ],
)
def test_bad_lists_are_one_line(toml: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "public.toml"
    path.write_text(toml)
    assert run(["publish", str(path)]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and not path.with_suffix(".runs").exists()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("runs:", "a list of runs is runs:SIGNER@FILE"),
        (f"runs:{NODE}@", "a list of runs is runs:SIGNER@FILE"),
        (f"runs:{NODE}@/nowhere/public.runs", "cannot be read"),
        (f"runs:{NODE}@https://127.0.0.1:1/public.runs", "cannot be read"),
        (f"runs:{NODE}@{__file__}", "it is no list of runs"),
    ],
)
def test_bad_addresses_are_one_line(address: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["join", address]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_a_list_has_an_end() -> None:
    many = RunList(SIGNER.peer, 1, LIST.runs * (MAX_RUNS + 1))
    with pytest.raises(UsageError, match="no list of runs"):
        RunList.parse(many.text(SIGNER.sign), SIGNER.peer)


def test_what_a_host_sends_in_place_of_a_list_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [b"\x1b]0;owned\x07\r\n\r\n", b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/x\r\n\r\n"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            for answer in answers:
                caller, _ = server.accept()
                with caller:
                    caller.recv(4096)
                    caller.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        for _ in answers:
            assert run(["join", f"runs:{NODE}@http://127.0.0.1:{port}/public.runs"]) == 2
            said = capsys.readouterr().err
            assert "cannot be read" in said and said.count("\n") == 1 and "\x1b" not in said
        thread.join()
