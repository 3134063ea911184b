"""The one table of event kinds: name, log level, marks, fields, meaning; and the one of the types of fields.

The log's lines, which records are renewed at once, what `swarmnet local` believes of a Byzantine process and reads
again when it is resumed, and docs/events.md come from it: `python -m swarmnet.telemetry.kinds` prints that page, and
with `--schema` docs/events.schema.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

OnEvent = Callable[[str, dict[str, object]], None]
"""Called with an event's name, and its facts."""

MARKS = {
    "step": "comes with every step: of each stage the log shows one line a second; `untold=3` at its end says that "
    "three more came since the line before",
    "renews": "the peer publishes its record at once",
    "version": "the replica has the weights of `version` from now on",
    "reopens": "the peer trains again if it had finished, unless `kept` says that it keeps its state",
    "self": "`swarmnet local` counts these alone of a Byzantine process, because it speaks of itself",
    "accuses": "names another peer as Byzantine",
    "kept": "a resumed `swarmnet local` reads it again",
    "told": "a line on the terminal of `swarmnet join` and `peer`",
}

# name | level and marks | fields, with * those that no log line for a person shows | meaning
_TABLE = """
away | warning | reason | no bootstrap peer answers; the peer tries again
back | info | reason | a bootstrap peer answers again
listening | info self kept | peer dht* addresses* incarnation* links* invited* | it listens; others join by `links`
stopped | info | reason | the peer or trainer ends
dashboard | info | at | the dashboard, figures for Prometheus and health are served there
no_dashboard | warning | reason then | the dashboard's looks at the run have ended
traffic | debug | calls | bytes and seconds by kind of call, when the peer ends
done | info | step | the trainer has fed the last step
waiting | warning | stage reason advice | no step can be done until `reason` has passed
complete | info | num_peers | every stage has a replica
dialled_back | info told | addresses could could_not not_asked dialled | other members tried to connect to this peer
hidden | info renews told | addresses* could_not relays links* | no member could connect to it: relays carry its calls
unreachable | debug renews | addresses could_not | no member could connect to this peer, and no relay was found
relay_reserved | info renews | relay bytes_per_s | a relay has a reservation for this peer
relay_lost | warning renews told | relay reason | a relay serves this peer no more
callers_refused | warning | reason caller relay | a call through a relay was refused; at most once a minute
punched | debug | peer nat seconds | a direct connection through both routers was opened
not_punched | debug | peer reason | no direct connection could be opened
hole_lost | debug | peer | such a connection has ended
cannot_reach | warning | stage peer reason | messages of a replica arrive, but it cannot be connected to
fetching | debug | stage version bytes total donors seconds_left level_in | the state of a stage is being fetched
fetching_again | debug | stage version reason | the fetched state could not be used
following | debug | stage version newest level_in | a joining replica catches up
too_slow | debug told | stage bytes_per_s sum_bytes step_s within needs donors needs_each | too slow a link to catch up
join_failed | warning | stage donor reason | a source of the state failed
synced | info renews version self told | stage version how path seconds bytes | the replica has weights and serves
dropped | warning kept | stage from to microbatches reason | the state of a stage was lost; training goes on from `to`
mesh_starting | debug told | stage mesh ranks | the processes of the ranks are started
mesh_started | info self told | stage mesh epoch pids* seconds | all ranks are up
rank_lost | warning self told | stage rank reason epoch seconds | a rank has ended; all ranks start again
device_full | warning | stage slots reason | the device had no memory left; the replica takes fewer microbatches
moving | info told | from to rates | another stage needs this peer more; it fetches that state
moved | info told | from to version | the peer serves another stage
move_failed | warning told | to reason | the peer stays in its stage
pausing | info | why | the peer takes no new microbatches
paused | info | serves_on | the peer is paused, apart from stages that need it
resumed | info | - | the pause has ended
draining | info | left | the peer is leaving
rerouted | debug | stage step index peer reason | another replica than `peer` computes a microbatch
refused | warning | step index code reason | a replica refused a microbatch
progress | info | step steps loss held_out learning_rate tokens_per_second eta_s | where the run stands, by its records
brings_nothing | debug | step peer | another trainer did not feed its microbatches in two steps in a row
evaluated | info step kept | step loss num_tokens | the held-out loss of version `step`
not_evaluated | debug | step reason | that version has no held-out loss
eval_disputed | debug | step number losses routes | replicas gave different held-out losses
turned_away | debug | stage peer step index reason | a caller may not feed that microbatch
bad_input | warning | stage peer step index code reason | a microbatch was malformed or not proven
asks_too_often | debug | stage peer step index | a replica asks for the same proof again and again
leader | debug | stage step ballot | this replica leads the step
leader_stopped | debug | stage step for | a leader gave way to another one
refused_ballot | debug | stage peer ballot leader | a ballot was not accepted
ordered | debug | stage index peer step | the leader orders a microbatch that no replica has
released | debug | stage peer indexes | a replica returned its assignments
evicted | info | stage peer reason step | the leader removed a replica from the step
evicted_me | debug | stage discard step | this replica was removed from the step
sum_lost | debug | stage discard step | the accumulator of an open step was lost
discarded_myself | debug | stage discard step | this replica discarded its accumulator
discarded | info step | stage step index | a microbatch gave no usable gradient and is skipped
halted | warning renews | stage step reason | too many microbatches were skipped: the run has stopped
late | debug | stage peer reason | the replica suspends a slow replica
excluded | debug | stage peer until_step level | a replica is excluded for some steps
orphaned | warning | stage step | no replica continues the state of this one
resync | info | stage reason version | the replica fetches its state again
ahead_alone | debug | stage peer version | a replica claims a version that no other has
finds_alone | debug | stage step peer | only one replica finds microbatches unusable
cut_again | debug | stage step | the aggregation round is divided again
averaged_alone | info step | stage step reason | the aggregation round had one member
averaged | debug | stage step seconds | the aggregation round has ended
sum_left | debug | stage step seconds | this replica left the round before its end
sum_failed | debug | stage reason | a round failed
sum_checked | debug | stage step seconds | the aggregate was checked
clipped | debug | stage step peer factor part hop | the reducer scaled a contribution down
digest_differs | warning | stage peers round | replicas have different aggregates
other_commit | debug | stage peer step of digest* | a replica has another commit of the same step
bad_vote | debug | stage peer step | a vote had a wrong signature; `stage` is that of the vote
refused_message | debug | stage peer kind reason | a message was refused
committed | debug kept | stage step loss_sum num_tokens digest* contributions* discarded | it is decided, and applied
applied | info step version self | stage step version chain* loss grad_norm averaging_bytes | the optimizer step is done
apply_failed | warning | stage step reason | the optimizer step failed
figures | debug kept | step loss num_tokens grad_norm learning_rate | what came of the step
executed | debug self | stage executions counted | forwards so far, and microbatches in committed aggregates
outer_step | info step | stage step elements moved | an outer step was taken together with other replicas
outer_missed | info step | stage step elements moved reason | the outer step found no partner
drift | warning renews | stage version peer donor strays measured | weights of `peer` are not those of most and `donor`
checkpoint | info step renews kept | stage version path bytes seconds problem | a checkpoint is on disk
checkpoint_failed | warning | stage version path reason bytes_needed then | a checkpoint could not be written
checkpoint_bad | warning renews | stage path reason then | a checkpoint cannot be used
restart | warning kept reopens | number version kept reason | the run goes back to `version`
notice | info | number since steps | the owner has extended the run from step `since` on
extended | info reopens | number since steps | the extension is in force
notice_refused | warning | peer reason | an extension was not valid
notice_missed | warning | number since steps reason then | an extension came too late
finished | info self | stage version weights_sha256* path advice problem | the last version is reached; `path`: its file
audited | debug | stage peer step index ok | a case was recomputed here; `ok`: the work was right
rechecked | debug | stage peer step index | a case was sent to the stage, with known rechecks
weighed | debug | stage peer step index off | work of another numerics class was recomputed; `off`: relative distance
untried | debug | stage peer step index reason | a case could not be recomputed here
withheld | warning | stage peer step index reason | a peer did not show what it had committed to
disputed | warning | stage peer step index peers | one of `peers` is Byzantine, and the quorum cannot tell which
convicted | warning accuses kept | stage peer step reason | a peer is banned
convicted_here | warning self | stage step reason evidence | this peer is banned, and ends; `evidence`: the file
reducer_lied | warning accuses kept | stage step peer why part | a reducer made a wrong aggregate
pledge_lied | warning accuses kept | stage step peer why part | a contribution was not what its commitment says
tainted | warning kept | stage step peer | work of a banned peer in that step was wrong, and is applied here
stays_applied | warning | step reason | the run does not go back before that step
no_papers | warning | reason then | receipts or proofs cannot be written
began | debug | name life options | `swarmnet local` begins, or resumes
started | debug | name child pid start | a process was started
crashed | debug | name child exit_code | a process ended with an error
left | debug | name child | a process has left in good order
shut_out | debug | name child | a banned process has ended
killed | debug | name child by step | a process was killed
killed_all | debug | name step | all processes were killed
kill_rank | debug | name child order step | a rank was killed
stop | debug | name child order step | a process was stopped
continued | debug | name child order | a stopped process was continued
join | debug | name child order step | one more replica was started
drain | debug | name child order step | a replica was told to leave
partition | debug | name order step | links between two groups were cut
one_way_cut | debug | name order step | what some send does not reach others
slow | debug | name child order step | links were made slow
disk_full | debug | name child order step | the disk of a virtual replica is full
clock_change | debug | name child order step | the wall clock of a virtual replica jumped
over | debug | name order | such a fault has ended
postponed | debug | name order reason | a fault waits until it does no lasting harm
reached | debug | hold phase step | a process is held in the phase that a fault names
asking | debug | - | a process fetches its state for the first time
holding | debug | tasks blocks | what a process holds, for a search for leaks
worked | debug | phase step index | how far a microbatch has come, in a traced process
lied | debug self kept | kind step index | a Byzantine test double returned wrong work
reference_step | debug | step loss tokens | a step of the single-process reference
reference_weights | debug | sha256 | digests of its last weights
"""

