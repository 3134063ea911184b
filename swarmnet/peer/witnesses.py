"""Which replicas a joining replica believes about a state that is described to it.

Identities cost nothing, so the number of sources says nothing. Those count that contributed to the commit that led to
the described state, or to the next one, and have signed it:

| what is told | is held against |
|---|---|
| the commits of the step before | the chain of the state, which follows from them |
| the table of exclusions | the digest of the table before, which is in the stage's own commit of that step |
| the contributors | their signatures; of several lists the one with most of them |
| weights and optimizer state | the descriptions of most contributors that answer (`state.snapshot_fetch`) |

A source that is at the state tells the commits of the step before; one that has gone beyond tells those of the step
itself. If none has commits to tell, as before the first one and after a restart of the run, no contributor is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Coroutine, Mapping, Set
from dataclasses import replace
from typing import Any

from swarmnet.errors import BadMessage, PeerTimeout, RejectCode
from swarmnet.fetch.driver import HolderCalls, expect, first_answers
from swarmnet.ids import PeerId, next_chain
from swarmnet.messages import Answer, Commit, Rejected, Stamp, StateHeader, TrailRequest, TrailStep
from swarmnet.quorum import has_quorum
from swarmnet.state.catch_up import next_stamp
from swarmnet.state.snapshot_fetch import Named
from swarmnet.step.commits import digest_of, evidence
from swarmnet.step.exclusion import after
from swarmnet.step.member import Member

_GRACE_S, _MOST_S = 3.0, 12.0
"""How much longer than the first source one may take to tell: a fast one must not be the only one. And how long all
may take: one that describes a forged state may promise for ever what led to it."""


class Witnesses:
    """Of states of one stage. equal_bits: replicas of one class have the same weights, bit by bit."""

    def __init__(self, stage: int, member: Member, *, equal_bits: bool) -> None:
        self._stage, self._member, self._equal_bits = stage, member, equal_bits

    async def told(self, calls: HolderCalls, described: Mapping[PeerId, StateHeader]) -> dict[PeerId, TrailStep]:
        """What each source says of the step that begins at the state that it described, and of the one before."""

        def ask(source: PeerId, header: StateHeader) -> Coroutine[Any, Any, TrailStep | None]:
            def take(answer: Answer) -> TrailStep | None:
                return None if isinstance(answer, Rejected) else expect(answer, TrailStep, source)

            return calls.ask(source, TrailRequest(self._stamp(header)), take)

        asked = {source: ask(source, header) for source, header in described.items()}
        found = first_answers(asked, counts=lambda answer: answer is not None, grace_s=_GRACE_S, most_s=_MOST_S)
        answers, late = await found
        for source in late:
            calls.failed(source, PeerTimeout("promises what led to its state", peer=source), after_s=_GRACE_S)
        return {source: step for source, step in answers.items() if step is not None}

    def of(self, header: StateHeader, steps: Collection[TrailStep]) -> Named | None:
        """The contributors that should describe this state alike, by what was told; None: it contradicts itself.

        Raises BadMessage if the commits that led to the state contradict its table of exclusions.
        """
        led_to = [(own, step) for step in steps if (own := self._led_to(header, step)) is not None]
        made_up = header.exclusions and not header.version
        if made_up or not all(self._makes_table(header, step) for _, step in led_to):
            raise BadMessage(RejectCode.MALFORMED, "a table of exclusions that no commit has", version=header.version)
        commits = [own for own, _ in led_to] + [own for step in steps if (own := self._next(header, step))]
        if (signed := self._most_signed(commits, header)) is None:
            return None
        classes = Counter(name for peer in sorted(signed) if (name := self.class_of(peer)))
        usual = next((name for name, _ in classes.most_common(1)), "")
        alike = frozenset(peer for peer in signed if self._equal_bits and self.class_of(peer) in ("", usual))
        return Named(alike, usual)

    def class_of(self, peer: PeerId) -> str:
        """Of a replica's weights, since others round differently; "": not known."""
        seen = self._member.view.get(peer, self._stage)
        return seen.numerics if seen is not None else ""

    def _stamp(self, header: StateHeader) -> Stamp:
        # A checkpoint may be older than the restart that goes on from it.
        header = replace(header, restart=self._member.restart)
        return next_stamp(header, self._stage, self._member.shape.delay)

    def _led_to(self, header: StateHeader, step: TrailStep) -> Commit | None:
        """The stage's commit of the step before, if that led to this state."""
        last = step.last_commits
        whole = [commit.stage for commit in last] == list(range(self._member.shape.num_stages))
        led = whole and next_chain(header.before, evidence(last)) == header.chain
        return last[self._stage] if led else None

    def _makes_table(self, header: StateHeader, step: TrailStep) -> bool:
        own, bans = step.last_commits[self._stage], [ban for commit in step.last_commits for ban in commit.bans]
        made = after(header.exclusions_before, own, bans)
        return (own.table, made) == (digest_of(header.exclusions_before), header.exclusions)

    def _next(self, header: StateHeader, step: TrailStep) -> Commit | None:
        """The stage's commit of the step that begins at this state."""
        at = (self._stage, header.version, self._stamp(header).chain)
        return next((commit for commit in step.commits if (commit.stage, commit.step, commit.chain) == at), None)

    def _most_signed(self, told: Collection[Commit], header: StateHeader) -> Set[PeerId] | None:
        """The contributors in the list that most of them have signed; None: two lists for one step have equally many.

        A peer that signs a commit signs the list in it, so a quorum of it confirms all of it. Lists of the two steps
        count together if they are equally long.
        """
        signed: dict[Commit, set[PeerId]] = {}
        # Most sources tell the same.
        for commit in {(commit, commit.votes, commit.seats, commit.signatures): commit for commit in told}.values():
            signed.setdefault(commit, set()).update(self._member.membership.signers(commit, {*commit.contributors}))
        known = {
            commit: {*commit.contributors} if has_quorum(by, {*commit.contributors}) else by
            for commit, by in signed.items()
        }
        most = max(map(len, known.values()), default=0)
        best = {commit: by for commit, by in known.items() if len(by) == most > 0}
        # A commit after the state that has another table proves nothing against those who describe the state.
        other_table = any(of.step == header.version and of.table != digest_of(header.exclusions) for of in best)
        if other_table or len({of.step for of in best}) < len(best):
            return None
        return {peer for by in best.values() for peer in by}
