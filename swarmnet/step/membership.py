"""Who counts in a stage, and which commits it stands by. Each replica has its own view of it.

A mate counts from the first committed sum that it has contributed to, until it has neither contributed nor signed for
a while: silence and fresh identities win nobody a say.

| a commit of | a replica believes it if |
|---|---|
| any stage | it is a *certificate* |
| any stage | most live replicas of another stage that I hear believe it |

A certificate has the signatures of more than half of those who count, or of those of them who live: they hold its sum.
The word of another stage helps where all who signed have died (docs/protocol.md, Who counts). Nobody applies
before a commit of each stage is known: the `Barrier` (rules 16 and 17). Pure.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from swarmnet.ids import NO_RESTART, PeerId, Restart, Signer
from swarmnet.messages import MAX_VOTES, Commit, Finished, Stamp, Vote
from swarmnet.step.actions import Note, note
from swarmnet.step.view import View

_DOMAIN = b"swarmnet vote 1\0"

_STAYS = 32
"""Steps without a contribution or a signature, after which a mate counts no more."""

_MOST_SUMS = 2
"""Sums of one step that one voter may sign. It needs the second when the first round failed and a keeper opens
another."""

MOST_COUNT = 2 * MAX_VOTES - 1
"""Replicas of a stage that count at a time: a commit has room for the votes of more than half of them."""

_PRESUMED = 15
"""Replicas of a large stage that count as long as nobody is known to, for lack of commits: those of lowest hash."""

_MOST_ODD = 1024
"""Peers that the log names because they believed another commit, each once."""

_ALIKE = 0.02
"""Relative difference of two squared norms whose sums may be one, rounded differently."""


def commit_of(stamp: Stamp, finished: Finished) -> Commit:
    """What the holder of that sum would have its stage commit."""
    return Commit(
        stage=stamp.stage,
        step=stamp.step,
        chain=stamp.chain,
        id=finished.id,
        digest=finished.digest,
        num_tokens=finished.num_tokens,
        loss_sum=finished.loss_sum,
        grad_sq_norm=finished.grad_sq_norm,
        voided=finished.voided,
        contributors=tuple(sorted({peer for peer, _, indexes in finished.contributions if indexes})),
        notice=finished.notice,
    )


@functools.lru_cache(maxsize=4096)
def statement(commit: Commit, restart: Restart) -> bytes:
    """What a vote signs: everything of the commit but the votes. The chain stands for run, stage and past."""
    of = hashlib.sha256(_DOMAIN)
    of.update(
        struct.pack(
            "<qqqqqqqdd",
            restart.number,
            restart.version,
            commit.stage,
            commit.step,
            commit.id.ballot.number,
            commit.id.number,
            commit.num_tokens,
            commit.loss_sum,
            commit.grad_sq_norm,
        )
    )
    words = (
        commit.chain,
        commit.id.ballot.peer,
        commit.digest.hex(),
        ",".join(map(str, sorted(commit.voided))),
        *commit.contributors,
        *((commit.notice,) if commit.notice else ()),
    )
    of.update("\0".join(words).encode())
    return of.digest()


class Membership:
    """What one replica of `stage` knows of who counts and of their votes."""

    def __init__(self, me: PeerId, stage: int, view: View, signer: Signer) -> None:
        self.me, self.stage, self._view, self._signer = me, stage, view, signer
        self.patience_s = 0.0  # what is long here: several usual steps
        self.notes: list[Note] = []  # for the log, until they are taken
        self._restart = NO_RESTART
        self._presumed: dict[int, frozenset[PeerId]] = {}  # of large stages
        self._counting: dict[int, dict[PeerId, int]] = {}  # stage -> who counts -> its last step
        self._rosters: dict[int, frozenset[PeerId]] = {}  # what follows from it
        self._lives: dict[PeerId, int] = {}  # of my stage: the incarnation in which it first counted or contributed
        self._votes: dict[tuple[int, int], dict[Commit, dict[PeerId, bytes]]] = {}
        self._heard_at: dict[Commit, float] = {}  # its first vote
        self._listed: dict[
            int, dict[PeerId, frozenset[Commit]]
        ] = {}  # stage -> replica -> the commits that it believes
        self._believers: dict[tuple[int, int], Counter[Commit]] = {}  # the same, by what the commits are of
        self._voted: dict[Commit, tuple[frozenset[PeerId], Commit]] = {}  # with the votes of those who count
        self._given_up: set[Commit] = set()  # sums of the open step
        self._convicted: set[PeerId] = set()
        self._alone: set[PeerId] = set()  # replicas that believed what nobody committed

    # ------------------------------------------------------------ who counts

    def roster(self, stage: int) -> frozenset[PeerId]:
        """Who counts in that stage; empty while nothing of it is known."""
        if (found := self._rosters.get(stage)) is None:
            found = self._rosters[stage] = _first(self._counting.get(stage, {}).keys() - self._convicted)
        return found

    def contributors(self, stage: int) -> Set[PeerId]:
        """All who have contributed lately to sums of a stage, more than may count."""
        return self._counting.get(stage, {}).keys() - self._convicted

    def presume(self, names: Mapping[int, Set[PeerId]]) -> None:
        """The replicas known of stages of which I hear a few only."""
        self._presumed = {stage: frozenset(sorted(found, key=_place)[:_PRESUMED]) for stage, found in names.items()}

    def keepers(self, stage: int) -> frozenset[PeerId]:
        """Of a large stage: who counts, and so may keep."""
        return self.roster(stage) or self._presumed.get(stage, frozenset()) - self._convicted

    def in_sight(self, stage: int, *, now: float) -> frozenset[PeerId]:
        """Those of the live roster that I hear, and I: of a large stage they stand for it."""
        live = self.live(stage, now=now)
        if stage not in self._view.sparse:
            return live
        return frozenset(
            peer for peer in live if (stage, peer) == (self.stage, self.me) or self._view.get(peer, stage) is not None
        )

    def live(self, stage: int, *, now: float) -> frozenset[PeerId]:
        """The members of the roster that are not lost to me; if there are none, all replicas that I hear and can
        call."""
        view = self._view
        found = frozenset(
            peer
            for peer in self.keepers(stage)
            if (stage, peer) == (self.stage, self.me) or not view.unreachable(peer, stage, now=now)
        )
        if found:
            return found
        heard = {*view.live(stage, now=now), *({self.me} if stage == self.stage else ())}
        return _first(heard - (self._convicted - {self.me}))

    def is_new(self, peer: PeerId) -> bool:
        """Must this mate (or I) still contribute before it counts, for the first time or since it came back?

        A replica that was killed still counts for the others, but not for itself: they must agree on who keeps.
        """
        counting = self._counting.get(self.stage, {})
        if peer not in counting or peer in self._convicted:
            return bool(counting.keys() - self._convicted if self._convicted else counting)
        if peer == self.me:
            return peer not in self._lives
        seen = self._view.get(peer)
        if seen is None:
            return False
        # Of a mate that has contributed nothing since I came I know only what it says.
        return self._lives[peer] != seen.incarnation if peer in self._lives else seen.new

    def restored(self, commits: Iterable[Commit]) -> None:
        """State was taken over, after these commits: a newcomer learns who counts, and that it does not yet."""
        if not self.roster(self.stage):
            self.applied(commits)
            self._lives.clear()

    def applied(self, commits: Iterable[Commit]) -> None:
        """A step is over: who has contributed counts, and who has been silent for long does not."""
        self._rosters.clear()
        for commit in commits:
            of = self._counting.setdefault(commit.stage, {})
            signed = self._votes_of(commit).keys()  # those that I have checked
            known = of.keys() | set(commit.contributors)
            if commit.stage == self.stage:
                self._note_lives(set(commit.contributors) if of else signed | set(commit.contributors))
            for peer in set(commit.contributors) | (signed & known if of else signed):
                of[peer] = commit.step
            stale = sorted((step, peer) for peer, step in of.items() if commit.step - step > _STAYS)
            for _, peer in stale[: (len(of) - 1) // 2]:
                del of[peer]
                if commit.stage == self.stage:
                    self._lives.pop(peer, None)
        self._name_odd(commits)
        for stage, told in self._listed.items():
            for peer in [peer for peer in told if self._view.get(peer, stage) is None]:
                self._believes(peer, stage, frozenset())
                del told[peer]
        self._voted.clear()
        self._given_up.clear()
        steps = [commit.step for commit in commits]
        if steps:
            self._votes = {of: found for of, found in self._votes.items() if of[1] >= min(steps)}
            kept = {commit for found in self._votes.values() for commit in found}
            self._heard_at = {commit: at for commit, at in self._heard_at.items() if commit in kept}

    def _note_lives(self, peers: Iterable[PeerId]) -> None:
        for peer in peers:
            seen = self._view.get(peer)
            if peer == self.me or seen is not None:
                self._lives[peer] = seen.incarnation if seen is not None else 0

    def _name_odd(self, commits: Iterable[Commit]) -> None:
        """Log, once for each replica, that it believed another commit than the one that the stage made."""
        made = {(commit.stage, commit.step): commit for commit in commits}
        for told in self._listed.values():
            for peer, listed in told.items():
                for commit in listed:
                    of = made.get((commit.stage, commit.step))
                    if of is None or commit is of or commit == of:
                        continue
                    if peer not in self._alone and len(self._alone) < _MOST_ODD:
                        self._alone.add(peer)
                        self.notes.append(
                            note(
                                "other_commit", peer=peer, step=commit.step, of=commit.stage, digest=commit.digest.hex()
                            )
                        )

    def follow(self, restart: Restart) -> None:
        """The run goes on from another version: nothing said before counts."""
        self._restart = restart
        self._presumed.clear()
        self._rosters.clear()
        for known in (self._counting, self._lives, self._votes, self._heard_at, self._listed, self._given_up):
            known.clear()
        self._believers.clear()
        self._voted.clear()

    # ------------------------------------------------------------ votes

    def sign(self, commit: Commit) -> bytes:
        """My vote for it; empty if I have signed another sum of that round, which I hold no more."""
        found = self._votes.get((commit.stage, commit.step), {})
        if any(other.id == commit.id and other != commit and self.me in votes for other, votes in found.items()):
            return b""
        self._given_up.discard(commit)
        return self._signer.sign(statement(commit, self._restart))

    def give_up(self, commit: Commit) -> None:
        """I signed that sum and no longer hold it: my vote no longer counts when I look for a certificate."""
        self._given_up.add(commit)

    def hear_vote(self, commit: Commit, peer: PeerId, signature: bytes, *, now: float) -> bool:
        """Record that vote. False if it is not the peer's, or if the peer signed another sum of the same round."""
        found = self._votes.setdefault((commit.stage, commit.step), {})
        if found.get(commit, {}).get(peer) == signature:
            return True
        counts = peer in self.roster(commit.stage) or peer in self.live(commit.stage, now=now)
        if not counts and peer != self.me:  # I may be back, and count for others before I count for myself
            return peer not in self._convicted  # it has no say, so what it signs need not be looked at
        if not self._signer.verify(peer, statement(commit, self._restart), signature):
            return False
        others = [other for other, votes in found.items() if peer in votes and other != commit]
        if any(other.id == commit.id for other in others):
            self._convicted.add(peer)
            self._rosters.clear()
            self.notes.append(note("convicted", peer=peer, step=commit.step, reason="has signed two sums of one round"))
            return False
        for other in others[: max(len(others) + 1 - _MOST_SUMS, 0)]:
            del found[other][peer]
            self._voted.pop(other, None)
            if not found[other]:
                del found[other], self._heard_at[other]
        found.setdefault(commit, {})[peer] = signature
        self._voted.pop(commit, None)
        self._heard_at.setdefault(commit, now)
        return True

    def hear(self, commit: Commit, *, now: float) -> bool:
        """Take in the votes of a commit. False if one of them is not its voter's: nothing after it is looked at.

        A convict's vote is passed over: those who tell of the commit need not know.
        """
        # Most were told before: to look for each of them would hash the commit each time.
        known = self._votes_of(commit)
        return all(
            known.get(vote.peer) == vote.signature
            or self.hear_vote(commit, vote.peer, vote.signature, now=now)
            or vote.peer in self._convicted
            for vote in commit.votes
        )

    def lists(self, peer: PeerId, stage: int, commits: Iterable[Commit]) -> None:
        """Record that a replica of `stage`, which I hear, believes these commits."""
        if self._view.get(peer, stage) is not None:
            self._believes(peer, stage, frozenset(commits))

    def digest_of(self, commits: Iterable[Commit]) -> bytes:
        """What stands for these commits in a heartbeat; b"" for none."""
        words = [statement(commit, self._restart) for commit in sorted(commits, key=lambda c: c.stage)]
        return hashlib.sha256(b"".join(words)).digest()[:16] if words else b""

    def told(self, peer: PeerId, commit: Commit) -> None:
        """Record that a replica that I hear believes this commit, besides what its heartbeats list."""
        for stage in {stage for stage, known, _ in self._view.known() if known == peer}:
            told = self._listed.get(stage, {}).get(peer, ())
            others = (each for each in told if (each.stage, each.step) != (commit.stage, commit.step))
            self._believes(peer, stage, frozenset({*others, commit}))

    def _believes(self, peer: PeerId, stage: int, commits: frozenset[Commit]) -> None:
        told = self._listed.setdefault(stage, {})
        before, told[peer] = told.get(peer, frozenset()), commits
        for commit in commits - before:
            self._believers.setdefault((commit.stage, commit.step), Counter())[commit] += 1
        for commit in before - commits:
            of = self._believers[commit.stage, commit.step]
            of[commit] -= 1
            if not of[commit]:
                del of[commit]
            if not of:
                del self._believers[commit.stage, commit.step]

    def candidates(self, stage: int, step: int) -> list[Commit]:
        """What may have been committed, in no order that a voter could choose."""
        listed, voted = self._believers.get((stage, step)), self._votes.get((stage, step))
        if not listed and not voted:
            return []
        return sorted({*(listed or ()), *(voted or ())}, key=lambda c: (c.id, c.digest))

    def with_votes(self, commit: Commit) -> Commit:
        """The same with all votes that I know of."""
        counting = self.keepers(commit.stage)
        made = self._voted.get(commit)
        # It is told to many.
        if made is not None and made[0] == counting:
            return made[1]
        votes = self._votes_of(commit)
        first = sorted(votes, key=lambda peer: (peer not in counting, peer))[:MAX_VOTES]
        found = replace(commit, votes=tuple(Vote(peer, votes[peer]) for peer in first))
        self._voted[commit] = counting, found
        return found

    def certified(self, commit: Commit, *, without: Set[PeerId] = frozenset(), now: float) -> bool:
        """Have more than half of the roster, or of its live members, signed it?

        If two live, one vote is enough after a long silence in which the other signed nothing else. without: peers
        that no longer hold the sum.
        """
        signed = self._votes_of(commit).keys() - self._convicted - without
        if commit in self._given_up:
            signed -= {self.me}
        roster = self.roster(commit.stage)
        # Most of those who count: no other sum of the step can have that many.
        if 2 * len(signed & roster) > len(roster):
            return True
        live = self.live(commit.stage, now=now)
        # The others are lost, and nobody waits for them for ever. A cut may fork the stage here (docs/protocol.md).
        if 2 * len(signed & live) > len(live):
            return True
        if len(live) != 2 or not signed & live:
            return False
        others = self._votes.get((commit.stage, commit.step), {})
        rivals = [other for other, votes in others.items() if votes.keys() & (live - signed)]
        # Of two who live each has signed its own sum.
        if rivals:
            return self._is_preferred(commit, rivals)
        if self.me in live and commit.stage == self.stage and self.me not in signed:
            return False  # I live, and will sign what I hold myself
        return now - self._heard_at[commit] > max(self.patience_s, self._view.timers.long_silence_s)

    def _is_preferred(self, commit: Commit, rivals: Iterable[Commit]) -> bool:
        """Two who live have signed sums that differ in the last digits: neighbours take the one of the lower round."""

        def alike(other: Commit) -> bool:
            return (commit.num_tokens, commit.voided) == (other.num_tokens, other.voided) and math.isclose(
                commit.grad_sq_norm, other.grad_sq_norm, rel_tol=_ALIKE
            )

        return commit.stage != self.stage and all(alike(other) and commit.id < other.id for other in rivals)

    def believed(self, commit: Commit, *, now: float) -> bool:
        """May I believe it? If it is certified; or, for another stage, if most of a stage that I hear believe it."""
        if self.certified(commit, now=now):
            return True
        for stage, told in self._listed.items():
            live = self.in_sight(stage, now=now)
            # The word of the commit's own stage is not enough: its replicas can show a certificate.
            if stage != commit.stage and 2 * sum(commit in told.get(peer, ()) for peer in live) > len(live) > 0:
                return True
        return False

    def _votes_of(self, commit: Commit) -> Mapping[PeerId, bytes]:
        return self._votes.get((commit.stage, commit.step), {}).get(commit, {})