# type | fields: a field has one type, in whichever event it is
_TYPES = """
integer | averaging_bytes ballot blocks bytes bytes_needed bytes_per_s counted donors elements epoch eta_s executions
integer | exit_code hop incarnation index level life measured microbatches needs needs_each newest num_peers num_tokens
integer | number of pid rank ranks since slots stage start step steps strays sum_bytes tasks tokens total until_step
integer | version within from to
number | factor grad_norm held_out learning_rate loss loss_sum moved off seconds step_s tokens_per_second
number or null | level_in seconds_left
boolean | dialled invited kept ok discard
peer | caller donor for leader peer relay
string | advice at by chain child code digest evidence hold how kind left mesh name nat order path phase problem reason
string | round then weights_sha256 why
list of integer | indexes part pids serves_on discarded
list of number | losses
list of peer | could peers relays
list of string | addresses dht links
list of array | contributions
list of list of peer | routes
list of object | calls
map of number | rates
map of string | could_not not_asked sha256
object | options
"""


@dataclass(frozen=True, slots=True)
class EventKind:
    """A row. fields: those that an event may have; True: a digest or a list, which no log line for a person shows."""

    name: str
    level: int
    marks: frozenset[str]
    fields: Mapping[str, bool]
    meaning: str


WARNING = 30
_LEVELS = {"debug": 10, "info": 20, "warning": WARNING}
"""As `logging` numbers them, which pure modules do not import."""


