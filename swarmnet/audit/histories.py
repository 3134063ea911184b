"""What receipts of several replicas prove together: each signed history of a stage.

A receipt proves only what its signers signed. Any key can sign receipts of any run, so nothing here shows which of two
histories happened.

| a receipt | is of the same history as |
|---|---|
| that follows in the chain | the step before |
| after missing steps | what ends before them, if one peer has signed on both sides |
| after a restart | what it branches from at that version; what comes after that there is given up |
| on the chain of others | another one: from there on it is another history |

A restart gives up nothing unless half of those who signed what it gives up have signed what comes after it.

Signers sign the chain, which begins with the run: a history without its first step may be of any run.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmnet.audit.case import Verify, needs_no_recheck
from swarmnet.audit.evidence import Evidence
from swarmnet.audit.receipts import Receipt
from swarmnet.ids import NO_CHAIN, Chain, PeerId, first_chain, next_chain
from swarmnet.messages import Commit, Stamp
from swarmnet.quorum import blocks

Digested = Callable[[Iterable[Commit]], bytes]
"""What of a step's commits goes into the chain (`step.commits.evidence`)."""


@dataclass(slots=True)
class MemberTally:
    """What one member counted in one stage."""

    steps: int = 0
    """In which it counted a microbatch."""
    microbatches: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Stretch:
    """Steps in a row."""

    first: int
    steps: int
    signers: frozenset[PeerId]


@dataclass(slots=True)
class StageHistory:
    """One history of a stage."""

    stage: int
    own: Stretch
    """What no other history of the stage has."""
    files: list[str]
    """Who told that part."""
    given_up: list[Stretch] = field(default_factory=list)
    """What each of its restarts gave up, and which is not counted; the first restart first."""
    steps: int = 0
    tokens: int = 0
    """Of the commits: the sum over its members."""
    linked: int = 0
    """The number of steps with commits that the next receipt's chain proves."""
    missing: int = 0
    """Steps between the first and the last one without a receipt."""
    tallies: dict[PeerId, MemberTally] = field(default_factory=dict)
    receipts: dict[int, Receipt] = field(default_factory=dict)
    """What is counted, by step."""

    @property
    def run_proven(self) -> bool:
        """Did those who signed its first step sign that it is of this run?"""
        first = self.receipts[min(self.receipts)]
        return first.stamp.chain == first_chain(first.run, self.stage)


@dataclass(frozen=True, slots=True)
class NamedFault:
    """A fault of a member that evidence names."""

    stage: int
    step: int
    proven: bool
    """Of this history; else only the file states its run, or the verifiers."""


@dataclass(slots=True)
class Account:
    """What receipts prove together."""

    histories: list[StageHistory] = field(default_factory=list)
    """By stage; of a stage, that of the most signers first."""
    refused: list[str] = field(default_factory=list)
    """What was not counted, in words."""

    @property
    def contested(self) -> list[int]:
        """The stages with more than one history."""
        stages = [history.stage for history in self.histories]
        return sorted({stage for stage in stages if stages.count(stage) > 1})

    @property
    def of_any_run(self) -> list[int]:
        """The stages with a history of which nothing proves the run."""
        return sorted({history.stage for history in self.histories if not history.run_proven})


@dataclass(slots=True, eq=False)
class _Step:
    """A step, as these files tell it."""

    receipt: Receipt
    digest: bytes
    """Of its commits, as it goes into the chain."""
    signers: frozenset[PeerId] = frozenset()
    files: set[str] = field(default_factory=set)
    parent: _Step | None = None
    """The last one before it; steps between the two are missing if its chain does not prove that."""
    before: Chain = NO_CHAIN
    """Of the version before it."""
    known: frozenset[PeerId] = frozenset()
    """Who has signed this or anything before."""
    children: list[_Step] = field(default_factory=list)

    @property
    def at(self) -> Stamp:
        return self.receipt.stamp

    @property
    def pledged(self) -> object:
        """What its signers have signed."""
        return self.at, self.receipt.finished.digest, self.receipt.shares

    def follow(self, parent: _Step) -> None:
        self.parent = parent
        self.known = parent.known if self.signers <= parent.known else parent.known | self.signers
        parent.children.append(self)

    def path(self) -> Iterator[_Step]:
        """From here back to the first one."""
        at: _Step | None = self
        while at is not None:
            yield at
            at = at.parent


