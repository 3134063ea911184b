"""What the records of a run amount to: who serves what, what is wrong, and what to do about it, in words.

Records in, an `Assessment` out, which is also the JSON of `swarmnet status` (docs/discovery.md). Records are what peers
say of themselves, seconds old; whatever is a matter of a step or two is therefore not called a problem. Knows no
network and no clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

from swarmnet.audit.health import BannedLine, DisputeLine, TaintedLine, banned_of, disputes_of, tainted_of
from swarmnet.directory import MAX_TAINTED, Complaint, Record
from swarmnet.ids import NO_RESTART, Chain, Incarnation, PeerId, Restart, RunId
from swarmnet.net.admission import Admissions
from swarmnet.peer.checkup import advice
from swarmnet.peer.contributors import Contributor, contributors
from swarmnet.peer.devices import NumericsClass
from swarmnet.peer.rates import measured
from swarmnet.quorum import quorum, reached_by_half
from swarmnet.state.rollback import Holding, Rollbacks, newest_on_disk, of_one_lineage
from swarmnet.telemetry.text import counted, short

NO_BOOTSTRAP = "no_bootstrap"
"""The kind of problem when none of the addresses answered."""

_MOST_NAMED = 16
"""Peers that are complained of and named in words: records may say anything."""

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class ReplicaLine:
    """One replica's claims about one stage. queue, slots: microbatches in flight, and how many it takes.

    disk: versions of its checkpoints. draining: it is about to leave.
    restart: number of the newest restart of the run it follows. executions, counted: training forwards of its process,
    and indexes it has contributed to sums. drift, stray, still_s: see StageStatus.
    going: the stage that it is moving to. software: its version, region: its location, nickname: its
    name; empty: it does not report one.
    incarnation: random per process start.
    speed: microbatches per second, its own claim within the bounds of the other replicas' measurements; 0 if unknown.
    convicted: most serving replicas have banned it: it serves nothing, whatever it announces.
    """

    peer: PeerId
    version: int
    chain: Chain
    synced: bool
    queue: int
    slots: int
    numerics: NumericsClass
    finished: bool
    addresses: tuple[str, ...]
    disk: tuple[int, ...]
    draining: bool
    restart: int
    executions: int
    counted: int
    drift: int | None = None
    stray: bool = False
    still_s: int = 0
    paused: bool = False
    going: int | None = None
    software: str = ""
    region: str = ""
    nickname: str = ""
    speed: float = 0.0
    incarnation: Incarnation = 0
    convicted: bool = False

    @property
    def ready(self) -> bool:
        """Has it its weights, and is it not shut out?"""
        return self.synced and not self.convicted

    @property
    def state(self) -> str:
        """In a word, or where it goes."""
        if self.convicted:
            return "convicted"
        if self.going is not None:
            return f"going to {self.going}"
        if self.paused:
            return "paused"
        return "leaving" if self.draining else "synced" if self.synced else "joining"


_SAME = frozenset(each.name for each in fields(ReplicaLine)) - {
    "disk",
    "restart",
    "going",
    "numerics",
    "convicted",
    "speed",
}
"""What a line repeats of a record and of its announcement of the stage."""


@dataclass(frozen=True, slots=True)
class StageLine:
    """A stage and who serves it, sorted by peer."""

    stage: int
    replicas: tuple[ReplicaLine, ...]


@dataclass(frozen=True, slots=True)
class TrainerLine:
    """A trainer."""

    peer: PeerId
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LossAt:
    """Mean loss in nats per token at a step."""

    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Something to know. kind: one word for scripts; text: what, and what to do. stage, peer: which, if it is about
    one."""

    severity: Severity
    kind: str
    text: str
    stage: int | None = None
    peer: PeerId | None = None


@dataclass(frozen=True, slots=True)
class ReportLine:
    """A report of `by`, which serves a stage, on another replica."""

    by: PeerId
    of: Complaint


@dataclass(frozen=True, slots=True)
class AdmissionLine:
    """Who may join. policy: "open" or "invite". checked: by the manifest; else it is what most peers say, and records
    of uninvited peers are shown, too. owner: who invites, banned: how many are shut out; known if checked."""

    policy: Literal["open", "invite"]
    checked: bool
    owner: str = ""
    banned: int = 0