@functools.lru_cache(maxsize=4096)
def _place(peer: PeerId) -> bytes:
    return hashlib.sha256(peer.encode()).digest()


def _first(peers: Set[PeerId]) -> frozenset[PeerId]:
    """These peers; if they are too many, the same selection at every replica."""
    return frozenset(peers if len(peers) <= MOST_COUNT else sorted(peers, key=_place)[:MOST_COUNT])


# ---------------------------------------------------------------- the commits of one step


class Barrier:
    """Collects one commit per stage of `step`. The first one heard of another stage stands: forks are equal."""

    def __init__(self, step: int, num_stages: int) -> None:
        self.step, self.num_stages = step, num_stages
        self._commits: dict[int, Commit] = {}
        self._known: tuple[Commit, ...] | None = None  # in order, until another comes

    def add(self, commit: Commit) -> bool:
        """Take in a commit. Returns True if it is news."""
        if commit.step != self.step or not 0 <= commit.stage < self.num_stages or commit.stage in self._commits:
            return False
        self.replace(commit)
        return True

    def replace(self, commit: Commit) -> None:
        """Let this commit stand for its stage, whatever was known."""
        self._commits[commit.stage], self._known = commit, None

    def of(self, stage: int) -> Commit | None:
        """The commit of one stage, if known."""
        return self._commits.get(stage)

    @property
    def known(self) -> tuple[Commit, ...]:
        """Commits known so far, in stage order."""
        if self._known is None:
            self._known = tuple(self._commits[stage] for stage in sorted(self._commits))
        return self._known

    @property
    def complete(self) -> bool:
        """All stages have committed."""
        return len(self._commits) == self.num_stages


def evidence(commits: Iterable[Commit]) -> bytes:
    """Hash of what an optimizer step depends on: the sums, counts and notices, not who made them.

    Round ids stay out, so two keepers that committed the same sum leave the same chain behind.
    """
    digest = hashlib.sha256()
    for commit in sorted(commits, key=lambda c: c.stage):
        digest.update(
            struct.pack("<qqqdd", commit.stage, commit.step, commit.num_tokens, commit.loss_sum, commit.grad_sq_norm)
        )
        digest.update(commit.digest)
        digest.update(",".join(map(str, sorted(commit.voided))).encode())
        digest.update(commit.notice.encode())
    return digest.digest()
