"""Who is admitted to a run by invitation: what is genuine gets in, and every other way is refused with its reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.ids import Chain, PeerId, RunId
from swarmnet.messages import AuditRequest, Fetch, ManifestRequest, Process, SnapshotRequest, Stamp, TrailRequest
from swarmnet.net import admission
from swarmnet.net.admission import (
    MAX_BANNED,
    MAX_CHARS,
    ROLES,
    Admissions,
    Bans,
    Invitation,
    Pass,
    Role,
    invite,
    pass_of,
    role_for,
)
from swarmnet.net.identity import Identity, verify
from swarmnet.statement import SignedMessage
from swarmnet.wire.convert import MAX_INVITATION_CHARS
from swarmnet.wire.fields import Wrong
from swarmnet.wire.signed import from_text, sign, to_bytes, to_text

RUN, OTHER_RUN = RunId("ab" * 32), RunId("cd" * 32)
NOW, END = 1_800_000_000.0, 1_800_003_600
OWNER, ME, OTHER = Identity.generate(), Identity.generate(), Identity.generate()
BEARER = Identity.generate()


def ban(run: RunId, number: int, peers: Iterable[PeerId], by: Identity = OWNER) -> SignedMessage[Bans]:
    return sign(Bans(run, number, tuple(peers)), by.peer, by.sign)


def admissions(**changes) -> Admissions:
    return Admissions(RUN, OWNER.peer, verify, **changes)


def invitation(
    guest: Identity = ME,
    *,
    bearer: bool = False,
    run: RunId = RUN,
    by: Identity = OWNER,
    roles: tuple[Role, ...] = ROLES,
    end: int = END,
) -> Invitation:
    seed = guest.key.private_bytes_raw() if bearer else b""
    return invite(run, guest.peer, roles, end, by.sign, seed=seed)


def shown(mine: Invitation, me: Identity = ME) -> Pass:
    """What `me` makes of an invitation."""
    terms = mine.terms
    return pass_of(mine, RUN, me.peer, Identity.from_seed(mine.seed).sign if terms.bearer else me.sign)


def refusal(text: str, *, peer: PeerId = ME.peer, role: Role | None = "stage", now: float = NOW) -> str:
    """Why a peer that shows this is not admitted; "" if it is."""
    doors = admissions()
    doors.show(peer, text, now=now)
    assert doors.admitted(peer, role, now=now) == (not doors.why_not(peer, role, now=now))
    return doors.why_not(peer, role, now=now)


roles = st.sets(st.sampled_from(ROLES), min_size=1).map(lambda chosen: tuple(r for r in ROLES if r in chosen))
ends = st.integers(0, 10**11)


@given(st.booleans(), roles, ends)
def test_an_invitation_and_its_pass_survive_being_written_and_read(bearer: bool, chosen, end: int) -> None:
    mine = invitation(BEARER if bearer else ME, bearer=bearer, roles=chosen, end=end)
    assert Invitation.parse(f"  {mine.text}\n") == mine and len(mine.text) <= MAX_CHARS
    worn = shown(mine)
    assert Pass.parse(worn.text) == worn and len(worn.text) <= MAX_CHARS
    assert mine.seed not in worn.text.encode() or not bearer
    if bearer:  # the secret is never shown
        assert mine.text.rsplit(":", 1)[1] not in worn.text
        with pytest.raises(ValueError, match="take care which of the two"):
            Pass.parse(mine.text)


def test_both_sides_of_the_wire_agree_on_the_longest_pass() -> None:
    assert MAX_INVITATION_CHARS == MAX_CHARS


@pytest.mark.parametrize("bearer", [False, True], ids=["peer", "bearer"])
def test_whoever_is_invited_is_admitted(bearer: bool) -> None:
    assert refusal(shown(invitation(BEARER if bearer else ME, bearer=bearer)).text) == ""


@pytest.mark.parametrize("bearer", [False, True], ids=["peer", "bearer"])
def test_all_who_hold_one_bearer_invitation_are_one_guest(bearer: bool) -> None:
    doors = admissions()
    for peer in (ME, OTHER):
        doors.show(peer.peer, shown(invitation(BEARER if bearer else peer, bearer=bearer), peer).text, now=NOW)
        assert doors.guest(peer.peer) == (BEARER if bearer else peer).peer
    assert doors.guest(OWNER.peer) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has shown no invitation"),
        ("peer:x", "not an invitation"),
        (shown(invitation(by=OTHER)).text, "not signed by the run's owner"),
        (shown(invitation(run=OTHER_RUN)).text, "is to run cdcdcdcdcdcd, not to abababababab"),
        (shown(invitation(run=RunId(RUN[:12] + "0" * 52))).text, "not signed by the run's owner"),
        (shown(invitation(OTHER)).text, f"made out to {OTHER.peer}"),
        (shown(invitation(end=int(NOW) - 1)).text, "its invitation ended 2027-01-15 07:59 UTC"),
        (shown(invitation(roles=("trainer",))).text, "invited as trainer, not as stage"),
        (shown(invitation(BEARER, bearer=True, by=OTHER)).text, "not signed by the run's owner"),
        (shown(invitation(BEARER, bearer=True), OTHER).text, "not passed on to it"),
    ],
    ids=[
        "none",
        "junk",
        "another owner",
        "another run",
        "a run that begins alike",
        "another peer",
        "ended",
        "another role",
        "another owner of a bearer's",
        "not passed on",
    ],
)
def test_what_is_not_good_is_refused_with_its_reason(text: str, reason: str) -> None:
    assert reason in refusal(text)


def test_a_bearers_chain_has_two_links_and_no_more() -> None:
    """Neither a key that the owner has not signed passes anything on, nor does a guest that was passed one."""
    genuine = invitation(BEARER, bearer=True)
    by_other = pass_of(genuine, RUN, ME.peer, OTHER.sign)
    assert "not passed on" in refusal(by_other.text)
    onwards = Pass(replace(genuine.terms, guest=ME.peer), genuine.signature, ME.sign(genuine.terms.text.encode()))
    assert "not signed by the run's owner" in refusal(onwards.text, peer=OTHER.peer)


def test_a_personal_invitation_does_not_pass_for_a_bearers() -> None:
    """Else its guest could let in others: the kind is signed, too."""
    mine = invitation(ME)
    terms = replace(mine.terms, bearer=True)
    forged = Pass(terms, mine.signature, ME.sign(terms.countersigned(RUN, OTHER.peer)))
    assert "not signed by the run's owner" in refusal(forged.text, peer=OTHER.peer)


@given(st.booleans(), st.data())
def test_no_altered_pass_is_admitted(bearer: bool, data: st.DataObject) -> None:
    text = shown(invitation(BEARER if bearer else ME, bearer=bearer)).text
    at = data.draw(st.integers(0, len(text) - 1))
    letter = data.draw(st.sampled_from(sorted(set("abcXYZ0189:,-_") - {text[at]})))
    assert refusal(text[:at] + letter + text[at + 1 :]) != ""


@given(st.text(max_size=600))
def test_any_text_is_an_invitation_or_a_value_error(text: str) -> None:
    for candidate in (text, f"peer:{text}", f"bearer:{text}", f"bans:{text}"):
        for read in (Invitation.parse, Pass.parse, lambda words: from_text(words, Bans)):
            try:
                read(candidate)
            except ValueError:
                pass


@given(st.integers(-200, 200))
def test_the_end_is_that_of_the_guests_clock_within_the_tolerance(late: int) -> None:
    doors = admissions(tolerance_s=60.0)
    doors.show(ME.peer, shown(invitation()).text, now=NOW)
    assert doors.admitted(ME.peer, "stage", now=END + late) == (late <= 60)


def test_an_open_run_admits_anyone_and_verifies_nothing() -> None:
    def never(peer: PeerId, data: bytes, signature: bytes) -> bool:
        raise AssertionError("verified")

    doors = Admissions(RUN, None, never)
    assert doors.show(ME.peer, "anything", now=NOW) == "" and doors.admitted(ME.peer, "stage", now=NOW)


# ---------------------------------------------------------------- memory


def counting() -> tuple[Admissions, list[PeerId]]:
    """Admissions, and whose signatures were verified."""
    asked: list[PeerId] = []

    def verifies(peer: PeerId, data: bytes, signature: bytes) -> bool:
        asked.append(peer)
        return verify(peer, data, signature)

    return Admissions(RUN, OWNER.peer, verifies), asked


def test_a_pass_is_verified_once_and_a_forged_one_too() -> None:
    doors, asked = counting()
    good, forged = shown(invitation()).text, shown(invitation(OTHER, by=OTHER)).text
    for _ in range(3):
        doors.show(ME.peer, good, now=NOW)
        doors.show(OTHER.peer, forged, now=NOW)
    assert len(asked) == 2


def test_what_is_cheap_to_refuse_is_not_verified() -> None:
    doors, asked = counting()
    for bad in (invitation(OTHER), invitation(run=OTHER_RUN), invitation(end=int(NOW) - 1)):
        assert doors.show(ME.peer, shown(bad).text, now=NOW)
    assert not asked


def test_a_bad_pass_does_not_take_a_good_one_away() -> None:
    doors = admissions()
    doors.show(ME.peer, shown(invitation()).text, now=NOW)
    assert doors.show(ME.peer, shown(invitation(by=OTHER)).text, now=NOW)
    assert doors.admitted(ME.peer, "stage", now=NOW)


def test_a_later_invitation_replaces_the_one_before() -> None:
    doors = admissions()
    doors.show(ME.peer, shown(invitation(roles=("trainer",))).text, now=NOW)
    doors.show(ME.peer, shown(invitation(roles=("stage",), end=END + 9)).text, now=NOW)
    assert doors.admitted(ME.peer, "stage", now=END + 9) and not doors.admitted(ME.peer, "trainer", now=NOW)


def test_memory_is_bounded_and_keeps_those_who_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bearer's holder mints identities: those seen lately stay, newcomers wait; who has gone makes room."""
    monkeypatch.setattr(admission, "MAX_PEERS", 3)
    doors, crowd = admissions(), [Identity.generate() for _ in range(6)]
    letter = invitation(BEARER, bearer=True, end=END + 10**6)
    for guest in crowd:
        doors.show(guest.peer, shown(letter, guest).text, now=NOW)
    assert [doors.admitted(guest.peer, now=NOW) for guest in crowd] == [True] * 3 + [False] * 3
    later = NOW + admission.FORGET_S
    doors.show(crowd[0].peer, shown(letter, crowd[0]).text, now=later)
    doors.show(crowd[5].peer, shown(letter, crowd[5]).text, now=later)
    assert [doors.admitted(guest.peer, now=later) for guest in crowd] == [True, False, False, False, False, True]
    for guest in crowd:
        doors.show(guest.peer, "peer:rubbish", now=later)
    assert len(doors._refused) <= 3