@dataclass(frozen=True, slots=True)
class Assessment:
    """A run at a glance. version: the weights that every stage has at a synced replica, None while one has none.

    tokens_per_second: of the whole run, the median of what its peers measure. executions_per_index: training forwards
    per contribution, over the processes that are there; 1 when nothing is computed twice, 0 if unknown. on_disk: the
    newest version that every stage has on some disk, None if there is none. restart: the newest one that any peer
    follows. still_s: for how long there was no step, as most serving peers report; 0 while steps come as usual. steps:
    how many the run has, as half of the serving peers report; 0 if unknown. step_s: seconds of a step, the median of
    what its peers measure. eta_s: seconds to the last step at that pace; None if unknown, or no step is done now.
    num_tainted: how many steps hold proven false work, the median of those reports. tainted: the last of them, those
    that most reports name first. convicts: banned peers; their announcements count for nothing here, but for their
    lines in `stages`. disputes: by stage. num_disputed: their number, of all stages.
    """

    run: RunId
    seen: bool
    num_stages: int
    version: int | None = None
    finished: bool = False
    loss: LossAt | None = None
    eval_loss: LossAt | None = None
    tokens_per_second: float = 0.0
    executions_per_index: float = 0.0
    stages: tuple[StageLine, ...] = ()
    trainers: tuple[TrainerLine, ...] = ()
    problems: tuple[Problem, ...] = ()
    on_disk: int | None = None
    restart: Restart = NO_RESTART
    admission: AdmissionLine | None = None
    still_s: int = 0
    complaints: tuple[ReportLine, ...] = ()
    steps: int = 0
    step_s: float = 0.0
    eta_s: float | None = None
    num_tainted: int = 0
    tainted: tuple[TaintedLine, ...] = ()
    convicts: tuple[BannedLine, ...] = ()
    num_disputed: int = 0
    disputes: tuple[DisputeLine, ...] = ()
    contributors: tuple[Contributor, ...] = ()
    links: tuple[str, ...] = ()
    """By which other peers join, each through another peer; those that only this machine can use last."""


