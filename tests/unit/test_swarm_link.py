"""The link by which somebody is invited: what is a link, and in which words everything else is refused."""

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.directory import Invitation
from swarmnet.errors import UsageError
from swarmnet.ids import PeerId, RunId
from swarmnet.net.swarm_link import MIN_DIGITS, SwarmLink
from swarmnet.wire.signed import sign, to_text

RUN = "3f0a9c" * 10 + "beef"
PEER = PeerId("12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp")
ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}"


INVITATION = to_text(sign(Invitation(RunId(RUN), PEER, ("stage",)), PEER, lambda data: bytes(64)))

digits = st.text("0123456789abcdef", min_size=MIN_DIGITS, max_size=64)


@given(digits, st.sampled_from(["ip4/1.2.3.4", "dns4/a.example"]))
def test_a_link_survives_being_written_and_read(run: str, host: str) -> None:
    link = SwarmLink(run, f"/{host}/tcp/31337/p2p/{PEER}")
    assert SwarmLink.parse(str(link)) == link == SwarmLink.parse(f"  {link}\n")
    assert link.whole_run == (run if len(run) == 64 else None)
    assert SwarmLink.parse(f"swarm:{run.upper()}@{link.address}") == link, "capitals are forgiven"


def test_a_link_may_bring_an_invitation_which_is_not_for_the_log() -> None:
    link = SwarmLink(RUN, ADDRESS, INVITATION)
    assert str(link) == f"swarm:{RUN}@{ADDRESS}+invite={INVITATION}" and SwarmLink.parse(str(link)) == link
    assert link.public == SwarmLink(RUN, ADDRESS) and SwarmLink.parse(f"swarm:{RUN[:12]}@{ADDRESS}+invite={INVITATION}")


@given(st.text(max_size=120))
def test_any_text_is_a_link_or_a_usage_error(text: str) -> None:
    for candidate in (text, f"swarm:{text}", f"swarm:{RUN}@{text}"):
        with contextlib.suppress(UsageError):
            assert str(SwarmLink.parse(candidate)).startswith("swarm:")