# ---------------------------------------------------------------- bans


def test_a_ban_of_a_peer_and_of_a_bearers_key() -> None:
    doors = admissions()
    letter = invitation(BEARER, bearer=True)
    doors.show(ME.peer, shown(invitation()).text, now=NOW)
    doors.show(OTHER.peer, shown(letter, OTHER).text, now=NOW)
    assert doors.learn(ban(RUN, 1, [ME.peer]))
    assert doors.why_not(ME.peer, now=NOW) == "banned by the run's owner" and doors.admitted(OTHER.peer, now=NOW)
    assert doors.learn(ban(RUN, 2, [BEARER.peer]))
    assert doors.admitted(ME.peer, now=NOW) and not doors.admitted(OTHER.peer, now=NOW)
    newcomer = Identity.generate()
    doors.show(newcomer.peer, shown(letter, newcomer).text, now=NOW)
    assert not doors.admitted(newcomer.peer, now=NOW)  # whoever that bearer's key lets in from now on, too


@pytest.mark.parametrize(
    "bans",
    [
        replace(ban(RUN, 9, [ME.peer], OTHER), key=OWNER.peer),
        ban(OTHER_RUN, 9, [ME.peer]),
        ban(RUN, 9, [ME.peer], OTHER),
        replace(ban(RUN, 9, [OTHER.peer]), payload=ban(RUN, 9, [ME.peer]).payload),
        replace(ban(RUN, 1, [ME.peer]), not_after=9),
    ],
    ids=["forged", "other run", "other owner", "other peers", "other end"],
)
def test_a_list_that_is_not_the_owners_bans_nobody(bans: SignedMessage[Bans]) -> None:
    doors = admissions()
    doors.show(ME.peer, shown(invitation()).text, now=NOW)
    assert not doors.learn(bans) and doors.admitted(ME.peer, now=NOW)