def assess(run: RunId, records: Sequence[Record], num_stages: int, admissions: Admissions | None = None) -> Assessment:
    """Arrange `records` of `run` by stage and say what looks wrong. num_stages 0, admissions None: unknown."""
    if not records:
        return Assessment(run, False, num_stages, problems=(_problem("nobody_seen", run=run[:12]),))
    convicts = banned_of(records)
    out = frozenset(each.peer for each in convicts)
    shown = tuple(StageLine(stage, tuple(_replicas(stage, records, out))) for stage in range(num_stages))
    # From here on a banned peer is ignored.
    records = [record for record in records if record.peer not in out]
    stages = tuple(StageLine(line.stage, tuple(r for r in line.replicas if not r.convicted)) for line in shown)
    trainers = tuple(TrainerLine(r.peer, r.addresses) for r in records if r.feeds)
    restart, holdings = holdings_of(records, num_stages)
    on_disk = newest_on_disk(holdings, num_stages) if num_stages else None
    standing = _standing(holdings, num_stages, restart)
    # Who has left after the last step is not missed.
    served = [line for line in stages if any(standing.serves(replica) for replica in line.replicas)]
    finished = bool(served) and all(any(replica.finished for replica in line.replicas) for line in served)
    synced = [[replica.version for replica in line.replicas if standing.serves(replica)] for line in stages]
    serving = {line.stage: [replica for replica in line.replicas if standing.serves(replica)] for line in stages}
    still_s = statistics.median_low([r.still_s for replicas in serving.values() for r in replicas] or [0])
    step_s = statistics.median([record.step_s for record in records if record.step_s] or [0.0])
    stepping = bool(step_s) and not still_s
    halts = sorted({record.halted for record in records if record.halted is not None})
    problems = [*(_problem("halted", step=step) for step in halts), *_went_back(restart, records)]
    if not finished and _all_left(records):
        goes_on = "" if on_disk is None else f", and the run goes on from version {on_disk}"
        problems.append(_problem("all_left", goes_on=goes_on))
    else:
        problems += () if trainers or finished else (_problem("no_trainer"),)
        for line in stages:
            problems += _stage_problems(line, standing, finished, stepping=stepping)
        problems += () if finished else (*_two_replicas(stages), *_without_checkpoints(stages))
    complaints = tuple(
        ReportLine(record.peer, complaint)
        for record in sorted(records, key=lambda record: record.peer)
        for complaint in record.complaints
        if not finished and any(record.peer == replica.peer for replica in serving.get(complaint.stage, ()))
    )
    standing_by = {replica.peer for replicas in serving.values() for replica in replicas}
    members = [record for record in records if record.peer in standing_by]
    num_tainted = reached_by_half([r.num_tainted for r in members if r.num_tainted] or [0])
    goes_back = statistics.median_low([record.goes_back for record in members if record.num_tainted] or [False])
    steps_tainted, disputes = tainted_of(members), disputes_of(members, out)
    problems += [
        *_audited(convicts, disputes, counted(len(members), "replica")),
        *_tainted(num_tainted, steps_tainted, counted(len(members), "replica"), goes_back=goes_back),
        *_reported(complaints, {stage: {r.peer for r in serving[stage]} for stage in serving}, out, still_s),
    ]
    version = min(map(max, synced)) if stages and all(synced) else None
    steps = statistics.median_low([record.steps for record in records if record.steps] or [0])
    going = version is not None and stepping and steps >= version
    return Assessment(
        run=run,
        seen=True,
        num_stages=num_stages,
        version=version,
        finished=finished,
        loss=_newest([record.loss for record in records]),
        eval_loss=_newest([record.eval_loss for record in records]),
        tokens_per_second=statistics.median([r.tokens_per_second for r in records if r.tokens_per_second] or [0.0]),
        executions_per_index=_executions_per_index(stages),
        stages=shown,
        trainers=trainers,
        problems=tuple(sorted(problems, key=lambda p: ("error", "warning", "note").index(p.severity))),
        on_disk=on_disk,
        restart=restart,
        admission=_admission(records, admissions),
        still_s=still_s,
        complaints=complaints,
        steps=steps,
        step_s=step_s,
        eta_s=(steps - version) * step_s if going and version is not None else None,
        num_tainted=num_tainted,
        tainted=steps_tainted,
        convicts=convicts,
        num_disputed=sum(each.number for each in disputes),
        disputes=disputes,
        contributors=contributors(records),
    )


def holdings_of(
    records: Sequence[Record], num_stages: int, *, allow_drop: bool = False
) -> tuple[Restart, list[Holding]]:
    """The restart that half of those who serve follow, and who holds which versions of one lineage."""
    restart = reached_by_half([record.restart for record in records if record.stages] or [NO_RESTART])
    announced = [
        (Holding(r.peer, s.stage, r.restart, s.version if s.synced else None), s.disk)
        for r in records
        for s in r.stages
        if s.stage < num_stages
    ]
    return restart, of_one_lineage(announced, Rollbacks(num_stages, allow_drop=allow_drop, current=restart))


def _admission(records: Sequence[Record], admissions: Admissions | None) -> AdmissionLine:
    if admissions is None:
        invited = sum(bool(record.invitation) for record in records)
        return AdmissionLine("invite" if invited >= quorum(records) else "open", checked=False)
    if admissions.owner is None:
        return AdmissionLine("open", checked=True)
    banned = len(admissions.bans.value.peers) if admissions.bans else 0
    return AdmissionLine("invite", checked=True, owner=admissions.owner, banned=banned)


@dataclass(frozen=True, slots=True)
class _Standing:
    """The position of the run as a whole. step: the newest version that any peer serves, None while there is none.
    on_disk: the newest version on any peer's disk."""

    begun: bool
    step: int | None
    common: int | None
    restart: Restart
    on_disk: int

    def serves(self, replica: ReplicaLine) -> bool:
        """Has it the weights that the run goes on with? Not if it began at the seed when others had got further."""
        anew = not self.restart.number and replica.version == 0 and not any(replica.disk) and self.on_disk > 1
        return replica.synced and replica.restart == self.restart.number and not anew


