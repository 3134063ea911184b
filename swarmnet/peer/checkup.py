"""What `swarmnet doctor` says: each finding in words, whether it is a problem, and what to do about it. Pure: numbers
in, rows out. `ADVICE` is the one table of what to do: `join` and `status` use its words, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from swarmnet.ids import PeerId
from swarmnet.telemetry.text import counted, short

GIB = 1 << 30

ADVICE: Mapping[str, str] = {
    "unreachable": "open TCP ports {port} and {dht_port} in this machine's firewall (fix them with --port and "
    "--dht-port), and behind a router forward both and say with --announce what others see",
    "relayed": "it takes part all the same, and others pay for the detour; to be reached directly, {unreachable}",
    "firewall": "the firewall is this machine's or its network's: {unreachable}",
    "router": "hole punching reaches most other homes, and relays the rest (docs/nat.md); forwarded ports serve better",
    "symmetric": "other homes are reached through relays: turn off what the router calls symmetric NAT or port "
    "randomisation, or forward both ports and say with --announce what others see",
    "carrier": "no port can be forwarded: ask the provider for a public address, IPv4 or IPv6; until then relays serve",
    "bulk_closed": "open TCP port {port} as you did the others (fix it with --bulk-port): until then all tensors go "
    "through gRPC, which is slower",
    "unreached": "look at its firewall",
    "software": "install what is missing: pip install -e . in a checkout of swarmnet",
    "no_compiler": "install g++ or clang++: sums and updates on the CPU take 1.3 to four times as long without",
    "gpu_unused": "there is a GPU that torch does not see: install its driver, and a torch with CUDA",
    "gpu_missing": "torch sees no CUDA device here: leave --device out, or install its driver and a torch with CUDA",
    "memory": "end what else takes memory, or take a smaller part with --activations recompute (docs/plan.md)",
    "disk": "free some, choose another disk with --dir, or cap what checkpoints take (--disk)",
    "descriptors": "raise the limit: ulimit -n 65536, or LimitNOFILE= of a systemd unit",
    "tasks": "raise the limit: docker --pids-limit, TasksMax= of a systemd unit",
    "shared": "give it more: docker --shm-size 8g; ranks of a peer with several GPUs fail without",
    "port_taken": "choose others with --port, --dht-port and --bulk-port, or leave them out for free ones",
    "clock": "set it: timedatectl set-ntp true",
    "nobody": "check that this machine is online, or ask for a link to a peer that is up now",
    "slow_line": "members wait for such a link: take less work with --slots 1, and see docs/plan.md for slow links",
    "silent": "its line or machine is overloaded, or a firewall drops what goes there: nothing to do here",
}
"""Kind of problem -> what to do, in one line."""

Severity = Literal["ok", "note", "warning", "error"]

LEAST_PYTHON = (3, 11)
LEAST_MEMORY, LEAST_DISK, LEAST_DESCRIPTORS, LEAST_TASKS = GIB, GIB, 4096, 128
WARN_OFFSET_S = 5.0
SLOW_BYTES_PER_S = 10e6 / 8
"""10 Mbit/s."""


@dataclass(frozen=True, slots=True)
class Row:
    """One finding. problem: a kind in `ADVICE`, or "" if all is well. facts: the same for programs."""

    name: str
    words: str
    severity: Severity = "ok"
    problem: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    ports: tuple[int, int] = (0, 0)

    @property
    def advice(self) -> str:
        """What to do, in one line."""
        return advice(self.problem, *self.ports) if self.problem else ""

    def record(self) -> dict[str, object]:
        """As JSON."""
        found = asdict(self) | {"advice": self.advice}
        del found["ports"]
        return found


def advice(kind: str, port: int = 0, dht_port: int = 0) -> str:
    """What to do about a kind of problem; the ports are those that others must reach."""
    named = {"port": port or "N", "dht_port": dht_port or "M"}
    return ADVICE[kind].format(**named, unreachable=ADVICE["unreachable"].format(**named))


def exit_code(rows: Iterable[Row]) -> int:
    """0: nothing keeps this machine from taking part well; 1: something does."""
    return int(any(row.severity in ("warning", "error") for row in rows))


def finding(
    name: str,
    words: str,
    problem: str = "",
    severity: Severity = "warning",
    ports: tuple[int, int] = (0, 0),
    **facts: Any,
) -> Row:
    """A row: all is well without a problem."""
    return Row(name, words, severity if problem else "ok", problem, facts, ports)


# ---------------------------------------------------------------- this machine


def software(python: tuple[int, ...], versions: Mapping[str, str]) -> Row:
    """versions: of each package that is needed; "" for one that is not there."""
    shown: dict[str, Any] = {"python": ".".join(map(str, python)), **versions}
    words = ", ".join(f"{name} {version or 'missing'}" for name, version in shown.items())
    bad = python < LEAST_PYTHON or not all(versions.values())
    return finding("software", words, "software" * bad, "error", **shown)


def compute(device: str, tflops: float, *, gpu_unseen: bool, gpu_missing: bool = False) -> Row:
    """tflops: of matrix products, as measured. gpu_unseen: there is a GPU, and torch does not see it. gpu_missing: a
    peer was told to compute on one, and torch sees none."""
    problem = "gpu_missing" if gpu_missing and not gpu_unseen else "gpu_unused" if gpu_unseen else ""
    severity: Severity = "error" if gpu_missing else "warning"
    words = f"{device}, {tflops:.3g} TFLOP/s"
    return finding("compute", words, problem, severity, device=device, tflops=round(tflops, 3))


def kernels(compiler: str | None) -> Row:
    """compiler: the C++ compiler that makes the kernels; None: there is none, and torch's operations serve."""
    if compiler:
        return finding("kernels", f"sums and updates are compiled by {compiler}", compiler=compiler)
    return finding("kernels", "no C++ compiler: sums and updates are slower", "no_compiler", "note", compiler=compiler)


