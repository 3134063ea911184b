"""Which replicas vote in a stage, and which commits a replica accepts. Each replica has its own view of it.

A replica is a voter once it has contributed often, until it has neither contributed nor signed for a while: silence and
fresh identities give no vote (`step.contributed`).

| a commit of | a replica accepts it if |
|---|---|
| any stage | it is a *quorum certificate* |
| any stage | most live replicas of another stage that are in touch with this one accept it |

A certificate has the signatures of more than half of the voters, or of the live voters: they hold its aggregate. The
report of another stage helps where all signers have died (docs/protocol.md, Who counts). No replica applies before a
commit of each stage is known: the `Barrier` (rules 16 and 17). Pure.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from swarmnet.ids import NO_RESTART, PeerId, Restart, Signer, mark_of
from swarmnet.messages import (
    FOR_EVER,
    MAX_VOTES,
    Ban,
    BannedPeers,
    Commit,
    Exclusion,
    Finished,
    LatePeers,
    Vote,
    contributors_of,
    first_of,
)
from swarmnet.quorum import has_quorum, minority
from swarmnet.step.commits import Rolls, statement
from swarmnet.step.contributed import Contributors
from swarmnet.step.exclusion import Table, after, remembered
from swarmnet.step.host import StepHost
from swarmnet.step.view import View

_MOST_SUMS = 2
"""Aggregates of one step that one voter may sign: a second one if the first round failed and another is opened."""

_PRESUMED = 15
"""Replicas of a large stage that vote as long as no voter is known, for lack of commits: those of lowest hash."""

_MOST_ODD = 1024
"""Peers that the log names because they believed another commit, each once."""

_ALIKE = 0.02
"""Relative difference of two squared norms that may be of one aggregate, rounded differently."""


_NOBODY = frozenset[PeerId]()

_LONG_AGO = 4
"""Steps: no report of a commit is remembered for longer."""
Votes = dict[Commit, dict[PeerId, bytes]]


class Membership:
    """What one replica of `stage` knows of who counts and of their votes."""

    def __init__(self, me: PeerId, stage: int, view: View, signer: Signer, host: StepHost) -> None:
        self.me, self.stage, self._view, self._signer, self._host = me, stage, view, signer, host
        self.patience_s = 0.0  # what is long here: several usual steps
        self._restart = NO_RESTART
        self._presumed: dict[int, frozenset[PeerId]] = {}  # of large stages
        self._presumed_of: Mapping[int, Set[PeerId]] = {}
        self._counting: dict[int, Contributors] = {}  # of each stage
        self._exclusions: dict[int, Table] = {}  # of other stages as far as their commits were applied here
        self.has_begun = False
        """Have I taken state over and contributed nothing since?"""
        self._lives: dict[PeerId, int] = {}  # of my stage: the incarnation in which it first counted or contributed
        self._votes: dict[tuple[int, int], Votes] = {}
        self._named_signed: dict[tuple[int, PeerId], tuple[LatePeers, BannedPeers]] = {}  # (step, leader)
        self._heard_at: dict[Commit, float] = {}  # its first vote
        self._listed: dict[int, dict[PeerId, frozenset[Commit]]] = {}  # stage -> replica -> the commits it believes
        self.changes = 0
        """How often a vote or another's belief was news: until then only time makes a commit credible."""
        self._given_up: set[Commit] = set()  # sums of the open step
        self._convicted: set[PeerId] = set()
        self.vouched: frozenset[Ban] = frozenset()  # bans that are decided: I sign no others
        self._rosters: dict[int, frozenset[PeerId]] = {}  # as they follow from these two
        self._alone: set[PeerId] = set()  # replicas that accepted what was never committed
        self.rolls = Rolls()

    # ------------------------------------------------------------ who counts

    def roster(self, stage: int) -> frozenset[PeerId]:
        """Who counts in that stage; empty while nothing of it is known."""
        found = self._rosters.get(stage)
        if found is None:
            found = self._rosters[stage] = first_of(self.voters(stage))
        return found

    def voters(self, stage: int) -> Set[PeerId]:
        """All voters of a stage, more than may count: replicas with enough recent contributions, else with any."""
        known = self._known(stage)
        return set(filter(self._of(stage).votes, known)) or known

    @property
    def mates(self) -> Contributors:
        """Who has contributed to my stage, and how often."""
        return self._of(self.stage)

    def _of(self, stage: int) -> Contributors:
        return self._counting.get(stage) or Contributors()

    def _known(self, stage: int) -> Set[PeerId]:
        return self._of(stage).peers - self._convicted

    def latest(self, stage: int) -> list[PeerId]:
        """The same, who has contributed or signed last at the end."""
        return sorted(self.voters(stage), key=lambda peer: (self._of(stage).of(peer).last, peer))

    def presume(self, names: Mapping[int, Set[PeerId]]) -> None:
        """The replicas known of stages of which I hear a few only."""
        # Mostly they are the same as a moment ago.
        if names == self._presumed_of:
            return
        self._presumed_of = names
        self._presumed = {stage: frozenset(sorted(found, key=mark_of)[:_PRESUMED]) for stage, found in names.items()}

    def leaders(self, stage: int) -> frozenset[PeerId]:
        """Of a large stage: who votes, and so may lead."""
        return self.roster(stage) or self._presumed.get(stage, _NOBODY) - self._convicted

    def in_sight(self, stage: int, *, now: float) -> frozenset[PeerId]:
        """The live voters in touch with this replica, and itself: of a large stage they represent it."""
        live = self.live(stage, now=now)
        if stage not in self._view.sparse:
            return live
        return frozenset(
            peer for peer in live if (stage, peer) == (self.stage, self.me) or self._view.get(peer, stage) is not None
        )

    def live(self, stage: int, *, now: float) -> frozenset[PeerId]:
        """The voters that are not lost; without any, those that have contributed, or all that are in touch."""
        view, long_s = self._view, self._view.timers.long_silence_s

        def is_live(peer: PeerId) -> bool:
            return (stage, peer) == (self.stage, self.me) or (
                view.may_live(peer, now=now, stage=stage, within=long_s) and not self._signs_nothing(peer, stage, now)
            )

        for peers in (self.leaders(stage), self._known(stage)):
            if found := frozenset(filter(is_live, peers)):
                return found
        heard = {*view.live(stage, now=now), *({self.me} if stage == self.stage else ())}
        return first_of(heard - (self._convicted - {self.me}))

    def _signs_nothing(self, peer: PeerId, stage: int, now: float) -> bool:
        """Does a replica in touch say that it has no state; or, of another stage, that it has just begun?"""
        seen = self._view.get(peer, stage)
        nothing = seen is not None and (not seen.synced or (seen.new and stage != self.stage))
        return nothing and self._view.in_touch(peer, now=now, stage=stage)

    def is_new(self, peer: PeerId) -> bool:
        """Does no step wait for this replica, as it has contributed too little, ever or since it came back?

        A replica that was killed is still a voter for the others, but not for itself: they must agree on the leader.
        """
        known = self._known(self.stage)
        if peer not in known:
            return bool(known)
        if peer == self.me:
            return peer not in self._lives
        if self.mates.is_new(peer):
            return True
        seen = self._view.get(peer)
        if seen is None:
            return False
        # Of a replica that has contributed nothing since this one started, only its own report is known.
        return self._lives[peer] != seen.incarnation if peer in self._lives else seen.new

    def leads_last(self, peer: PeerId) -> bool:
        """Is this replica new, or has it no vote although others have? Of this one itself others know better."""
        voters = self.voters(self.stage)
        return self.is_new(peer) or (bool(voters) and peer not in {*voters, self.me})

    @property
    def exclusions(self) -> Table:
        """The table of my stage."""
        return self._exclusions.get(self.stage, ())

    def excluded(self, stage: int, step: int) -> list[PeerId]:
        """The peers for which that step of the stage does not wait, the one that was named last first."""
        found = remembered(self._exclusions.get(stage, ()), step)
        return self._fewer_than_half(stage, [each.peer for each in found if step < each.until_step])

    def may_not_lead(self, step: int) -> list[PeerId]:
        """The peers of my stage that were late not long ago, the one that was named last first."""
        return self._fewer_than_half(self.stage, [each.peer for each in remembered(self.exclusions, step)])

    def _fewer_than_half(self, stage: int, peers: list[PeerId]) -> list[PeerId]:
        voters = self.roster(stage)
        out = [peer for peer in peers if peer in voters][: minority(voters)]
        return [peer for peer in peers if peer in out or peer not in voters]

    def idle_since_exclusion(self, step: int) -> list[PeerId]:
        """The peers of my stage that have contributed to no commit since their exclusion ended."""
        found = remembered(self.exclusions, step)
        return [each.peer for each in found if self.mates.of(each.peer).last < each.until_step <= step]

    def restored(self, commits: Iterable[Commit], exclusions: tuple[Exclusion, ...]) -> None:
        """State was taken over, after these commits: a newcomer learns who counts.

        exclusions: of my stage, after these commits.
        """
        commits, self.has_begun = tuple(commits), True
        for commit in commits:
            self.rolls.applied(commit)
        if not self.roster(self.stage):
            self.followed(commits)
        self._exclusions[self.stage] = exclusions

    def followed(self, commits: Sequence[Commit]) -> None:
        """A step is over in which I took no part: of no contributor I know in which life it was."""
        lives, begun = dict(self._lives), self.has_begun
        self.applied(commits)
        self._lives, self.has_begun = lives, begun

    def applied(self, commits: Sequence[Commit], finished: Finished | None = None) -> None:
        """A step is over: who has contributed counts, and who has been silent for long does not.

        finished: the sum of my own stage, if it is here: a commit names only those of its contributors that may count.
        """
        bans = [ban for commit in commits for ban in commit.bans]
        for commit in commits:
            of = self._counting.setdefault(commit.stage, Contributors())
            self._rosters.pop(commit.stage, None)
            signed = self._votes_of(commit).keys()  # those that I have checked
            named = frozenset(self.rolls.of(commit))
            if commit.stage == self.stage:
                named |= contributors_of(finished) if finished is not None else frozenset()
                self._note_lives(named if of.peers else signed | named)
            self.rolls.applied(commit)
            table = self._exclusions[commit.stage] = after(self._exclusions.get(commit.stage, ()), commit, bans)
            until = {each.peer: each.until_step for each in table if each.until_step < FOR_EVER}
            for peer in of.applied(commit, named, signed, until, age=commit.step - self._restart.version):
                if commit.stage == self.stage:
                    self._lives.pop(peer, None)
        self._name_odd(commits)
        for stage, told in self._listed.items():
            self._listed[stage] = {peer: told[peer] for peer in told if self._view.get(peer, stage) is not None}
        self._given_up.clear()
        steps = [commit.step for commit in commits]
        if steps:
            self._votes = {of: found for of, found in self._votes.items() if of[1] >= min(steps)}
            self._named_signed = {of: named for of, named in self._named_signed.items() if of[0] >= min(steps)}
            kept = {commit for found in self._votes.values() for commit in found}
            self._heard_at = {commit: at for commit, at in self._heard_at.items() if commit in kept}

    def _note_lives(self, peers: Iterable[PeerId]) -> None:
        for peer in peers:
            seen = self._view.get(peer)
            self.has_begun &= peer != self.me
            if peer == self.me or seen is not None:
                self._lives[peer] = seen.incarnation if seen is not None else 0

    def _name_odd(self, commits: Iterable[Commit]) -> None:
        """Log, once for each replica, that it believed another commit than the one that the stage made."""
        made = {(commit.stage, commit.step): commit for commit in commits}
        for told in self._listed.values():
            for peer, listed in told.items():
                for commit in listed:
                    of = made.get((commit.stage, commit.step))
                    if of is not None and commit != of and peer not in self._alone and len(self._alone) < _MOST_ODD:
                        self._alone.add(peer)
                        self._host.log(
                            "other_commit", peer=peer, step=commit.step, of=commit.stage, digest=commit.digest.hex()
                        )

    def follow(self, restart: Restart) -> None:
        """The run goes on from another version: nothing said before counts."""
        self._restart = restart
        self._presumed.clear()
        self._presumed_of = {}
        self._exclusions.clear()
        self._named_signed.clear()
        for known in (self._counting, self._lives, self._votes, self._heard_at, self._listed, self._given_up):
            known.clear()
        self._rosters.clear()
        self.rolls.forget()

    # ------------------------------------------------------------ votes

    def sign(self, commit: Commit) -> bytes:
        """My vote for it; empty if I signed another sum of that round, which I hold no more, or if I do not know that
        a ban in it is decided."""
        if not self.vouched.issuperset(commit.bans):
            return b""
        found = self._votes.get((commit.stage, commit.step), {})
        if any(other.id == commit.id and other != commit and self.me in votes for other, votes in found.items()):
            return b""
        self._given_up.discard(commit)
        self.rolls.learn(commit.stage, commit.contributors)
        self._named_signed[commit.step, commit.id.ballot.peer] = commit.late, commit.bans
        return self._signer.sign(statement(commit, self._restart))

    def named_signed(self, step: int, leader: PeerId) -> tuple[LatePeers, BannedPeers] | None:
        """The late and banned peers of the aggregate that I signed last in that step under that leader, if any.

        A leader that could have two aggregates of one step signed that differ in these names alone could commit both:
        the stage would have two chains.
        """
        return self._named_signed.get((step, leader))

    def named_by(self, commit: Commit) -> PeerId:
        """The leader that chose the commit's late peers, as far as I know: who makes an aggregate again names the peers
        that the first leader named."""
        named = (of for of, (late, _) in self._named_signed.items() if of[0] == commit.step and late == commit.late)
        return next((leader for _, leader in named), commit.id.ballot.peer)

    def give_up(self, commit: Commit) -> None:
        """I signed that sum and no longer hold it: my vote no longer counts when I look for a certificate."""
        self._given_up.add(commit)

    def hear_vote(self, commit: Commit, peer: PeerId, signature: bytes, *, now: float) -> bool:
        """Record that vote. False if it is not the peer's, or if the peer signed another sum of the same round."""
        return self._hear_votes(commit, ((peer, signature),), now=now)

    def _hear_votes(
        self, commit: Commit, said: Iterable[tuple[PeerId, bytes]], *, pass_over: bool = False, now: float
    ) -> bool:
        """Record these votes, up to one that is bad. pass_over: continue after those of banned peers."""
        found = self._votes.setdefault((commit.stage, commit.step), {})
        # Once for all: to compare commits and to write a statement takes longer than the rest.
        votes, words = found.get(commit), b""
        for peer, signature in said:
            if votes is not None and votes.get(peer) == signature:
                continue
            counts = peer in self.roster(commit.stage) or peer in self.live(commit.stage, now=now)
            if not counts and peer != self.me:  # I may be back, and count for others before I count for myself
                good = peer not in self._convicted  # it has no say, so what it signs need not be looked at
            else:
                words = words or statement(commit, self._restart)
                good = self._signer.verify(peer, words, signature)
                if good and len(found) > (votes is not None):
                    good = self._signs_once(found, commit, votes, peer)
                if good:
                    if votes is None:
                        votes = found[commit] = {}
                        self._heard_at.setdefault(commit, now)
                    votes[peer] = signature
                    self.changes += 1
            if not good and not (pass_over and peer in self._convicted):
                return False
        return True

    def _signs_once(self, found: Votes, commit: Commit, mine: object, peer: PeerId) -> bool:
        """Has it signed no other aggregate of this round? Else it is banned. Of other rounds the last stays."""
        others = [other for other, votes in found.items() if peer in votes and votes is not mine]
        if any(other.id == commit.id for other in others):
            self.convict(peer, commit.step, "has signed two sums of one round")
            return False
        for other in others[: max(len(others) + 1 - _MOST_SUMS, 0)]:
            del found[other][peer]
            if not found[other]:
                del found[other], self._heard_at[other]
        return True

    def hear(self, commit: Commit, *, now: float) -> bool:
        """Record the votes of a commit. False if one of them is not its voter's: nothing after it is checked.

        A banned peer's vote is skipped: peers that forward the commit need not know the ban. So are the signer-set
        entries of unknown contributors: the next commit that names them tells.
        """
        self.rolls.learn(commit.stage, commit.contributors)
        said = self._votes_in(commit)
        return said is not None and self._hear_votes(commit, said, pass_over=True, now=now)

    def _votes_in(self, commit: Commit) -> tuple[tuple[PeerId, bytes], ...] | None:
        """Who has signed it, as the message says; None if an entry of the signer set is unknown."""
        named = self.rolls.of(commit)
        if named and max(commit.seats, default=0) >= len(named):
            return None
        seated = ((named[seat], of) for seat, of in zip(sorted(commit.seats), commit.signatures, strict=True) if named)
        return (*((vote.peer, vote.signature) for vote in commit.votes), *seated)

    def convict(self, peer: PeerId, step: int, reason: str) -> None:
        """Its fault is proven: it is no voter any more."""
        if peer not in self._convicted:
            self._convicted.add(peer)
            self._rosters.clear()
            self._host.log("convicted", peer=peer, step=step, reason=reason)

    def lists(self, peer: PeerId, stage: int, commits: Iterable[Commit]) -> None:
        """Record that a replica of `stage`, which I hear, believes these commits."""
        if self._view.get(peer, stage) is not None:
            told, found = self._listed.setdefault(stage, {}), frozenset(commits)
            before = told.get(peer)
            if before is not found and before != found:
                told[peer] = found
                self.changes += 1

    def digest_of(self, commits: Sequence[Commit]) -> bytes:
        """What stands for these commits in a heartbeat; b"" for none."""
        words = [statement(commit, self._restart) for commit in sorted(commits, key=lambda c: c.stage)]
        return hashlib.sha256(b"".join(words)).digest()[:16] if words else b""

    def told(self, peer: PeerId, commit: Commit) -> None:
        """Record that a replica that I hear believes this commit, besides what its heartbeats list: it says so."""
        for stage in {stage for stage, known, _ in self._view.known() if known == peer}:
            told = self._listed.setdefault(stage, {})
            others = (
                each
                for each in told.get(peer, ())
                if (each.stage, each.step) != (commit.stage, commit.step) and each.step > commit.step - _LONG_AGO
            )
            told[peer] = frozenset({*others, commit})
            self.changes += 1

    def open_stages(self, step: int) -> set[int]:
        """The stages that may have committed that step."""
        # Most list the same commits as others do.
        lists = {listed for replicas in self._listed.values() for listed in replicas.values()}
        found = {commit.stage for listed in lists for commit in listed if commit.step == step}
        return found | {stage for stage, at in self._votes if at == step}

    def has_told(self, peer: PeerId, stage: int, step: int) -> bool:
        """Have I a replica's word about that stage's commit in a step?"""
        return any(
            (commit.stage, commit.step) == (stage, step)
            for told in self._listed.values()
            for commit in told.get(peer, ())
        )

    def candidates(self, stage: int, step: int) -> list[Commit]:
        """What may have been committed, in no order that a voter could choose."""
        listed = {
            commit
            for replicas in self._listed.values()
            for commits in replicas.values()
            for commit in commits
            if (commit.stage, commit.step) == (stage, step)
        }
        return sorted(listed | self._votes.get((stage, step), {}).keys(), key=lambda c: (c.id, c.digest))

    def with_votes(self, commit: Commit) -> Commit:
        """The same with all votes that I know of, and with the contributors, if I know them."""
        votes, named = self._votes_of(commit), self.rolls.of(commit)
        counting = self.leaders(commit.stage)
        first = sorted(votes, key=lambda peer: (peer not in counting, peer))[:MAX_VOTES]
        seats = [seat for seat, peer in enumerate(named) if peer in first]
        return replace(
            commit,
            contributors=named,
            votes=tuple(Vote(peer, votes[peer]) for peer in first if peer not in named),
            seats=frozenset(seats),
            signatures=tuple(votes[named[seat]] for seat in seats),
        )

    def brief(self, commit: Commit) -> Commit:
        """The same as it is told to those who have applied the step before: mostly they know the contributors."""
        return self.rolls.brief(self.with_votes(commit))

    def certified(self, commit: Commit, *, without: Set[PeerId] = frozenset(), now: float) -> bool:
        """Have more than half of the voters, or of the live ones, signed it?

        If two live, one vote is enough after a long silence in which the other signed nothing else. without: peers
        that no longer hold the sum.
        """
        signed = self._votes_of(commit).keys() - self._convicted - without
        if commit in self._given_up:
            signed -= {self.me}
        roster = self.roster(commit.stage)
        # Most of those who count: no other sum of the step can have that many.
        if has_quorum(signed, roster):
            return True
        if commit.bans:
            return False  # the few that are left when others are away ban no peer
        live = self.live(commit.stage, now=now)
        # The others are lost, and are not waited for for ever. A partition may fork the stage here (docs/protocol.md).
        if has_quorum(signed, live):
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

    def proven(self, commit: Commit, serving: Set[PeerId], *, now: float) -> bool:
        """Is it a certificate for a replica that has no state, and so applies what others have signed?

        serving: the peers that serve the commit's stage, by their records. It is not in touch with all of them yet, and
        the first one in touch must not decide alone.
        """
        roster, here = self.roster(commit.stage), serving | {*self._view.live(commit.stage, now=now)}
        # Those who are not there any more need not have signed.
        left = first_of((here & roster or here) - self._convicted - {self.me})
        good = self.signers(commit, roster | left)
        # The few that are left when others are away ban no peer.
        return has_quorum(good, roster) or (not commit.bans and has_quorum(good, left))

    def signers(self, commit: Commit, among: Set[PeerId]) -> Set[PeerId]:
        """Those of these peers that have signed it, as the message shows."""
        words, votes = statement(commit, self._restart), dict(self._votes_in(commit) or ())
        signed = {peer for peer in among & votes.keys() if self._signer.verify(peer, words, votes[peer])}
        return signed - self._convicted

    def _is_preferred(self, commit: Commit, rivals: Iterable[Commit]) -> bool:
        """Two who live have signed sums that differ in the last digits: neighbours take the one of the lower round."""

        def alike(other: Commit) -> bool:
            return (commit.num_tokens, commit.discarded) == (other.num_tokens, other.discarded) and math.isclose(
                commit.grad_sq_norm, other.grad_sq_norm, rel_tol=_ALIKE
            )

        return commit.stage != self.stage and all(alike(other) and commit.id < other.id for other in rivals)

    def believed(self, commit: Commit, *, now: float) -> bool:
        """May I believe it? If it is certified; or if most of another stage than its own that I hear believe it."""
        if self.certified(commit, now=now):
            return True
        for stage, told in self._listed.items():
            # The word of the commit's own stage is not enough: its replicas can show a certificate.
            if stage != commit.stage:
                live = self.in_sight(stage, now=now)
                if has_quorum({peer for peer in live if commit in told.get(peer, ())}, live):
                    return True
        return False

    def _votes_of(self, commit: Commit) -> Mapping[PeerId, bytes]:
        return self._votes.get((commit.stage, commit.step), {}).get(commit, {})
