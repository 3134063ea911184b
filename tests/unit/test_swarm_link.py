"""The link by which somebody is invited: what is a link, and in which words everything else is refused."""

import pytest
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


def test_a_link_may_bring_an_invitation_which_is_not_for_the_log() -> None:
    link = SwarmLink(RUN, ADDRESS, INVITATION)
    assert str(link) == f"swarm:{RUN}@{ADDRESS}+invite={INVITATION}" and SwarmLink.parse(str(link)) == link
    assert link.public == SwarmLink(RUN, ADDRESS) and SwarmLink.parse(f"swarm:{RUN[:12]}@{ADDRESS}+invite={INVITATION}")


def test_capitals_in_the_run_id_are_forgiven() -> None:
    assert SwarmLink.parse(f"swarm:{RUN.upper()}@{ADDRESS}").run == RUN


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("run.toml", "is not a link like swarm:RUN_ID@"),
        (f"swarm:{RUN}", "ends before its @ADDRESS"),
        (f"swarm:{RUN}@", "ends before its @ADDRESS"),
        (f"swarm:{RUN[:11]}@{ADDRESS}", "is not a run id: 64 hex digits, or the first 12 or more"),
        (f"swarm:{RUN}0@{ADDRESS}", "is not a run id"),
        (f"swarm:{'x' * 64}@{ADDRESS}", "is not a run id"),
        (f"swarm:@{ADDRESS}", "is not a run id"),
        (f"swarm:{RUN}@/ip4/203.0.113.7/tcp/31337", "must end in /p2p/"),
        (f"swarm:{RUN}@/ip4/203.0.113.7/udp/31337/p2p/{PEER}", "is not an address like"),
        (f"swarm:{RUN}@/ip4/203.0.113.999/tcp/31337/p2p/{PEER}", "is not an IPv4 address"),
        (f"swarm:{RUN}@/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWx", "is not an Ed25519 peer id"),
        (f"swarm:{RUN}@{ADDRESS}+invite=", "the link's invitation, after +invite=: does not begin with invitation:"),
        (f"swarm:{RUN}@{ADDRESS}+invite={INVITATION[:-1]}", "a damaged invitation: copy all of it"),
        (f"swarm:{'0' * 64}@{ADDRESS}+invite={INVITATION}", "its invitation to run 3f0a9c3f0a9c: paste the one"),
        (f"swarm:{RUN}@/ip4/203.0.113.7\n/tcp/31337/p2p/{PEER}", "paste it as one line"),
    ],
)
def test_what_is_no_link_is_refused_in_words(text: str, line: str) -> None:
    with pytest.raises(UsageError) as refused:
        SwarmLink.parse(text)
    assert line in str(refused.value) and "\n" not in str(refused.value)


@given(st.text(max_size=120))
def test_any_text_is_a_link_or_a_usage_error(text: str) -> None:
    for candidate in (text, f"swarm:{text}", f"swarm:{RUN}@{text}"):
        try:
            assert str(SwarmLink.parse(candidate)).startswith("swarm:")
        except UsageError:
            pass


def test_a_link_through_a_relay_says_whose_link_to_ask_for() -> None:
    peer = "12D3KooWQYV9dGMFoRzNStwpXztXaBUjtPqi6aU76ZgUriHhKust"
    with pytest.raises(UsageError, match="through a relay: ask for the link of a peer that can be dialled"):
        SwarmLink.parse(f"swarm:{'ab' * 32}@/p2p/{peer}/p2p-circuit/p2p/{peer}")