def _rows() -> Iterator[EventKind]:
    for line in _TABLE.strip().splitlines():
        name, marks, fields, meaning = line.split(" | ")
        level, *marked = marks.split()
        names = {} if fields == "-" else {each.removesuffix("*"): each.endswith("*") for each in fields.split()}
        yield EventKind(name, _LEVELS[level], frozenset(marked), names, meaning)


KINDS = {kind.name: kind for kind in _rows()}

FIELD_TYPES = {
    field: kind for kind, names in (row.split(" | ") for row in _TYPES.strip().splitlines()) for field in names.split()
}
"""By field: as `_type_schema` reads it."""


def kind_of(event: str) -> EventKind:
    """The event's row. Tests hold that there is one; without one a running peer logs the event for debugging."""
    return KINDS.get(event) or EventKind(event, _LEVELS["debug"], frozenset(), {}, "")


class EventFold:
    """Takes in events: one of kind `x` goes to the method `on_x`, if there is one. A kind that is not in the table is
    found when the class is made."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        methods = {name for name, value in vars(cls).items() if name.startswith("on_") and callable(value)}
        unknown = methods - {f"on_{kind}" for kind in KINDS}
        assert not unknown, f"{cls.__name__}: no kinds of events: {sorted(unknown)}"

    def take(self, kind: str, *rest: Any) -> Any:
        """What the method of that kind returns; None if there is none."""
        method = getattr(self, f"on_{kind}", None)
        return None if method is None else method(*rest)


def marked(mark: str) -> frozenset[str]:
    """The names of all kinds with that mark."""
    return frozenset(name for name, kind in KINDS.items() if mark in kind.marks)


def page() -> str:
    """docs/events.md."""
    lines = [_HEAD]
    for word, level in reversed(_LEVELS.items()):
        lines += [f"## Level {word}\n", "event | fields | meaning\n---|---|---"]
        for kind in KINDS.values():
            if kind.level == level:
                fields = " ".join(f"`{each}`" for each in kind.fields)
                lines.append(f"`{kind.name}` | {fields} | {kind.meaning}")
        lines.append("")
    return "\n".join(lines)


_DEFINITIONS: dict[str, dict[str, object]] = {
    # The events file has a text for a float that JSON has no word for.
    "number": {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]},
    "peer": {"type": "string", "description": "the id of a peer"},
}
"""Types that are no type of JSON Schema."""


def _type_schema(kind: str) -> dict[str, object]:
    """JSON Schema of a type: "list of T", "map of T" (from text), "T or null", or one word."""
    match kind.split(" ", 2):
        case ["list", "of", inner]:
            return {"type": "array", "items": _type_schema(inner)}
        case ["map", "of", inner]:
            return {"type": "object", "additionalProperties": _type_schema(inner)}
        case [inner, "or", "null"]:
            return {"anyOf": [_type_schema(inner), {"type": "null"}]}
    return {"$ref": f"#/$defs/{kind}"} if kind in _DEFINITIONS else {"type": kind}


def schema() -> str:
    """docs/events.schema.json: JSON Schema of a line of an events file."""
    of_all = {"t": {"type": "number"}, "event": {"enum": list(KINDS)}, "name": {"type": "string"}}
    heads = dict.fromkeys(of_all, True)
    # Not `oneOf`: of a line that is wrong, validators would say how it differs from every kind.
    cases = [
        {
            "if": {"properties": {"event": {"const": kind.name}}, "required": ["event"]},
            "then": {
                "description": kind.meaning,
                "properties": {each: _type_schema(FIELD_TYPES[each]) for each in kind.fields} | heads,
                "additionalProperties": False,
            },
        }
        for kind in KINDS.values()
    ]
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of an events file of swarmnet",
        "type": "object",
        "properties": of_all,
        "required": ["t", "event"],
        "allOf": cases,
        "$defs": _DEFINITIONS,
    }
    return json.dumps(whole, indent=1) + "\n"


_HEAD = """# Events

A process appends one JSON object per line to its events file (`--events FILE`): `t` (Unix seconds), `event` (a name
from the tables below) and the fields of that event. `swarmnet local` writes the events of all its processes to
`events.jsonl`, with the `name` of each process. `run_peer(on_event=...)` receives the same names and fields.

[events.schema.json](events.schema.json) is the JSON Schema (draft 2020-12) of a line. Check a file with it before a
dashboard or a data pipeline relies on its fields, with any validator that reads JSON lines, such as
`npx @sourcemeta/jsonschema validate docs/events.schema.json runs/churn/events.jsonl`.

The log shows events of level warning and info, and with `--log-level debug` all of them. It leaves out lists and
digests, and shows at most one line a second of an event that comes with every step: `untold=3` at its end says that
three more came since the line before.

This page is generated: `python -m swarmnet.telemetry.kinds > docs/events.md`. The schema: the same with `--schema`.
"""

if __name__ == "__main__":
    print(schema() if sys.argv[1:] == ["--schema"] else page(), end="")