def memory(host: int | None, gpus: Collection[int], *, limit: int | None = None) -> Row:
    """Bytes free on the host (None: unknown), and on each GPU. limit: of this process's control groups, if any."""
    words = f"{host / GIB:.1f} GiB free" if host is not None else "it is not known how much is free"
    words += f" within a limit of {limit / GIB:.1f} GiB" if limit is not None else ""
    words += "".join(f", {free / GIB:.1f} GiB on GPU {number}" for number, free in enumerate(gpus))
    low = any(free is not None and free < LEAST_MEMORY for free in (host, *gpus))
    return finding("memory", words, "memory" * low, host=host, gpus=list(gpus), limit=limit)


def disk(place: str, free: int) -> Row:
    """Bytes free where checkpoints go."""
    return finding("disk", f"{free / GIB:.1f} GiB free in {place}", "disk" * (free < LEAST_DISK), dir=place, free=free)


def descriptors(limit: int) -> Row:
    """How many files and connections a process may have open, once it has asked for all it may have."""
    words = f"{limit:,} files and connections at once"
    return finding("descriptors", words, "descriptors" * (limit < LEAST_DESCRIPTORS), limit=limit)


def tasks(left: int | None) -> Row:
    """How many processes and threads may still start; None: no control group limits them."""
    words = "no limit on processes and threads" if left is None else f"{left:,} more processes and threads may start"
    return finding("tasks", words, "tasks" * (left is not None and left < LEAST_TASKS), left=left)


def shared_memory(free: int) -> Row:
    """Bytes free in /dev/shm, through which ranks on several GPUs exchange."""
    return finding("shared", f"{free / GIB:.2f} GiB free in /dev/shm", "shared" * (free < LEAST_MEMORY), free=free)


def listening(taken: Mapping[str, int], *, own: Collection[int]) -> Row:
    """taken: by flag, the ports that cannot be bound. own: the ports of the peer that runs with this --dir."""
    if not taken:
        return finding("ports", "can be listened on", taken={})
    foreign = {flag: port for flag, port in taken.items() if port not in own}
    words = " and ".join(f"{flag} {port}" for flag, port in (foreign or taken).items())
    if foreign:
        return finding("ports", f"{words} cannot be listened on", "port_taken", "error", taken=foreign)
    return finding("ports", f"{words} in use by the peer that runs with this --dir", running=True, taken=dict(taken))


# ---------------------------------------------------------------- the swarm


def swarm(run: str, serving: int) -> Row:
    """The run was found, and so many peers announce that they serve it."""
    words = f"run {run[:12]}: {counted(serving, 'peer')} serve{'s' * (serving == 1)} it"
    return finding("swarm", words, "nobody" * (not serving), run=run, peers=serving)


def no_swarm(words: str) -> Row:
    """This machine could not get that far. words: of the error, which say what to do themselves."""
    return Row("swarm", words, "error")


def clock(offsets: Mapping[PeerId, float], limit_s: float) -> Row:
    """offsets: by how many seconds each member's clock is ahead. The median counts: one may be wrong."""
    if not offsets:
        return finding("clock", "no peer to compare it with")
    offset = -statistics.median_high(offsets.values())
    side = "ahead of" if offset > 0 else "behind"
    words = f"{abs(offset):.1f} s {side} the members'" if abs(offset) >= 0.1 else "that of the members"
    off = abs(offset) > min(WARN_OFFSET_S, limit_s / 2)
    severity: Severity = "error" if abs(offset) > limit_s else "warning"
    return finding("clock", words, "clock" * off, severity, offset_s=round(offset, 3))