@given(st.permutations([ban(RUN, n, [ME.peer] if n % 2 else []) for n in range(1, 5)]))
def test_the_newest_list_counts_in_whatever_order_they_come(lists) -> None:
    doors = admissions()
    for bans in lists:
        number = bans.value.number
        assert doors.learn(bans) == all(number > earlier.value.number for earlier in lists[: lists.index(bans)])
        assert doors.accepts(bans) == (number == doors.bans.value.number)
    assert doors.bans.value.number == 4


def test_the_longest_list_fits_and_survives_being_written_and_read() -> None:
    bans = ban(RUN, 10**15, [Identity.generate().peer for _ in range(MAX_BANNED)])
    assert from_text(f"{to_text(bans)}\n", Bans) == bans and len(to_bytes(bans)) < 5000
    assert from_text(to_text(ban(RUN, 1, [])), Bans).value.peers == ()
    with pytest.raises(Wrong, match="peers has 129 entries"):
        ban(RUN, 1, [*bans.value.peers, ME.peer])


def test_a_list_of_an_earlier_version_says_so() -> None:
    with pytest.raises(ValueError, match="of an earlier version"):
        from_text(f"bans:{RUN}:{OWNER.peer}:7:{ME.peer}:c2ln", Bans)


# ---------------------------------------------------------------- who may ask what


def test_roles_for_requests() -> None:
    stamp = Stamp(0, 1, Chain("0" * 64))
    assert role_for(Process(0, 0, 0)) is None and role_for(Process(0, 1, 0)) == "stage"
    assert role_for(TrailRequest(stamp)) == "stage" and role_for(Fetch(0, 1, 0, "input", cached=False)) is None
    assert role_for(SnapshotRequest(0, 0)) is None and role_for(ManifestRequest()) is None
    assert role_for(AuditRequest(0, 0, 0, PeerId("mate"))) == "stage"