def account(told: Iterable[tuple[str, Receipt]], verify: Verify, digested: Digested) -> Account:
    """Prove receipts of one run, of any replicas. told: file, and a receipt in it."""
    refused: list[str] = []
    steps: dict[tuple[Any, ...], _Step] = {}
    for file, receipt in told:
        at, digest, tokens = receipt.stamp, digested(receipt.commits), tuple(sorted(receipt.tokens.items()))
        if why := receipt.refusal(verify):
            refused.append(_refused(file, receipt, why))
            continue
        key = at.stage, at.step, at.restart, at.chain, digest, receipt.finished.digest, receipt.shares, tokens
        step = steps.setdefault(key, _Step(receipt, digest))
        step.signers |= receipt.signers
        step.files.add(file)
    # Sorted, so that the order of the files changes nothing.
    stages = itertools.groupby((steps[key] for key in sorted(steps)), key=lambda step: step.at.stage)
    return Account([history for _, of in stages for history in _histories(list(of), refused)], refused)


def _refused(file: str, receipt: Receipt, why: str) -> str:
    return f"{file}: stage {receipt.stamp.stage} step {receipt.stamp.step}: {why}"


def _signers(steps: Iterable[_Step]) -> frozenset[PeerId]:
    return frozenset().union(*(step.signers for step in steps))


# ---------------------------------------------------------------- what follows what


def _histories(steps: list[_Step], refused: list[str]) -> list[StageHistory]:
    """Of one stage; steps: the lowest first."""
    _join(steps)
    steps = _without_changed(steps, refused)
    _bridge(steps)
    paths = {end: list(end.path())[::-1] for end in steps if not end.children}
    lost = _given_up(paths)
    uses = Counter(step for end in paths.keys() - lost.keys() for step in paths[end])
    # Of each history what its restarts gave up, and what had been given up before that.
    gone: dict[_Step, dict[_Step, set[_Step]]] = {end: defaultdict(set) for end in paths}
    for end, to in lost.items():
        last = to
        while last in lost:
            last = lost[last]
        gone[last][to] |= set(paths[end]) - set(paths[to])
    made = [
        _history(path, [step for step in path if uses[step] == 1], gone[end].values())
        for end, path in paths.items()
        if end not in lost
    ]
    return sorted(made, key=lambda history: (-len(history.own.signers), -history.steps))


def _join(steps: list[_Step]) -> None:
    """Find the step before each, by its chain."""
    by_step: dict[int, list[_Step]] = defaultdict(list)
    for step in steps:
        by_step[step.at.step].append(step)
    for step in steps:
        later = {after.at.chain for after in by_step.get(step.at.step + 1, ())}
        parents = {
            parent: before
            for parent in by_step.get(step.at.step - 1, ())
            if _is_older(parent.at, step.at) and (before := _joins(parent, step, later))
        }
        step.before, step.known = step.at.chain, step.signers
        if parents:
            # Others contributed, as they say, to the same aggregate: each goes on from what it signed itself.
            parent = max(parents, key=lambda of: (len(of.known & step.signers), -len(of.known), len(of.files)))
            step.before = parents[parent]
            step.follow(parent)


def _joins(parent: _Step, step: _Step, later: set[Chain]) -> Chain | None:
    """The chain of the version before `step`, if `step` follows `parent`. later: those of the steps after it."""
    after = next_chain(parent.before, parent.digest)
    # Where steps overlap, a step names the chain of a version earlier.
    if step.at.chain in (after, parent.before):
        return after
    # Then nothing tells what was before the first one; the step after the second says it.
    after = next_chain(step.at.chain, parent.digest)
    return after if parent.parent is None and after in later else None


def _is_older(old: Stamp, new: Stamp) -> bool:
    """Did the run not go back between them, or to a version after `old`?"""
    return old.restart == new.restart or (old.restart < new.restart and old.step < new.restart.version)


def _without_changed(steps: list[_Step], refused: list[str]) -> list[_Step]:
    """Drop a step if its own signers continued from other commits: a commit is signed only by continuing from it."""
    went_on: dict[object, frozenset[PeerId]] = defaultdict(frozenset)
    for step in steps:
        went_on[step.pledged] |= _signers(step.children)
    changed = {step for step in steps if not step.children and went_on[step.pledged] & step.signers}
    for step in changed:
        if step.parent is not None:
            step.parent.children.remove(step)
        refused += (
            _refused(file, step.receipt, "its signers went on from other commits or tokens")
            for file in sorted(step.files)
        )
    return [step for step in steps if step not in changed]


