"""Transcripts: what the replicas of a small swarm sent to each other and decided, most of them with a fault.

    python -m swarmnet.testing.transcript tests/transcripts/*.txt

plays the orders of each file on a virtual swarm of production peers, and writes below them what happens:

    # The leader dies when it has opened the round.
    swarm stages=1 replicas=3 microbatches=3 steps=2
    since 1
    kill sender on StagePlan attempt step=1
    ---
    s0.1 -> s0.2              StagePlan step 1, ballot 0/s0.1
    ...

`->` is a message or (`answers`) the answer of a call, `=>` a call. `Part` asks for a shard: of the receiver's
contribution, of what it has reduced, or of a complete aggregate (`sum`, `replay`); with `pledges` for what others have
committed themselves to. A line without an arrow is an event, `***` is what was done. A ballot is NUMBER/PEER.

An order is an action and its cue. Actions: `kill PEER [BACK_S]`, `stop PEER SECONDS`, `drain PEER`, `join STAGE`,
`cut PEER,PEER|PEER SECONDS`, `drop` (the message that is the cue). Cues: `at SECONDS`, or `on NAME [FIELD=VALUE...]`,
the first such message or event. `sender` and `receiver` mean those of the cue, of an event the replica that reports it;
`from=PEER` and `to=PEER` choose among messages. `show NAME...` prints messages or events that are left out otherwise;
with `since STEP` what comes before that step is left out. As in etcd/raft's testdata a file is compared as a whole.
"""

from __future__ import annotations

import contextvars
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from swarmnet.errors import UsageError
from swarmnet.ids import Ballot, Generation, PeerId, RoundId
from swarmnet.messages import Answer, Committed, Control
from swarmnet.testing.fault import Partition
from swarmnet.testing.network import Message
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm

RULE = "---"
"""Between the orders and what happened."""

_COLUMN = 26
GAP_S = 0.5
"""A pause of so long is a line."""

_FIELDS = {
    "StagePlan": "ballot generation assigned moved evicted execute attempt given awaits",
    "MemberState": "ballot generation owned summed wants returns non_finite round vote commit trouble awaits whole",
    "Round": "id contributions discarded late bans",
    "Trouble": "late refused",
    "Late": "peer owes",
    "Committed": "commit",
    "Commit": "stage step late bans",
    "Process": "step stage index hedge repair avoid",
    "Fetch": "step stage index kind",
    "Part": "kind hop start stop",
    "Gradient": "",
    "SnapshotRequest": "stage version piece",
    "SnapshotPiece": "",
    "TrailRequest": "",
    "AuditRequest": "step stage index peer",
    "Pledge": "",
    "Case": "",
    "MovedTo": "owner",
    "Rejected": "code",
    "Busy": "",
}
"""What is printed of each kind of message, in its order; a field that has its default is not. Other kinds, heartbeats
above all, are printed if they are asked for."""

_EVENTS = (
    "leader leader_stopped ordered released evicted evicted_me sum_lost discarded late excluded resync fetching "
    "following synced draining rerouted averaged_alone sum_failed digest_differs other_commit committed applied drift "
    "restart halted convicted reducer_lied pledge_lied disputed tainted orphaned"
)
"""Events that are printed."""

_LEFT_OUT = (
    "stage digest chain loss loss_sum grad_norm num_tokens seconds bytes averaging_bytes contributions measured "
    "evidence level_in seconds_left total path self part hop"
)
"""Fields of events that are not printed: a reader does not need them, or they change with what is not shown."""


def _formatted(value: object) -> str:
    """A value of a message or event, for a person."""
    match value:
        case Ballot():
            return f"{value.number}/{value.peer}"
        case Generation() | RoundId():
            return str(value.number)
        case frozenset():
            return "{" + " ".join(map(str, sorted(value))) + "}"
        case str() | int() | float():
            return str(value)
        case (peer, Generation(), frozenset() as indexes):  # a contribution
            return f"{peer} {_formatted(indexes)}"
        case tuple() | list():
            return "(" + ", ".join(map(_formatted, value)) + ")"
    return _described(value) if is_dataclass(value) else str(value)


def _is_set(value: object) -> bool:
    return value is not None and value is not False and value not in ("", (), [])


def _described(message: Any) -> str:
    """A message: its step, and what `_FIELDS` names."""
    defaults = {field.name: field.default for field in fields(message)}
    shown = [f"step {message.stamp.step}"] if hasattr(message, "stamp") else []
    for name in _FIELDS.get(type(message).__name__, "").split():
        value = getattr(message, name)
        if value != defaults[name] and value is not None and value != ():
            shown.append(name if value is True or isinstance(value, bytes) else f"{name} {_formatted(value)}")
    return f"{type(message).__name__} {', '.join(shown)}".strip()


