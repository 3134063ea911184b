"""Ask the home's router to forward our port, for as long as this process runs: UPnP, by the extra `upnp`.

Without the extra, without such a router, or behind a carrier's NAT as well, nothing is mapped; then others reach this
peer through relays. A mapping has a lease: what a killed process leaves behind ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import ipaddress
import random
import urllib.parse
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from swarmnet import telemetry
from swarmnet.ids import PeerId
from swarmnet.net.address import Address

log = telemetry.get(__name__)

LEASE_S = 1200
"""Renewed after a third of it."""

_SEARCH_S = 1
"""Routers at home answer within milliseconds; this delays the start of everybody who has none."""
_ANSWER_S = 3
_LEASES_WITHOUT_END, _TAKEN = 725, 718
"""What a router refuses by: a lease that ends, and an outside port that somebody else has."""
_OTHER_PORTS = 3

Routers = Callable[[str], Awaitable[Sequence[str]]]
"""Where devices that call themselves routers describe themselves; asked with our own address."""


def may_ask(host: str) -> bool:
    """Is that the address of a host at home, and can we ask its router?"""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    behind = ip.version == 4 and ip.is_private and not ip.is_loopback
    return behind and importlib.util.find_spec("async_upnp_client") is not None


async def search(host: str) -> list[str]:
    """Routers in the network of this host."""
    from async_upnp_client.profiles.igd import IgdDevice

    try:
        found = await IgdDevice.async_search(source=(host, 0), timeout=_SEARCH_S)
    except OSError:  # no multicast here
        return []
    return list(dict.fromkeys(answer["location"] for answer in found if "location" in answer))


@contextlib.asynccontextmanager
async def mapped_port(
    host: str, port: int, peer: PeerId, *, routers: Routers = search, renew_s: float = LEASE_S / 3
) -> AsyncGenerator[Address | None, None]:
    """While open, a router forwards a port of its own to this host's; the address that others then see, or None."""
    for location in await routers(host):
        router = _Router(location, host, port)
        address = await router.outside()
        if address is None or not await router.map():
            continue
        log.info("port_mapped", router=location, address=f"{address}:{router.port}")
        renewing = asyncio.get_running_loop().create_task(_renewing(router, renew_s))
        try:
            yield Address.of(address, router.port, peer)
        finally:
            renewing.cancel()
            await router.unmap()
        return
    yield None


async def _renewing(router: _Router, renew_s: float) -> None:
    # A router that restarts forgets its mappings, and is asked again for the same.
    while True:
        await asyncio.sleep(renew_s)
        await router.map()


class _Router:
    """One device that may forward a port to us. What it says is data from the network: it may be anything."""

    def __init__(self, location: str, host: str, port: int) -> None:
        self._location, self._host, self._inside = location, host, port
        self.port = port
        """Outside."""
        self._lease_s = LEASE_S

    async def outside(self) -> str | None:
        """Its own address outside; None if it has none that others can call."""
        try:
            where = ipaddress.ip_address(urllib.parse.urlsplit(self._location).hostname or "")
            # Whoever answers a search could have us call anybody.
            if not where.is_private:
                return None
            found = ipaddress.ip_address((await self._ask("GetExternalIPAddress"))["NewExternalIPAddress"])
        except (ValueError, KeyError, _Refused) as error:
            log.debug("no_router", location=self._location, error=error)
            return None
        if not found.is_global:
            log.info("router_behind_a_carrier", router=self._location, address=str(found))
            return None
        return str(found)

    async def map(self) -> bool:
        """Have it forward a port, the same as ours where that is free."""
        others = random.sample(range(20000, 60000), _OTHER_PORTS)
        for port in (self.port, *others):
            try:
                await self._add(port)
            except _Refused as error:
                if error.code == _TAKEN:
                    continue
                log.info("port_not_mapped", router=self._location, error=error)
                return False
            self.port = port
            return True
        return False

    async def _add(self, port: int) -> None:
        def words() -> dict[str, Any]:
            return {
                "NewRemoteHost": "",
                "NewExternalPort": port,
                "NewProtocol": "TCP",
                "NewInternalPort": self._inside,
                "NewInternalClient": self._host,
                "NewEnabled": True,
                "NewPortMappingDescription": "swarmnet",
                "NewLeaseDuration": self._lease_s,
            }

        try:
            await self._ask("AddPortMapping", **words())
        except _Refused as error:
            # Some routers keep every mapping until it is taken back, or until they restart.
            if error.code != _LEASES_WITHOUT_END:
                raise
            self._lease_s = 0
            await self._ask("AddPortMapping", **words())

    async def unmap(self) -> None:
        """Have it forward nothing any more."""
        with contextlib.suppress(_Refused):
            await self._ask("DeletePortMapping", NewRemoteHost="", NewExternalPort=self.port, NewProtocol="TCP")

    async def _ask(self, action: str, **words: Any) -> dict[str, Any]:
        """Raises _Refused."""
        from async_upnp_client.aiohttp import AiohttpRequester
        from async_upnp_client.client_factory import UpnpFactory
        from async_upnp_client.exceptions import UpnpActionError, UpnpError

        factory = UpnpFactory(AiohttpRequester(timeout=_ANSWER_S), non_strict=True)
        try:
            device = await factory.async_create_device(self._location)
            for service in device.all_services:
                if ":WANIPConnection:" in service.service_type or ":WANPPPConnection:" in service.service_type:
                    return dict(await service.action(action).async_call(**words))
        except UpnpActionError as error:
            raise _Refused(str(error), error.error_code) from error
        except (UpnpError, KeyError, ValueError) as error:
            raise _Refused(str(error)) from error
        raise _Refused("it forwards no ports")


class _Refused(Exception):
    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.code = code
