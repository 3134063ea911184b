"""Which replicas a joining replica believes about a state that is described to it.

Identities cost nothing, so the number of sources says nothing. Those count that contributed to the commit that led to
the described state, and have signed it:

| what is told | is held against |
|---|---|
| the commits of the step before | the chain of the state, which follows from them |
| the table of exclusions | the digest of the table before, which is in the stage's own commit of that step |
| the contributors | their signatures; of two lists for one chain the one with more of them |
| weights and optimizer state | the descriptions of most contributors that answer (`state.snapshot_fetch`) |

If a source has gone beyond the state, it tells the step's own commits, and their contributors count. If none has
commits to tell, as before the first one and after a restart of the run, no contributor is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Coroutine, Set
from dataclasses import replace
from typing import Any

from swarmnet.errors import BadMessage, Refused, RejectCode
from swarmnet.fetch.driver import HolderCalls, expect, first_answers
from swarmnet.ids import PeerId, next_chain
from swarmnet.messages import Answer, Commit, Rejected, Stamp, StateHeader, TrailRequest, TrailStep
from swarmnet.state.catch_up import next_stamp
from swarmnet.step.commits import digest_of, evidence
from swarmnet.step.exclusion import after
from swarmnet.step.member import Member


class Witnesses:
    """Of states of one stage. equal_bits: replicas of one class have the same weights, bit by bit."""

    def __init__(self, stage: int, member: Member, *, equal_bits: bool) -> None:
        self._stage, self._member, self._equal_bits = stage, member, equal_bits

    async def of(self, calls: HolderCalls, header: StateHeader, sources: Collection[PeerId]) -> frozenset[PeerId]:
        """The contributors that should describe this state alike; none: it is not known who contributed.

        Raises BadMessage if commits contradict the table of exclusions, and Refused if it cannot be told who
        contributed.
        """
        false = BadMessage(RejectCode.MALFORMED, "a table of exclusions that no commit has", version=header.version)
        steps = await self._told(calls, header, sources)
        before = [own for step in steps if (own := self._led_to(header, step)) is not None]
        if not all(self._makes_table(header, step) for step in steps if self._led_to(header, step) is not None):
            raise false
        if not before and not header.version and header.exclusions:
            raise false
        commit, signed = self._most_signed(before or [own for step in steps if (own := self._next(header, step))])
        if commit is not None and not before and commit.table != digest_of(header.exclusions):
            raise false
        classes = Counter(name for peer in sorted(signed) if (name := self._class(peer)))
        usual = next((name for name, _ in classes.most_common(1)), "")
        return frozenset(peer for peer in signed if self._equal_bits and self._class(peer) in ("", usual))

    def _class(self, peer: PeerId) -> str:
        """Of a replica's weights, since others round differently; "": not known."""
        seen = self._member.view.get(peer, self._stage)
        return seen.numerics if seen is not None else ""

    def _stamp(self, header: StateHeader) -> Stamp:
        # A checkpoint may be older than the restart that goes on from it.
        header = replace(header, restart=self._member.restart)
        return next_stamp(header, self._stage, self._member.shape.delay)

    async def _told(self, calls: HolderCalls, header: StateHeader, sources: Collection[PeerId]) -> list[TrailStep]:
        """What the sources say of the step that begins at that state."""
        request = TrailRequest(self._stamp(header))

        def ask(source: PeerId) -> Coroutine[Any, Any, TrailStep | None]:
            def take(answer: Answer) -> TrailStep | None:
                return None if isinstance(answer, Rejected) else expect(answer, TrailStep, source)

            return calls.ask(source, request, take)

        asked = {source: ask(source) for source in sources}
        answers, _ = await first_answers(asked, counts=lambda answer: answer is not None)
        return [step for _, step in sorted(answers.items()) if step is not None]

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

    def _most_signed(self, told: Collection[Commit]) -> tuple[Commit | None, Set[PeerId]]:
        """The commit that most of its contributors have signed, and who they are."""
        signed: dict[Commit, set[PeerId]] = {}
        for commit in told:
            signed.setdefault(commit, set()).update(self._member.membership.signers(commit, {*commit.contributors}))
        ranked = sorted(signed.items(), key=lambda found: -len(found[1]))
        if len(ranked) > 1 and len(ranked[0][1]) == len(ranked[1][1]):
            raise Refused(RejectCode.NOT_READY, "commits name contributors in two ways", step=ranked[0][0].step)
        return ranked[0] if ranked else (None, set())