def _standing(holdings: Sequence[Holding], num_stages: int, restart: Restart) -> _Standing:
    rules = Rollbacks(num_stages, current=restart)
    served = [held.version for held in holdings if held.version is not None and held.restart == restart]
    begun = bool(restart.number) or any(served) or any(any(held.disk) for held in holdings)
    on_disk = max((version for held in holdings for version in held.disk), default=0)
    return _Standing(begun, max(served, default=None), rules.common(holdings) if num_stages else None, restart, on_disk)


# ---------------------------------------------------------------- what looks wrong

_PROBLEMS = {
    "nobody_seen": "error: no peer announces run {run}: check that the link or manifest is that of its peers, that "
    "they bootstrap from the same swarm, and that one has been up for a few seconds",
    NO_BOOTSTRAP: "error: no bootstrap peer answered; tried {tried}: check that one is up and reachable from here, "
    "or ask for the link of a peer that is up now",
    "all_left": "error: all peers have left: start them again, each with the same --dir{goes_on}",
    "halted": "error: the run stopped at step {step}: more microbatches than training.max_discarded gave no gradient "
    "that can be counted; start a new run with a lower learning rate (`swarmnet init --set "
    "optimizer.learning_rate=...`)",
    "no_trainer": "warning: no trainer feeds the run: peers of stage 0 that hold the data feed it themselves, slowly; "
    "start one with `swarmnet trainer`",
    "went_back": "note: the run was restarted {times}, last from version {version}: steps that had been done after "
    "that version are done again{behind}",
    "stage_empty unseen": "note: stage {stage} has not been seen yet, and the others still make steps: look again in a "
    "moment",
    "fork": "error: replicas of stage {stage} disagree about version {version} ({chains}): the stage was partitioned; "
    "the smaller side takes the others' snapshot by itself once they reach each other",
    # Not an error: the run goes on, only its bits differ.
    "mixed_numerics": "note: stage {stage} mixes numerics classes: gradients differ by rounding, by who computed them; "
    "{weights}",
    "drift": "warning: the weights of {peer} in stage {stage} were not those of the other replicas at version "
    "{version}: it takes the others' by itself; if it is named again and again, look at that machine (memory, "
    "overclocking)",
    "no_checkpoint": "warning: stage {stage} has {newest}, and other stages have: if its replicas stop, the run goes "
    "back there. Their logs say why (checkpoint_failed): give one more space on its disk, or a larger --disk",
    "standstill blamed": "error: no step for {still_s} s{why} {whom}",
    "standstill": "warning: no step for {still_s} s, and no peer reports which one it waits for",
    "convicted": "warning: banned: {words}",
    "convicted by most": "warning: banned: {peer}{of} ({reason}), {says}",
    "unreached": "warning: {verb}: {words}; {advice}",
    "sits_out": "note: suspended for another {seconds} s: {words}",
    "left_out": "note: left out: {words}",
    "disputed": "warning: in {cases} of stage {stage} a peer is at fault and none can be named, as {by} of {members} "
    "say; the last: work of {peer} in step {step}: it takes more than half of the replicas that contributed lately, of "
    "one numerics class and of three or more",
    "tainted": "warning: {steps} work that is proven false; the last: {named}; {they} in the weights (audit.on_late "
    '= "record"); a new run with "rollback" goes back before such steps',
    "tainted undone": "warning: {steps} work that is proven false; the last: {named}; the run goes back before {them} "
    'by itself (audit.on_late = "rollback"), if every stage has a version that old on disk',
    "stage_not_synced waits": "error: no replica of stage {stage} has the weights yet: wait for one to be ready",
    "stage_empty waits": "error: no peer serves stage {stage}, so no step can finish: start one with `swarmnet peer "
    "--stage {stage}`, with the --dir of the one that served it, if one has",
    "lost on all disks": "error: stage {stage} has lost all its replicas{at}; its state is on disk, and the run goes "
    "on from version {common} by itself in a moment",
    "lost on a disk": "error: stage {stage} has lost all its replicas{at}; it has version {disk} on disk, which some "
    "other stage has not: start more of the run's peers again, each with the --dir that it had, until one has a "
    "version that the other stages have",
    "lost": "error: stage {stage} has lost all its replicas{at}, and no peer here has its state: start a peer that has "
    "its checkpoint (`swarmnet peer --stage {stage}` with the --dir it had)",
    "paused": "note: {replicas} of stage {stage} {are} paused, as asked there",
    "all_paused": "warning: all replicas of stage {stage} are paused or leaving, so none wants new microbatches; "
    "one of those that are paused serves on",
    "all_leaving": "warning: all replicas of stage {stage} are about to leave: start another while they wait for it",
    "leaving": "note: {replicas} of stage {stage} {are} about to leave",
    "joining": "note: {replicas} of stage {stage} {are} fetching its state",
    # It trains well until that one goes.
    "single_replica": "note: stage {stage} has a single replica: if it goes, the run waits; start one more",
    "two_replicas": "note: {which} two replicas: if one hangs (a crash is seen at once), a step waits out the long "
    "silence limit, since two cannot tell silence from death; a third replica removes that",
}
"""Severity and text of each problem, by its kind; after a blank, which of several texts of that kind."""


