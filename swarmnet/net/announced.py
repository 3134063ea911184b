"""Which announced address stands for which port. Pure.

Behind a router, or with several networks, the operator says what others see: every address is published as typed, and
its port says what answers there.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarmnet.errors import UsageError
from swarmnet.ids import PeerId
from swarmnet.net.address import Address


def announced_at(announce: Sequence[str], me: PeerId, **ports: int) -> dict[str, tuple[Address, ...]]:
    """Sort the announced multiaddrs by the option whose port they name; nothing announced is nothing under each.

    ports: the fixed port of every option (`dht_port=31337`); 0 is a port that nobody knows yet. Raises UsageError if an
    address names none of them or another peer, or if an option is named by no address.
    """
    found: dict[str, list[Address]] = {option: [] for option in ports}
    if announce:
        for option, port in ports.items():
            if not port:
                raise UsageError(
                    f"--announce needs a fixed {_flag(option)}: an address whose port is chosen anew at every start "
                    "leads nowhere"
                )
        if len(set(ports.values())) < len(ports):
            raise UsageError(f"{' and '.join(map(_flag, ports))} are the same port: choose two")
    choices = " or ".join(f"{port} ({_flag(option)})" for option, port in ports.items())
    for text in announce:
        address = Address.parse(text)
        if address.peer not in (None, me):
            raise UsageError(f"--announce {text}: that is another peer's id, this one is {me}: leave out /p2p/...")
        named = next((option for option, port in ports.items() if port == address.port), None)
        if named is None:
            raise UsageError(
                f"--announce {text}: nothing of this peer listens on port {address.port}: it must be {choices}; "
                "forward the same port number on your router"
            )
        found[named].append(Address(address.kind, address.host, address.port, me))
    for option, addresses in found.items():
        if announce and not addresses:
            raise UsageError(
                f"--announce names no address with port {ports[option]} ({_flag(option)}): give one for each port"
            )
    return {option: tuple(addresses) for option, addresses in found.items()}


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