class Transcript:
    """Carries out the orders of one file on a swarm that has not begun, and writes down what happens."""

    def __init__(self, orders: Sequence[str]) -> None:
        """Raises UsageError for an order that cannot be read."""
        self.lines: list[str] = []
        self._shown, self._since = {*_FIELDS, *_EVENTS.split()}, 0
        self._orders: list[tuple[list[str], list[str]]] = []  # the action and the cue of each, until it is done
        self._last: dict[tuple[PeerId, PeerId, str], str] = {}
        self._previous: tuple[float, PeerId, str] | None = None  # the line before: more receivers may follow
        self._receivers = ""  # of that line
        self._at = 0.0
        self._context = contextvars.copy_context()  # of no process, that faults end with none
        self._rounds: dict[str, int] = {}  # ids of rounds are large numbers: here they are counted
        settings, at = dict[str, Any](), list[tuple[float, list[str]]]()
        for line in orders:
            match line.split():
                case ["swarm", *words] if all("=" in word for word in words):
                    settings = {key: _setting(value) for key, value in (word.split("=", 1) for word in words)}
                case ["show", *names]:
                    self._shown |= set(names)
                case ["since", step] if step.isdigit():
                    self._since = int(step)
                case [action, *words] if action in _ACTIONS and "on" in words:
                    cut = words.index("on")
                    self._orders.append(([action, *words[:cut]], words[cut + 1 :]))
                case [action, *words, "at", seconds] if action in _ACTIONS and seconds.replace(".", "", 1).isdigit():
                    at.append((float(seconds), [action, *words]))
                case _:
                    raise UsageError(f"{line!r}: write an action ({', '.join(_ACTIONS)}) and a cue, at or on")
        self._begun = not self._since
        if unknown := settings.keys() - {field.name for field in fields(Plan)}:
            raise UsageError(f"swarm {min(unknown)}=: a swarm has no such setting (swarmnet/testing/plan.py)")
        self.swarm = VirtualSwarm(Plan(**settings), seed=1)
        self.swarm.network.intercepts.append(self._on_message)
        self.swarm.hooks.append(self._on_event)
        for delay_s, words in at:
            self.swarm.loop.call_later(delay_s, self._act, words, {})

    def play(self) -> list[str]:
        """Run the swarm to the end of its last step. Raises Broken if an invariant does not hold or it does not end."""
        self.swarm.run(until_s=300.0)
        if self._orders:
            raise UsageError(f"{' '.join(self._orders[0][0])}: its cue never came: {' '.join(self._orders[0][1])}")
        return self.lines

    # ------------------------------------------------------------ what happens

    def _on_message(self, sender: PeerId, receiver: PeerId, message: Message) -> bool | None:
        kind, text = type(message).__name__, _described(message)
        step = _step_of(message)
        self._begun = self._begun or (step is not None and step >= self._since)
        lost = self._carry_out(kind, message, sender=sender, receiver=receiver)
        # Reports are repeated until they are answered.
        old = step is not None and step < self._since
        if kind in self._shown and not old and (lost or self._last.get((sender, receiver, kind)) != text):
            answers = isinstance(message, Answer)
            up = receiver not in self.swarm.last or self.swarm.last[receiver].up
            arrives = up and self.swarm.network.lines.reaches(sender, receiver)
            if arrives and not lost:
                self._last[sender, receiver, kind] = text  # what is lost is said again
            arrow = "->" if answers or isinstance(message, Control) else "=>"
            self._write(sender, f"{arrow} {receiver}", "answers " * answers + text + " (lost)" * (lost or not arrives))
        return False if lost else None

    def _on_event(self, peer: PeerId, event: str, values: dict[str, Any]) -> None:
        if event in self._shown and values.get("step", self._since) >= self._since:
            shown = [
                f"{name} {_formatted(value)}"
                for name, value in values.items()
                if name not in _LEFT_OUT.split() and _is_set(value)
            ]
            self._write(peer, "", f"{event} {', '.join(shown)}".strip())
        self._carry_out(event, values, sender=peer, receiver=peer)

    def _write(self, who: PeerId, whom: str, text: str) -> None:
        now = self.swarm.loop.time()
        if not self._begun or self.swarm.over:
            return
        if self.lines and now - self._at >= GAP_S:
            self.lines.append(f"... {now - self._at:.1f} s")
            self._previous = None
        self._at = now
        text = re.sub(r"\b(id|round) (\d+)", self._numbered, text)
        # The same to several: one line.
        if whom and self._previous == (now, who, text):
            self.lines.pop()
            whom = self._receivers + whom[2:]
        self._previous, self._receivers = (now, who, text), whom
        self.lines.append(f"{f'{who} {whom} ':<{_COLUMN}}{text}")

    def _numbered(self, found: re.Match[str]) -> str:
        return f"{found[1]} {self._rounds.setdefault(found[2], len(self._rounds) + 1)}"

    # ------------------------------------------------------------ what is done

    def _carry_out(self, name: str, of: Any, *, sender: PeerId, receiver: PeerId) -> bool:
        """Carry out the orders of which this is the cue. True: this message is to be lost."""
        lost, cue = False, {"sender": sender, "receiver": receiver}
        for order in list(self._orders):
            action, (kind, *wanted) = order
            if kind == name and all(_fits(want, of, sender, receiver) for want in wanted):
                self._orders.remove(order)
                lost = lost or action == ["drop"]
                if action != ["drop"]:
                    # Right after it: the message is on its way, and nothing more was done.
                    self.swarm.loop.call_soon(self._act, action, cue, context=self._context)
        return lost

    def _act(self, action: list[str], cue: dict[str, PeerId]) -> None:
        if self.swarm.over:
            return
        words = [cue.get(word, word) for word in action[1:]]
        self._previous, self._at = None, self.swarm.loop.time()
        self.lines.append(f"*** {' '.join([action[0], *words])}")
        try:
            _ACTIONS[action[0]](self.swarm, *words)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{' '.join(action)}: there is no such peer, or it needs other words ({error})") from error