def _problem(
    name: str, stage: int | None = None, peer: PeerId | None = None, *, kind: str = "", **facts: object
) -> Problem:
    severity, _, text = _PROBLEMS[name].format(stage=stage, peer=peer, **facts).partition(": ")
    return Problem(cast(Severity, severity), kind or name.partition(" ")[0], text, stage, peer)


def _replicas_are(name: str, stage: int, number: int) -> Iterator[Problem]:
    if number:
        yield _problem(name, stage, replicas=counted(number, "replica"), are="is" if number == 1 else "are")


def _all_left(records: Sequence[Record]) -> bool:
    """Has every peer that served announced that it left? A killed peer announces nothing."""
    said = [status for record in records for status in record.stages]
    return (
        bool(said) and not any(record.paused for record in records) and all(s.draining and not s.synced for s in said)
    )


def unanswered(run: RunId, num_stages: int, bootstrap: Sequence[str]) -> Assessment:
    """When none of the addresses answered."""
    return Assessment(run, False, num_stages, problems=(_problem(NO_BOOTSTRAP, tried=", ".join(bootstrap)),))


def _went_back(restart: Restart, records: Sequence[Record]) -> Iterator[Problem]:
    if not restart.number:
        return
    number = sum(bool(record.stages) and record.restart != restart for record in records)
    behind = f"; {counted(number, 'peer')} {'has' if number == 1 else 'have'} yet to follow" if number else ""
    times = "once" if restart.number == 1 else f"{restart.number} times"
    yield _problem("went_back", times=times, version=restart.version, behind=behind)


def _stage_problems(line: StageLine, standing: _Standing, finished: bool, *, stepping: bool) -> Iterator[Problem]:
    stage, replicas = line.stage, line.replicas
    serving = [replica for replica in replicas if standing.serves(replica)]
    # Nothing can finish a step: the first thing to know.
    if not replicas and stepping and not finished:
        yield _problem("stage_empty unseen", stage)
    elif not serving and not finished:
        yield _without_state(line, standing)
    for version, chains in _forks(replicas):
        yield _problem("fork", stage, version=version, chains=", ".join(chains))
    if len(classes := {replica.numerics for replica in replicas if replica.numerics.device}) > 1:
        alike = len({each.apply for each in classes}) == 1
        weights = "all replicas make the same weights of the same sum" if alike else "weights do, too"
        yield _problem("mixed_numerics", stage, weights=weights)
    for replica in replicas:
        if replica.stray and replica.drift is not None:
            yield _problem("drift", stage, replica.peer, version=replica.drift)
    if not finished and replicas:  # else nothing waits for a peer any more
        yield from _few(line, bool(serving))


def _without_checkpoints(stages: Sequence[StageLine]) -> Iterator[Problem]:
    """Stages of which no replica wrote the last two checkpoints that another stage has."""
    kept = {line.stage: sorted({version for each in line.replicas for version in each.disk}) for line in stages}
    written = [versions for versions in kept.values() if len(versions) > 1]
    # One that is being written is no sign: another stage may have been faster.
    due = max((versions[-2] for versions in written), default=0)
    usual = min((versions[-1] - versions[-2] for versions in written), default=0)
    for line in stages:
        versions = kept[line.stage]
        newest = max(versions, default=0)
        # A slow disk writes every second or fourth one.
        stride = versions[-1] - versions[-2] if len(versions) > 1 else 4 * usual
        if line.replicas and newest < due and due - newest >= stride:
            has = f"no checkpoint newer than version {newest}" if newest else "no checkpoint"
            yield _problem("no_checkpoint", line.stage, newest=has)