def _bridge(steps: list[_Step]) -> None:
    """Over missing steps no chain leads: a peer that has signed on both sides stands for it."""
    roots: dict[_Step, _Step] = {}
    signers: dict[_Step, frozenset[PeerId]] = defaultdict(frozenset)
    for step in steps:
        roots[step] = step if step.parent is None else roots[step.parent]
        signers[roots[step]] |= step.signers
    for root in signers:
        before = set()
        for end in [step for step in steps if not step.children]:
            old = next((step for step in end.path() if _is_older(step.at, root.at)), None)
            # What has a step before it, on another chain, contradicts it.
            if old is not None and old.at.step < root.at.step - 1:
                before |= {old} if any(step.signers & signers[root] for step in old.path()) else set()
        if len(before) == 1:
            root.follow(before.pop())


def _given_up(paths: dict[_Step, list[_Step]]) -> dict[_Step, _Step]:
    """Ends of what the run has gone back from -> the end of what it went on with."""
    lost: dict[_Step, _Step] = {}
    for end, path in sorted(paths.items(), key=lambda of: of[0].at.restart):  # what gave it up first
        for other in paths.keys() - lost.keys():
            if other.at.restart < end.at.restart:
                shared = set(path).intersection(paths[other])
                gone, new = ([step for step in each if step not in shared] for each in (paths[other], path))
                if _goes_back(gone, new, joined=bool(shared)):
                    lost[other] = end
    return lost


def _goes_back(gone: Sequence[_Step], new: Sequence[_Step], *, joined: bool) -> bool:
    restart = new[0].at.restart
    before = gone[-1].at.restart < restart and gone[0].at.step >= restart.version
    # At version 0 all histories of a run are one.
    return before and (joined or not restart.version) and blocks(_signers(new), _signers(gone))


# ---------------------------------------------------------------- what is counted


def _part(steps: Collection[_Step]) -> Stretch:
    return Stretch(min(step.at.step for step in steps), len(steps), _signers(steps))


def _history(path: Sequence[_Step], own: Sequence[_Step], gone: Iterable[set[_Step]]) -> StageHistory:
    files = sorted(set().union(*(step.files for step in own)))
    history = StageHistory(path[0].at.stage, _part(own), files, [_part(steps) for steps in gone], steps=len(path))
    history.receipts = {step.at.step: step.receipt for step in path}
    gaps = [after.at.step - before.at.step - 1 for before, after in itertools.pairwise(path)]
    history.linked, history.missing = gaps.count(0), sum(gaps)
    for receipt in history.receipts.values():
        history.tokens += receipt.finished.num_tokens
        for peer, _, indexes in receipt.finished.contributions:
            if indexes:
                tally = history.tallies.setdefault(peer, MemberTally())
                tally.steps += 1
                tally.microbatches += len(indexes)
                tally.tokens += sum(receipt.tokens[index] for index in indexes)
    return history


# ---------------------------------------------------------------- proven faults


def faults_of(history: StageHistory, run: str, proofs: Iterable[Evidence]) -> dict[PeerId, NamedFault]:
    """The members that evidence names; of each the first step that is proven of this history, or the first one.

    proofs: none that is refused. Evidence of another run names no member.
    """
    found: dict[PeerId, NamedFault] = {}
    for evidence in proofs:
        stamp, proven = evidence.case.pledge.stamp, _is_about(evidence, history)
        if not proven and evidence.run != run:
            continue
        made = NamedFault(stamp.stage, stamp.step, proven)
        for peer in evidence.at_fault & history.tallies.keys():
            found[peer] = min(found.get(peer, made), made, key=lambda one: (not one.proven, one.step))
    return found


def _is_about(evidence: Evidence, history: StageHistory) -> bool:
    case, pledge = evidence.case, evidence.case.pledge
    receipt = history.receipts.get(pledge.stamp.step)
    if receipt is None or receipt.stamp != pledge.stamp:
        return False
    # The suspect has not signed who verifies what it sent: the contributors of this history alone do.
    return case.sent is None or needs_no_recheck(case) or receipt.shares == pledge.shares
