"""An owner's and a guest's files, and the commands that write them: nothing is overwritten, errors say what to do."""

from __future__ import annotations

import shlex
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnet.cli.frame import run
from swarmnet.errors import UsageError
from swarmnet.manifest.extension import Extension, Horizon
from swarmnet.manifest.file import load, run_id, to_toml
from swarmnet.manifest.schema import Admission, Manifest
from swarmnet.manifest.terms import RunTerms
from swarmnet.net.admission import MAX_BANNED
from swarmnet.net.admission_files import (
    Owner,
    OwnerStatements,
    OwnPass,
    Token,
    admissions_of,
    new_owner,
    notices_file,
    notices_of,
    owner_key_file,
    write_owner,
)
from swarmnet.net.identity import Identity
from swarmnet.wire.signed import sign, to_text

NOW = 1_800_000_000.0
DAY = 24 * 3600


@pytest.fixture
def owned(tmp_path: Path) -> Path:
    """run.toml of a run by invitation, its owner's key beside it."""
    path = tmp_path / "run.toml"
    owner = new_owner(path)
    write_owner(path, owner)
    path.write_text(to_toml(Manifest(admission=Admission(policy="invite", key=owner.peer))))
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert "Traceback" not in "".join(lines)
    return lines[-1]


# ---------------------------------------------------------------- init


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_init_writes_the_key_once_and_for_its_owner_alone(tmp_path: Path, capsys, force: list[str]) -> None:
    words = ["init", str(tmp_path / "run.toml"), "--data", "corpus:small", "--admission", "invite", *force]
    assert run(words) == 0
    key, manifest = tmp_path / "run.owner.key", load(tmp_path / "run.toml")
    assert mode(key) == 0o600 and manifest.admission.policy == "invite"
    assert Identity.load(key).peer == manifest.admission.key
    assert "keep it safe" in capsys.readouterr().out
    before = key.read_bytes()
    (tmp_path / "run.toml").unlink()
    assert run([*words, "--force"]) == 2 and "run.owner.key: exists already" in last_line(capsys)
    assert key.read_bytes() == before and not (tmp_path / "run.toml").exists()


def test_init_says_what_an_open_run_risks(tmp_path: Path, capsys) -> None:
    assert run(["init", str(tmp_path / "run.toml"), "--data", "corpus:small"]) == 0
    assert "a majority of strangers could stop or change it" in capsys.readouterr().out
    assert load(tmp_path / "run.toml").admission == Admission() and not (tmp_path / "run.owner.key").exists()


# ---------------------------------------------------------------- invite


def test_what_is_printed_is_the_invitation_alone(owned: Path, capsys) -> None:
    guest = Identity.generate().peer
    assert run(["owner", "invite", str(owned), guest, "--roles", "trainer", "--expires", "12h"]) == 0
    printed = capsys.readouterr()
    terms = Token.parse(printed.out).invitation.value
    assert (terms.guest, terms.roles, terms.bearer) == (guest, ("trainer",), False)
    assert "good for peer" in printed.err and "as trainer, until" in printed.err
    assert run(["owner", "invite", "--bearer", str(owned)]) == 0
    printed = capsys.readouterr()
    token = Token.parse(printed.out)
    named = token.invitation.value.guest
    assert Identity.from_seed(token.seed).peer == named and token.invitation.value.uses == 0
    assert f"swarmnet owner ban {owned} {named}" in printed.err
    assert run(["owner", "invite", "--bearer", "--uses", "3", str(owned)]) == 0
    printed = capsys.readouterr()
    assert Token.parse(printed.out).invitation.value.uses == 3 and "(it is a secret), 3 peers at most" in printed.err


def test_with_an_address_it_prints_the_whole_command(owned: Path, capsys) -> None:
    from swarmnet.net.swarm_link import SwarmLink

    at = f"/ip4/203.0.113.7/tcp/31337/p2p/{Identity.generate().peer}"
    assert run(["owner", "invite", str(owned), "--bearer", "--bootstrap", at]) == 0
    words = capsys.readouterr().out.split()
    link = SwarmLink.parse(words[2])
    assert words[:2] == ["swarmnet", "join"] and link.whole_run == run_id(load(owned)) and link.address == at
    assert Token.parse(link.invitation).invitation.value.bearer