def _kill(swarm: VirtualSwarm, peer: str, back_s: str = "") -> None:
    node = swarm.last.get(swarm.id_of(peer))
    swarm.kill(peer)
    if back_s and node is not None:
        swarm.loop.call_later(float(back_s), lambda: swarm.over or swarm.add(node.stages, node.peer_id))


def _stop(swarm: VirtualSwarm, peer: str, seconds: str) -> None:
    swarm.stop(peer)
    swarm.loop.call_later(float(seconds), swarm.resume, peer)


def _cut(swarm: VirtualSwarm, groups: str, seconds: str) -> None:
    rule = Partition(
        between=tuple(tuple(group.split(",")) for group in groups.split("|")), for_s=float(seconds), at_s=0
    )
    swarm.cut(rule)
    swarm.loop.call_later(float(seconds), swarm.heal, rule)


_ACTIONS: dict[str, Callable[..., object]] = {
    "kill": _kill,
    "stop": _stop,
    "cut": _cut,
    "drain": VirtualSwarm.drain,
    "join": lambda swarm, stage: swarm.add((int(stage),)),
    "drop": lambda swarm: None,
}


def _setting(value: str) -> Any:
    if ":" in value:  # (stage, step, index)
        return frozenset(tuple(map(int, each.split(":"))) for each in value.split(","))
    return int(value) if value.isdigit() else float(value) if value.replace(".", "", 1).isdigit() else value


def _step_of(message: Any) -> int | None:
    of = getattr(message, "commit", None) if isinstance(message, Committed) else getattr(message, "stamp", message)
    return getattr(of, "step", None)


def _fits(want: str, of: Any, sender: PeerId, receiver: PeerId) -> bool:
    """Is this so of a message, or of the fields of an event? A value may be left out: then the field has one."""
    key, _, value = want.partition("=")
    if key in ("from", "to"):
        return {"from": sender, "to": receiver}[key] == value
    found = of.get(key) if isinstance(of, dict) else _step_of(of) if key == "step" else getattr(of, key, None)
    return _formatted(found) == value if value else bool(found)


def written(text: str) -> str:
    """A transcript's whole text, with what happens today. Raises UsageError, Broken."""
    head = text.partition(f"\n{RULE}\n")[0].rstrip("\n")
    orders = [line for line in head.splitlines() if line.strip() and not line.startswith("#")]
    return "\n".join([head, RULE, *Transcript(orders).play()]) + "\n"


def main(paths: Sequence[str]) -> int:
    """Write these files again, and print the names of those that have changed. Returns the exit code."""
    if not paths:
        print("usage: python -m swarmnet.testing.transcript FILE... (tests/transcripts/*.txt)", file=sys.stderr)
        return 2
    for path in map(Path, paths):
        try:
            before = path.read_text(encoding="utf-8")
            after = written(before)
        except (OSError, UsageError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
