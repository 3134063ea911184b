"""Ask the home's router to forward our ports, for as long as this process runs: UPnP, by async-upnp-client.

Without such a router, or behind a carrier's NAT as well, nothing is mapped; then others reach this
peer through relays. A mapping has a lease: what a killed process leaves behind ends with it.

Any device at home may claim to be a router. So it is called at a private address that is not this machine's, follows
nowhere else, and gets a few seconds and 64 KiB of plain XML.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import random
import urllib.parse
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swarmnet import telemetry
from swarmnet.ids import PeerId
from swarmnet.net.address import Address
from swarmnet.net.nat.kinds import at_home

if TYPE_CHECKING:
    from async_upnp_client.const import HttpRequest, HttpResponse

log = telemetry.get(__name__)

LEASE_S = 1200
"""Renewed after a third of it."""

_SEARCH_S = 1
"""Home routers answer within milliseconds; this delays the start of every peer without one."""
_ANSWER_S = 3
_LEASES_WITHOUT_END, _TAKEN = 725, 718
"""What a router refuses by: a lease that ends, and an outside port that is taken."""
_OTHER_PORTS = 3
_MISSES = 3
"""Failed renewals, after which the lease is over."""

_ROUTER_S, _MOST_ROUTERS, _MOST_WORDS = 10.0, 4, 200
_MOST_BYTES = 64 << 10
"""Of one answer, which the library reads within 0.2 s whatever is in it (measured); it refuses entities."""

Routers = Callable[[str], Awaitable[Sequence[str]]]
"""Where devices that call themselves routers describe themselves; asked with our own address."""


async def search(host: str) -> list[str]:
    """Routers in the network of this host."""
    from async_upnp_client.profiles.igd import IgdDevice

    try:
        found = await IgdDevice.async_search(source=(host, 0), timeout=_SEARCH_S)
    except OSError:  # no multicast here
        return []
    return list(dict.fromkeys(answer["location"] for answer in found if "location" in answer))


Outside = Mapping[int, Address]
"""By our port: the address that others see. Empty: none is forwarded."""


@contextlib.asynccontextmanager
async def mapped_ports(
    host: str,
    ports: Sequence[int],
    peer: PeerId,
    *,
    routers: Routers = search,
    may_call: Callable[[str], bool] = at_home,
    changed: Callable[[Outside], None] = lambda outside: None,
    renew_s: float = LEASE_S / 3,
) -> AsyncGenerator[Outside, None]:
    """While open, a router forwards ports of its own to this host's: the first of `ports`, and of the others those
    that it will.

    may_call: can a router be at that address? changed: told when others see other addresses, or none any more.
    """
    for location in (await routers(host))[:_MOST_ROUTERS]:
        called = _host(location)
        # A false answer to the search could make this peer call any address.
        if called == host or not may_call(called):
            continue
        router = _Router(location, host, ports, peer)
        outside = await router.mapped()
        if not outside:
            continue
        renewing = asyncio.get_running_loop().create_task(_renewing(router, outside, ports[0], changed, renew_s))
        try:
            yield outside
        finally:
            renewing.cancel()
            await router.unmap()
        return
    yield {}


async def _renewing(
    router: _Router, last: Outside, first: int, changed: Callable[[Outside], None], renew_s: float
) -> None:
    # A router that restarts forgets its mappings, and is asked again for the same.
    misses = 0
    while True:
        await asyncio.sleep(renew_s)
        found = await router.mapped()
        misses = 0 if found else misses + 1
        # It forwards until the lease is over.
        if found == last or 0 < misses < _MISSES:
            continue
        was, address = last.get(first), found.get(first)
        if not found:
            log.warning("mapped_port_lost", was=str(was), advice="others may not get in: start this peer again")
        elif address != was:
            log.warning("mapped_port_moved", was=str(was), address=str(address))
        last = found
        changed(found)


def _host(url: str) -> str:
    try:
        return urllib.parse.urlsplit(url).hostname or ""
    except ValueError:
        return ""


class _Router:
    """One device that may forward ports to us. What it says is data from the network: it may be anything."""

    def __init__(self, location: str, host: str, ports: Sequence[int], peer: PeerId) -> None:
        self._location, self._host, self._peer = location, host, peer
        self._ports = {port: port for port in ports}
        """Outside, by ours."""
        self._lease_s = LEASE_S
        self._said: dict[int, tuple[Address, int]] = {}

    async def mapped(self) -> Outside:
        """Have it forward our ports, from the same as before where those are free. Returns what others then see."""
        found: dict[int, Address] = {}
        for inside in self._ports:
            if (address := await self._mapped(inside)) is not None:
                found[inside] = address
            # Other peers find the others only through the first.
            elif not found:
                break
        return found

    async def _mapped(self, inside: int) -> Address | None:
        try:
            async with asyncio.timeout(_ROUTER_S):
                outside = await self._outside()
                if outside is None or not await self._map(inside):
                    return None
        except TimeoutError:
            log.debug("router_is_slow", router=self._location)
            return None
        port = self._ports[inside]
        address = Address.of(outside, port, self._peer)
        if self._said.get(inside) != (address, self._lease_s):
            self._said[inside] = address, self._lease_s
            log.info("port_mapped", router=self._location, address=f"{outside}:{port}", lease_s=self._lease_s)
        return address

    async def _outside(self) -> str | None:
        """Its own address outside; None if it has none that others can call."""
        try:
            found = ipaddress.ip_address((await self._ask("GetExternalIPAddress"))["NewExternalIPAddress"])
        except (ValueError, KeyError, _Refused) as error:
            log.debug("no_router", location=self._location, error=error)
            return None
        if not found.is_global:
            log.info("router_behind_a_carrier", router=self._location, address=str(found))
            return None
        return str(found)

    async def _map(self, inside: int) -> bool:
        others = random.sample(range(20000, 60000), _OTHER_PORTS)
        for port in (self._ports[inside], *others):
            try:
                await self._add(port, inside)
            except _Refused as error:
                # Some routers refuse to map again what they map without end.
                if error.code == _TAKEN and not await self._is_mine(port, inside):
                    continue
                if error.code != _TAKEN:
                    log.info("port_not_mapped", router=self._location, error=error)
                    return False
            self._ports[inside] = port
            return True
        return False

    async def _is_mine(self, port: int, inside: int) -> bool:
        try:
            found = await self._ask("GetSpecificPortMappingEntry", **_outside_port(port))
        except _Refused:
            return False
        return found.get("NewInternalClient") == self._host and str(found.get("NewInternalPort")) == str(inside)

    async def _add(self, port: int, inside: int) -> None:
        words = {
            **_outside_port(port),
            "NewInternalPort": inside,
            "NewInternalClient": self._host,
            "NewEnabled": True,
            "NewPortMappingDescription": "swarmnet",
        }
        try:
            await self._ask("AddPortMapping", **words, NewLeaseDuration=self._lease_s)
        except _Refused as error:
            # Some routers keep every mapping until it is taken back, or until they restart.
            if error.code != _LEASES_WITHOUT_END:
                raise
            self._lease_s = 0
            await self._ask("AddPortMapping", **words, NewLeaseDuration=0)

    async def unmap(self) -> None:
        """Have it forward nothing any more."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ROUTER_S):
                for inside in self._said:
                    with contextlib.suppress(_Refused):
                        await self._ask("DeletePortMapping", **_outside_port(self._ports[inside]))

    async def _ask(self, action: str, **words: Any) -> dict[str, Any]:
        """Raises _Refused."""
        from async_upnp_client.client_factory import UpnpFactory
        from async_upnp_client.exceptions import UpnpActionError

        requester: Any = _Requester(_host(self._location))
        factory = UpnpFactory(requester, non_strict=True)
        try:
            device = await factory.async_create_device(self._location)
            for service in device.all_services:
                if ":WANIPConnection:" in service.service_type or ":WANPPPConnection:" in service.service_type:
                    return dict(await service.action(action).async_call(**words))
        except UpnpActionError as error:
            raise _Refused(str(error), error.error_code) from error
        # The library trusts its router: for a malicious one it may raise anything.
        except Exception as error:
            raise _Refused(str(error)) from error
        raise _Refused("it forwards no ports")


def _outside_port(port: int) -> dict[str, Any]:
    return {"NewRemoteHost": "", "NewExternalPort": port, "NewProtocol": "TCP"}


class _Requester:
    """How the library asks: this host alone, no redirects, and short answers of plain XML. Raises _Refused."""

    def __init__(self, host: str) -> None:
        self._host = host

    async def async_http_request(self, request: HttpRequest) -> HttpResponse:
        import aiohttp
        from async_upnp_client.const import HttpResponse

        if _host(request.url) != self._host:
            raise _Refused("it names another host")
        # Compressed, a few bytes would become many.
        headers = {**(request.headers or {}), "Accept-Encoding": "identity"}
        data = b""
        async with (
            aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as session,
            session.request(
                request.method, request.url, headers=headers, data=request.body, allow_redirects=False
            ) as answer,
        ):
            async for piece in answer.content.iter_any():
                data += piece
                if len(data) > _MOST_BYTES:
                    raise _Refused(f"it answers with more than {_MOST_BYTES} bytes")
            return HttpResponse(answer.status, answer.headers, data.decode(errors="replace"))


class _Refused(Exception):
    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason[:_MOST_WORDS])
        self.code = code