PEER = Identity.generate().peer


def test_only_who_has_the_key_invites(owned: Path, capsys) -> None:
    key = owned.with_suffix(".owner.key")
    key.chmod(0o644)
    assert run(["owner", "invite", str(owned), "--bearer"]) == 2 and "run `chmod 600" in last_line(capsys)
    key.unlink()
    assert run(["owner", "invite", str(owned), "--bearer"]) == 2 and "only who has the key" in last_line(capsys)
    Identity.generate().create(key)
    assert run(["owner", "invite", str(owned), "--bearer"]) == 2 and "is another run's key" in last_line(capsys)
    key.write_bytes(b"rubbish")
    assert run(["owner", "invite", str(owned), "--bearer"]) == 2 and "not a libp2p Ed25519 private key" in last_line(
        capsys
    )
    owned.write_text(to_toml(Manifest()))
    assert run(["owner", "invite", str(owned), "--bearer"]) == 2 and "anyone may join this run" in last_line(capsys)


# ---------------------------------------------------------------- more steps


def test_the_owner_extends_an_open_run_too(tmp_path: Path, capsys) -> None:
    path = tmp_path / "run.toml"
    assert run(["init", str(path), "--data", "corpus:small", "--steps", "100", "--owner"]) == 0
    assert "may extend the run" in capsys.readouterr().out
    assert load(path).admission.policy == "open"
    assert run(["owner", "extend", str(path), "--steps", "200"]) == 0
    assert run(["owner", "extend", str(path), "--steps", "300", "--from", "150"]) == 0
    assert run(["owner", "extend", str(path), "--steps", "250", "--from", "150"]) == 0
    assert "it replaces notice 2, unless step 150 is over by then" in capsys.readouterr().out
    known = notices_of(RunTerms.of(load(path)))
    files = OwnerStatements(known, tmp_path / "peer", path)
    assert files.read() == []
    assert known.foreseen(0, Horizon(100)).last == 250 and len(known.known) == 3

    (tmp_path / "peer").mkdir()
    assert files.keep() and not files.keep()
    again = notices_of(RunTerms.of(load(path)))
    theirs = OwnerStatements(again, tmp_path / "peer", None)
    assert theirs.read() == [] and again.mark == known.mark
    # What somebody has changed there is named once.
    forged = replace(
        known.known[0], payload=sign(Extension(known.run, 9, 150, 900), PEER, Identity.generate().sign).payload
    )
    notices_file(path).write_text(to_text(forged), encoding="utf-8")
    (words,) = files.read()
    assert "run.notices: a notice that is not signed by the run's owner" in words and files.read() == []
    assert run(["owner", "extend", str(path), "--steps", "500"]) == 2 and "take that line out" in last_line(capsys)


@pytest.mark.parametrize(
    ("name", "text"), [("notices", "extension:{run}:{owner}:1:9:99:abab"), ("bans", "bans:{run}:{owner}:1::c2ln")]
)
def test_an_owners_file_of_an_earlier_version_is_not_lost_silently(owned: Path, capsys, name: str, text: str) -> None:
    terms = RunTerms.of(load(owned))
    file = owned.with_suffix(f".{name}")
    file.write_text(text.format(run=terms.run, owner=terms.owner))
    words = ["ban", str(owned), PEER] if name == "bans" else ["extend", str(owned), "--steps", "100000"]
    assert run(["owner", *words]) == 2
    line = last_line(capsys)
    assert str(file) in line and "signed for an earlier version" in line and "move the file away and sign again" in line
    known = admissions_of(terms) if name == "bans" else notices_of(terms)
    (refused,) = OwnerStatements(known, None, owned).read()
    assert "signed for an earlier version" in refused


# ---------------------------------------------------------------- a guest's pass


def guest(owned: Path, given: str = "", *, who: Identity, now: float = NOW, role="stage") -> OwnPass:
    manifest = load(owned)
    doors = admissions_of(RunTerms.of(manifest))
    directory = owned.parent / "guest"
    directory.mkdir(exist_ok=True)
    return OwnPass(doors, who, role, directory, given=given, now=now)