def _audited(convicts: Sequence[BannedLine], disputes: Sequence[DisputeLine], members: str) -> Iterator[Problem]:
    """members: how many replicas serve."""
    for each in convicts:
        of = f" of stage {', '.join(map(str, each.stages))}" if each.stages else ""
        says = f"as {each.by} of {members} say"
        yield _problem("convicted by most", None, each.peer, of=of, reason=each.reason, says=says)
    for line in disputes:
        last, cases = line.last, counted(line.number, "case")
        yield _problem("disputed", last.stage, last.peer, cases=cases, step=last.step, by=line.by, members=members)


def _tainted(number: int, last: Sequence[TaintedLine], members: str, *, goes_back: bool) -> Iterator[Problem]:
    """A line, if there are such steps. goes_back: as most of those say who know of any."""
    if number and last:
        some = (f"step {line.step} of stage {line.stage} (say {line.by} of {members})" for line in last[:MAX_TAINTED])
        steps = f"{counted(number, 'step')} {'holds' if number == 1 else 'hold'}"
        them, they = ("it", "it stays") if number == 1 else ("them", "they stay")
        name = "tainted undone" if goes_back else "tainted"
        yield _problem(name, steps=steps, named=", ".join(some), them=them, they=they)


def _reported(
    complaints: Sequence[ReportLine], serving: Mapping[int, Set[PeerId]], out: Set[PeerId], still_s: int
) -> Iterator[Problem]:
    """The peers that all wait for; and the peers that another one excludes or cannot reach. out: banned peers, which
    are reported already."""
    about: dict[tuple[int, PeerId], list[ReportLine]] = {}
    for line in complaints:
        about.setdefault((line.of.stage, line.of.peer), []).append(line)
    most = sorted(about, key=lambda key: (-len({line.by for line in about[key]}), key))
    words = {key: _words(*key, about[key], serving[key[0]]) for key in most}
    waits, cannot = (
        {(line.of.stage, line.of.peer, line.by) for line in complaints if still_s and line.of.how == how}
        for how in ("waited_for", "unreached")
    )
    # A peer that cannot connect to the one that waits for it is not to blame.
    waits -= {(stage, by, peer) for stage, peer, by in cannot}
    waited, unreached = ([key for key in most if key in {each[:2] for each in some}] for some in (waits, cannot))
    if blamed := (waited or unreached)[:_MOST_NAMED]:
        why = ": waiting for" if waited else ", perhaps because of"
        whom = "; ".join(words[key] for key in blamed)
        yield _problem("standstill blamed", blamed[0][0], still_s=still_s, why=why, whom=whom)
    elif still_s and all(serving.values()):  # else it is said what is missing
        yield _problem("standstill", still_s=still_s)
    for key in [key for key in most if key not in blamed and key[1] not in out][:_MOST_NAMED]:
        lines = [line.of for line in about[key]]
        how: Mapping[str, int] = {each.how: each.seconds for each in sorted(lines, key=lambda each: each.seconds)}
        name = next((each for each in ("convicted", "unreached", "sits_out", "left_out") if each in how), None)
        facts: dict[str, Any] = {"words": words[key], "verb": "left out" if "left_out" in how else "not reached"}
        if name is not None:
            yield _problem(name, *key, **facts, advice=advice("unreached"), seconds=how[name])


def _words(stage: int, peer: PeerId, lines: Sequence[ReportLine], serving: Set[PeerId]) -> str:
    """Who it is, what there is against it, and who says so."""
    named = f"{peer} of stage {stage}"
    cannot = {line.by for line in lines if line.of.how == "unreached"}
    # All the others say so: the firewall is that peer's.
    if cannot and serving - {peer} <= cannot:
        return f"{named}, which no peer can connect to"
    if cannot:
        return f"{named}, which {_names(cannot)} cannot connect to"
    reasons = {line.of.reason: {other.by for other in lines if other.of.reason == line.of.reason} for line in lines}
    said = (f"{reason}, {'says' if len(by) == 1 else 'say'} {_names(by)}" for reason, by in reasons.items())
    return f"{named} ({'; '.join(said)})"


