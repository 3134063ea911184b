"""Hello: the two ends of a line make sure they are in the same run, admitted, speak the same protocol, share a clock.

Both sides check. The callee remembers which peers have greeted it, up to a bound; it asks a forgotten peer to greet
again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarmnet import PROTOCOL_VERSION, __version__
from swarmnet.clock import wall_time
from swarmnet.directory import Pass
from swarmnet.errors import RejectCode
from swarmnet.ids import PeerId, RunId
from swarmnet.messages import Rejected
from swarmnet.net.admission import Admissions, advised
from swarmnet.wire.convert import Hello

HELLO = "/swarmnet.v1.Run/Hello"
_SHOWN_CHARS = 40
"""Of what a stranger writes, in a refusal."""


def _named(software: str, major: int, minor: int) -> str:
    """What runs there, with its protocol."""
    protocol = f"protocol {major}.{minor}"
    return software if protocol in software else f"{software or 'an earlier swarmnet'}, {protocol}"


def difference(caller: str, callee: str) -> str:
    """How two peers complete the same file differently (`Hello.filled_in`), in words; "" if they do not.

    A field that only one of them knows is no difference: its default is what versions without the field do.
    """
    one, other = (dict(line.split(" = ", 1) for line in text.split("\n") if " = " in line) for text in (caller, callee))
    for name in sorted(one.keys() & other.keys()):
        if one[name] != other[name]:
            values = f"{one[name][:_SHOWN_CHARS]} for the caller and {other[name][:_SHOWN_CHARS]} for the callee"
            return f"manifests differ, {name[:_SHOWN_CHARS]}, which run.toml leaves out, is {values}"
    return "" if one.keys() ^ other.keys() else "manifests differ in a field that neither peer names"


@dataclass(frozen=True, slots=True)
class Greeter:
    """What I say in a Hello, and what I think of another's. `clock`: Unix seconds.

    admissions: who may take part; None: anyone. invitation(): the pass that I show.
    """

    run: RunId | None
    max_clock_offset_s: float
    version: tuple[int, int] = PROTOCOL_VERSION
    clock: Callable[[], float] = wall_time
    admissions: Admissions | None = None
    invitation: Callable[[], Pass | None] = lambda: None
    completed: bytes = b""
    """Hash of my manifest with its defaults; empty: I do not compare it."""
    filled_in: str = ""
    """The fields that its file leaves out, with my defaults."""
    boot_id: int = 0

    def hello(self) -> Hello:
        """My greeting, now."""
        assert self.run is not None, "a peer without a run can only ask for a manifest"
        return Hello(
            self.run,
            *self.version,
            self.clock(),
            self.invitation(),
            self._software,
            self.completed,
            self.filled_in,
            self.boot_id,
        )

    @property
    def _software(self) -> str:
        return _named(f"swarmnet {__version__}", *self.version)

    def judge(self, hello: Hello, peer: PeerId, *, sent: float | None = None) -> Rejected | None:
        """Why `peer` and I cannot work together, or None. `sent`: when I asked, if this is an answer."""
        # First: what follows may mean something else in another protocol.
        if hello.major != self.version[0]:
            older = "caller's" if (hello.major < self.version[0]) == (sent is None) else "callee's"
            words = f"protocols differ, {_named(hello.software, hello.major, hello.minor)} and {self._software}"
            return Rejected(RejectCode.WRONG_VERSION, f"{words}: update the {older} software (docs/upgrading.md)")
        # Before clocks: who has the wrong manifest is to hear of that, not of its clock.
        if hello.run != self.run:
            ours = self.run[:12] if self.run else "none yet"
            return Rejected(RejectCode.WRONG_RUN, f"runs differ, {hello.run[:12]} and {ours}: compare the manifests")
        # An earlier version does not say its hash, and reads no manifest that leaves a field out.
        if hello.completed and self.completed and hello.completed != self.completed:
            caller, callee = (hello.filled_in, self.filled_in) if sent is None else (self.filled_in, hello.filled_in)
            if differs := difference(caller, callee):
                return Rejected(RejectCode.WRONG_RUN, f"{differs}: run one version of swarmnet (docs/manifest.md)")
        now = self.clock()
        # The other clock was read between `sent` and now: only what is outside of both is an offset.
        offset = max((now if sent is None else sent) - hello.clock, hello.clock - now)
        if offset > self.max_clock_offset_s:
            limit = f"{self.max_clock_offset_s:.0f} s"
            return Rejected(RejectCode.CLOCK, f"clocks differ by {offset:.0f} s, more than {limit}: set both by NTP")
        # An expired or forged pass changes nothing; `unwelcome` then says why it does not admit the peer.
        if self.admissions is not None:
            self.admissions.show(peer, hello.invitation, now=now)
        return self.unwelcome(peer)

    def unwelcome(self, peer: PeerId) -> Rejected | None:
        """Why `peer` is not admitted now, whatever it was when it greeted: invitations end, and peers are banned."""
        reason = self.admissions.why_not(peer, now=self.clock()) if self.admissions is not None else ""
        return Rejected(RejectCode.NOT_ADMITTED, f"peer {peer}: {advised(reason, peer, None)}") if reason else None