@pytest.mark.parametrize("bearer", [False, True])
@pytest.mark.parametrize("as_file", [False, True])
def test_an_invitation_is_needed_once_and_then_kept(owned: Path, bearer: bool, as_file: bool) -> None:
    me = Identity.generate()
    text = (
        Owner(owned, RunTerms.of(load(owned))).invite(None if bearer else me.peer, ["stage"], int(NOW) + 9 * DAY).text
    )
    if as_file:
        (owned.parent / "it").write_text(text + "\n")
    worn = guest(owned, str(owned.parent / "it") if as_file else text, who=me).shown
    assert worn and guest(owned, who=me).shown == worn
    kept = owned.parent / "guest" / f"run-{run_id(load(owned))[:12]}.pass"
    assert mode(kept) == 0o600 and (not bearer or text.rsplit(":", 1)[1] not in kept.read_text())


def test_in_an_open_run_nothing_is_needed_nor_shown(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(to_toml(Manifest()))
    mine = guest(tmp_path / "run.toml", "rubbish", who=Identity.generate())
    assert mine.shown is None and mine.ends == "" and mine.check(now=NOW) is None


def test_the_owner_is_told_how_to_invite_its_own_peer(tmp_path: Path, capsys) -> None:
    path, me = tmp_path / "my run" / "run.toml", Identity.generate()
    assert run(["init", str(path), "--data", "corpus:small", "--admission", "invite"]) == 0
    terms = RunTerms.of(load(path))
    with pytest.raises(
        UsageError, match=r"with the owner's key, which is here, run `swarmnet owner invite '.*' "
    ) as refused:
        OwnPass(admissions_of(terms), me, "stage", tmp_path / "peer", given="", now=time.time(), manifest=path)
    command = shlex.split(str(refused.value).split("`")[1])
    assert command[:5] == ["swarmnet", "owner", "invite", str(path), me.peer]
    capsys.readouterr()
    assert run(command[1:]) == 0
    assert OwnPass(
        admissions_of(terms), me, "stage", tmp_path / "peer", given=capsys.readouterr().out, now=time.time()
    ).shown
    owner_key_file(path).unlink()
    with pytest.raises(UsageError, match=r"ask the run's owner for `swarmnet owner invite run\.toml "):
        OwnPass(admissions_of(terms), me, "stage", tmp_path / "other", given="", now=time.time(), manifest=path)


def test_who_is_not_admitted_is_told_what_to_do(owned: Path) -> None:
    me, owner = Identity.generate(), Owner(owned, RunTerms.of(load(owned)))
    advice = (
        f"ask the run's owner for `swarmnet owner invite run.toml {me.peer} --roles stage`, and start again with --inv"
    )
    for given, line in [
        ("", "it has shown no invitation"),
        (owner.invite(Identity.generate().peer, ["stage"], int(NOW) + DAY).text, "is made out to 12D3"),
        (owner.invite(me.peer, ["trainer"], int(NOW) + DAY).text, "it is invited as trainer, not as stage"),
        (owner.invite(me.peer, ["stage"], int(NOW) - DAY).text, "its invitation ended 2027-01-14"),
    ]:
        with pytest.raises(UsageError) as refused:
            guest(owned, given, who=me)
        assert line in str(refused.value) and advice in str(refused.value)
        assert not (owned.parent / "guest" / f"run-{owner.run[:12]}.pass").exists()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("no-such-file", "--invitation 'no-such-file': no such file, and no invitation"),
        ("peer:abc", "--invitation: does not begin with invitation:"),
        (f"peer:{'ab' * 6}:{PEER}:stage:9:c2ln", "--invitation: signed for an earlier version, and only that reads it"),
        (f"bearer:{'ab' * 6}:{PEER}:stage:9:c2ln:c2ln", "--invitation: signed for an earlier version"),
        ("invitation:c2ln", "--invitation: a damaged invitation: copy all of it"),
    ],
    ids=["no file", "no word", "earlier", "earlier bearer's", "damaged"],
)
def test_what_is_no_invitation_is_refused_in_words(owned: Path, given: str, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        guest(owned, given, who=Identity.generate())


def test_a_pass_of_an_earlier_version_is_named(owned: Path) -> None:
    kept = owned.parent / "guest" / f"run-{run_id(load(owned))[:12]}.pass"
    kept.parent.mkdir()
    kept.write_text(f"peer:{'ab' * 6}:{PEER}:stage:9:c2ln")
    with pytest.raises(UsageError, match=r"\.pass: signed for an earlier version.* start again with --invitation"):
        guest(owned, who=Identity.generate())


@pytest.mark.parametrize("cut", [0, 1, 8])
def test_a_bearers_invitation_without_its_secret_is_damaged(owned: Path, cut: int) -> None:
    text = Owner(owned, RunTerms.of(load(owned))).invite(None, ["stage"], int(NOW) + DAY).text
    with pytest.raises(ValueError, match="a damaged invitation"):
        Token.parse(text.rsplit(":", 1)[0] if cut == 0 else text[:-cut])


def test_another_bearers_secret_is_noticed(owned: Path) -> None:
    owner = Owner(owned, RunTerms.of(load(owned)))
    one, other = (owner.invite(None, ["stage"], int(NOW) + DAY).text for _ in range(2))
    mixed = f"{one.rsplit(':', 1)[0]}:{other.rsplit(':', 1)[1]}"
    with pytest.raises(UsageError, match="its secret does not belong to it"):
        guest(owned, mixed, who=Identity.generate())


def test_a_new_invitation_in_the_same_file_is_taken_up_and_else_the_end_is_the_end(owned: Path) -> None:
    me, owner, file = Identity.generate(), Owner(owned, RunTerms.of(load(owned))), owned.parent / "it"
    file.write_text(owner.invite(me.peer, ["stage"], int(NOW) + 2 * DAY).text)
    mine = guest(owned, str(file), who=me)
    first = mine.shown
    mine.check(now=NOW + 1.5 * DAY)
    assert mine.shown == first
    file.write_text("rubbish")  # half written: the one it has is still good
    mine.check(now=NOW + 1.5 * DAY)
    assert mine.shown == first
    file.write_text(owner.invite(me.peer, ["stage"], int(NOW) + 9 * DAY).text)
    mine.check(now=NOW + 1.5 * DAY)
    assert mine.shown != first
    file.unlink()
    mine.check(now=NOW + 8.5 * DAY)
    with pytest.raises(UsageError, match="its invitation ended"):
        mine.check(now=NOW + 9.1 * DAY)


# ---------------------------------------------------------------- bans


def test_bans_add_up_and_are_lifted(owned: Path, capsys) -> None:
    one, two = Identity.generate().peer, Identity.generate().peer
    manifest = load(owned)
    doors = admissions_of(RunTerms.of(manifest))
    files = OwnerStatements(doors, owned.parent, owned)
    assert files.read() == [] and doors.bans is None
    numbers = []
    for words, banned in (
        (["owner", "ban", str(owned), one, two], {one, two}),
        (["owner", "ban", "--lift", str(owned), one], {two}),
    ):
        assert run(words) == 0
        assert "no peer has it yet" in capsys.readouterr().out
        assert files.read() == [] and set(doors.bans.value.peers) == banned
        numbers.append(doors.bans.value.number)
    assert numbers[0] < numbers[1]
    assert files.keep()
    again = admissions_of(RunTerms.of(manifest))
    theirs = OwnerStatements(again, owned.parent, None)
    assert theirs.read() == [] and again.bans == doors.bans  # a peer remembers
    (owned.parent / f"run-{doors.run[:12]}.bans").write_text("rubbish")
    (words,) = theirs.read()
    assert words.endswith(".bans: does not begin with bans:") and theirs.read() == []


def test_a_full_list_says_so(owned: Path) -> None:
    owner = Owner(owned, RunTerms.of(load(owned)))
    owner.ban([Identity.generate().peer for _ in range(MAX_BANNED)], lift=False, now=NOW)
    with pytest.raises(UsageError, match="bans 128 at most"):
        owner.ban([PEER], lift=False, now=NOW)