def _names(peers: Set[PeerId]) -> str:
    """The last digits of a few."""
    more = f" and {len(peers) - 4} more" if len(peers) > 4 else ""
    return ", ".join(map(short, sorted(peers)[:4])) + more


def _without_state(line: StageLine, standing: _Standing) -> Problem:
    """No replica serves the stage: nothing can finish a step."""
    disk = sorted({version for replica in line.replicas for version in replica.disk})
    kind = "stage_not_synced" if line.replicas else "stage_empty"
    if not standing.begun:
        return _problem(f"{kind} waits", line.stage)
    name = "lost" if not disk else "lost on a disk" if standing.common is None else "lost on all disks"
    at = "" if not standing.step else f" at step {standing.step}"
    return _problem(name, line.stage, kind=kind, at=at, common=standing.common, disk=", ".join(map(str, disk)))


def _few(line: StageLine, served: bool) -> Iterator[Problem]:
    stage = line.stage
    paused = sum(replica.paused for replica in line.replicas)
    leaving = sum(replica.draining and not replica.paused for replica in line.replicas)
    joining = sum(not replica.synced and not replica.draining for replica in line.replicas)
    staying = len(line.replicas) - leaving - paused
    yield from _replicas_are("paused", stage, paused)
    if not staying:
        yield _problem("all_paused" if paused else "all_leaving", stage)
    else:
        yield from _replicas_are("leaving", stage, leaving)
    yield from _replicas_are("joining", stage, joining if served else 0)
    if staying == 1:
        yield _problem("single_replica", stage)


def _two_replicas(lines: Sequence[StageLine]) -> Iterator[Problem]:
    """Said once, whatever the number of stages it is true of."""
    stages = [line.stage for line in lines if sum(not replica.draining for replica in line.replicas) == 2]
    if stages:
        which = f"stage {stages[0]} has" if len(stages) == 1 else f"stages {', '.join(map(str, stages))} have"
        yield _problem("two_replicas", stages[0] if len(stages) == 1 else None, which=which)


def _forks(replicas: Sequence[ReplicaLine]) -> Iterator[tuple[int, list[str]]]:
    """Versions at which synced replicas of the same restart have different chains, with the first digits of each."""
    chains: dict[tuple[int, int], set[str]] = {}
    for replica in replicas:
        if replica.synced:
            chains.setdefault((replica.restart, replica.version), set()).add(replica.chain)
    for (_, version), different in sorted(chains.items()):
        if len(different) > 1:
            yield version, sorted(chain[:12] for chain in different)


# ---------------------------------------------------------------- arranging


def _replicas(stage: int, records: Sequence[Record], convicts: Set[PeerId]) -> Iterator[ReplicaLine]:
    # A peer that does not serve measures none, and is measured by none.
    serving = [
        record
        for record in records
        if record.peer not in convicts and any(each.stage == stage and each.synced for each in record.stages)
    ]
    speeds = measured({record.peer: record.estimates for record in serving})
    for record in sorted(records, key=lambda record: record.peer):
        for status in record.stages:
            if status.stage == stage:
                same = {name: getattr(status if hasattr(status, name) else record, name) for name in _SAME}
                yield ReplicaLine(
                    **same,
                    numerics=NumericsClass.parse(record.numerics),
                    disk=tuple(kept.version for kept in status.disk),
                    restart=record.restart.number,
                    going=record.going if record.surely else None,
                    speed=round(speeds.get(record.peer, 0.0), 3),
                    convicted=record.peer in convicts,
                )


def _executions_per_index(stages: Sequence[StageLine]) -> float:
    replicas = [replica for line in stages for replica in line.replicas]
    counted = sum(replica.counted for replica in replicas)
    return round(sum(replica.executions for replica in replicas) / counted, 4) if counted else 0.0


def _newest(losses: Sequence[tuple[int, float] | None]) -> LossAt | None:
    known = [loss for loss in losses if loss is not None]
    return LossAt(*max(known)) if known else None