def line(peer: str, round_trip_s: float, down: float) -> Row:
    """To one member; down: bytes per second from there, 0 if they were not measured."""
    words = f"to {short(peer)}: {1000 * round_trip_s:.0f} ms"
    if down:
        words += f", {down * 8e-6:,.0f} Mbit/s down"
    facts: dict[str, Any] = {"peer": peer, "round_trip_s": round(round_trip_s, 4), "down_bytes_per_s": round(down)}
    return finding("line", words, "slow_line" * (0 < down < SLOW_BYTES_PER_S), "note", **facts)


def no_line(peer: str, reason: str) -> Row:
    """One member could not be asked."""
    return finding("line", f"to {short(peer)}: none ({reason})", "silent", "note", peer=peer, reason=reason)


def dialled_back(facts: Mapping[str, Any]) -> str:
    """Of the event of that name: who could connect to this peer."""
    could, could_not, not_asked = ([short(peer) for peer in facts[who]] for who in ("could", "could_not", "not_asked"))
    proved = "; a connection from outside has come in" if facts.get("dialled") else ""
    silent = f"; could not ask {', '.join(not_asked)}" if not_asked else ""
    # One that could not is what the operator has to hear of; who could is only counted.
    if could_not:
        tried, others = len(could) + len(could_not), ", ".join(could_not)
        return f"{len(could)} of {tried} members that tried could connect to this peer, not {others}{silent}{proved}"
    if proved and not could:
        return f"others can connect to this peer{proved}{silent}"
    if not could:
        return f"no peer that was asked could say whether others can connect to this peer{silent}"
    return f"{counted(len(could), 'member')} connected back{silent}"


def hidden(facts: Mapping[str, Any]) -> str:
    """Of the event of that name: no peer can open a connection to this one, and relays serve it."""
    none = f"{counted(len(facts['could_not']), 'member')} could not connect to this peer"
    return f"{none}: it takes part through {' and '.join(map(short, facts['relays']))}"


def reached(facts: Mapping[str, Any], ports: tuple[int, int]) -> Row:
    """Can others connect to this machine? As a peer reports it (`net.nat.dial_back`); {}: no peer could tell."""
    known = {who: facts[who] for who in ("could", "could_not", "relays") if who in facts}
    if "relays" in known:
        return finding("reached", hidden(facts), "relayed", "note", ports, how="relay", **known)
    if "could" in known:
        how = "direct" if facts["could"] or facts.get("dialled") else "unknown"
        return finding("reached", dialled_back(facts), ports=ports, how=how, **known)
    if "could_not" in known:
        why = ", ".join(sorted({reason or "no reason given" for reason in facts["could_not"].values()}))
        members = counted(len(facts["could_not"]), "member")
        words = f"{members} could not connect to this peer ({why}), and no peer relays for it"
        return finding("reached", words, "unreachable", "error", ports, how="none", **known)
    return finding("reached", "there was no peer to ask", how="unknown")


def bulk(how: str, port: int, came: Collection[PeerId]) -> Row:
    """Can others connect to the port of bulk connections? how: they reach this machine (`reached`). came: who has
    connected to that port."""
    if came:
        words, problem = f"{counted(len(came), 'member')} connected to port {port}, too", ""
    elif how == "direct":
        words, problem = f"no peer that connected to this machine could connect to port {port}, too", "bulk_closed"
    else:
        why = "no peer could say" if how == "unknown" else "not used: others do not reach this machine directly"
        words, problem = why, ""
    ports = (port, 0) if problem else (0, 0)
    return finding("bulk port", words, problem, "note", ports, port=port, came=sorted(came))


_NATS = {
    "none": "none: others see this machine's own address",
    "cone": "a router with one port outside for whomever this machine calls",
    "symmetric": "a router with another port outside for every connection",
    "carrier": "a carrier's router, and none at home",
    "unknown": "fewer than two members outside this network could say",
}


def nat(kind: str, *, how: str, ports: tuple[int, int] = (0, 0)) -> Row:
    """What is between this machine and the others. kind: by `net.nat.kinds`. how: others reach it (`reached`)."""
    words = _NATS[kind]
    # A machine that is reached directly needs no advice.
    if how not in ("relay", "none") or kind == "unknown":
        return finding("nat", words, kind=kind)
    if kind == "none":
        return finding("nat", f"{words}, and a firewall keeps them out", "firewall", "note", ports, kind=kind)
    return finding("nat", words, "router" if kind == "cone" else kind, "note", kind=kind)


# ---------------------------------------------------------------- all of it


def lines(rows: Iterable[Row]) -> list[str]:
    """For a person: a line a finding, and one of advice under each that has some."""
    found = []
    for row in rows:
        found.append(f"{row.severity:<8}{row.name:<12}{row.words}")
        if row.problem:
            found.append(f"{'':<20}-> {row.advice}")
    return found
