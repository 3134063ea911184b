"""A home's router is asked to forward our port, renewed, and told when we leave. A small device stands for it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import pytest
from aiohttp import web

from swarmnet.ids import PeerId
from swarmnet.net.address import Address
from swarmnet.net.nat import port_mapping
from swarmnet.net.nat.kinds import at_home
from swarmnet.net.nat.port_mapping import mapped_ports

ME = PeerId("12D3KooWBmBpeoxRLAuQeAN2MKfR4ncoMtgqrfSPvFkPqe9Lq5QC")
SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
DEVICE = f"""<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><specVersion><major>1</major><minor>0</minor></specVersion><device>
<deviceType>urn:schemas-upnp-org:device:InternetGatewayDevice:1</deviceType><friendlyName>box</friendlyName>
<manufacturer>m</manufacturer><modelName>n</modelName><UDN>uuid:1</UDN><serviceList><service>
<serviceType>{SERVICE}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
<SCPDURL>/scpd</SCPDURL><controlURL>/control</controlURL><eventSubURL>/events</eventSubURL>
</service></serviceList></device></root>"""
WORDS = {
    "AddPortMapping": "RemoteHost ExternalPort Protocol InternalPort InternalClient Enabled PortMappingDescription "
    "LeaseDuration",
    "DeletePortMapping": "RemoteHost ExternalPort Protocol",
    "GetExternalIPAddress": ">ExternalIPAddress",
    "GetSpecificPortMappingEntry": "RemoteHost ExternalPort Protocol >InternalPort >InternalClient",
}
TYPES = {"ExternalPort": "ui2", "InternalPort": "ui2", "Enabled": "boolean", "LeaseDuration": "ui4"}


def _description() -> str:
    def argument(word: str) -> str:
        name, way = word.removeprefix(">"), "out" if word.startswith(">") else "in"
        related = f"<relatedStateVariable>{name}</relatedStateVariable>"
        return f"<argument><name>New{name}</name><direction>{way}</direction>{related}</argument>"

    actions = "".join(
        f"<action><name>{name}</name><argumentList>{''.join(map(argument, words.split()))}</argumentList></action>"
        for name, words in WORDS.items()
    )
    names = {word.removeprefix(">") for words in WORDS.values() for word in words.split()}
    variables = "".join(
        f'<stateVariable sendEvents="no"><name>{name}</name><dataType>{TYPES.get(name, "string")}</dataType>'
        "</stateVariable>"
        for name in sorted(names)
    )
    return (
        '<?xml version="1.0"?><scpd xmlns="urn:schemas-upnp-org:service-1-0"><specVersion><major>1</major>'
        f"<minor>0</minor></specVersion><actionList>{actions}</actionList>"
        f"<serviceStateTable>{variables}</serviceStateTable></scpd>"
    )


class Box:
    """A router at home. refuses: error codes by which it refuses the next mappings, None: it does not. owner: who has
    what it maps."""

    owner = ""

    def __init__(self, *, outside: str = "44.0.0.9", refuses: tuple[int | None, ...] = ()) -> None:
        self.outside, self.refuses, self.port = outside, list(refuses), 0
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.mapped_thrice = asyncio.Event()

    async def control(self, request: web.Request) -> web.Response:
        text = await request.text()
        action = request.headers["SOAPAction"].strip('"').rpartition("#")[2]
        self.asked.append((action, dict(re.findall(r"<New(\w+)>([^<]*)</New\w+>", text))))
        if len(self.mappings()) == 3:
            self.mapped_thrice.set()
        if action == "AddPortMapping" and self.refuses and (code := self.refuses.pop(0)):
            fault = (
                '<s:Fault><faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail><UPnPError xmlns="'
                f'urn:schemas-upnp-org:control-1-0"><errorCode>{code}</errorCode></UPnPError>'
                "</detail></s:Fault>"
            )
            return _soap(fault, status=500)
        found = {
            "GetExternalIPAddress": f"<NewExternalIPAddress>{self.outside}</NewExternalIPAddress>",
            "GetSpecificPortMappingEntry": f"<NewInternalPort>4711</NewInternalPort><NewInternalClient>{self.owner}"
            "</NewInternalClient>",
        }.get(action, "")
        return _soap(f'<u:{action}Response xmlns:u="{SERVICE}">{found}</u:{action}Response>')

    def mappings(self) -> list[dict[str, str]]:
        return [words for action, words in self.asked if action == "AddPortMapping"]

    async def found(self, _: str) -> list[str]:
        return [f"http://127.0.0.1:{self.port}/"]


def _soap(body: str, status: int = 200) -> web.Response:
    text = f'<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>{body}</s:Body></s:Envelope>'
    return web.Response(text=text, status=status, content_type="text/xml")


@contextlib.asynccontextmanager
async def running(box: Box) -> AsyncIterator[None]:
    """The box answers."""
    app = web.Application()
    app.router.add_get("/", _xml(DEVICE))
    app.router.add_get("/scpd", _xml(_description()))
    app.router.add_post("/control", box.control)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    box.port = runner.addresses[0][1]
    try:
        yield
    finally:
        await runner.cleanup()


def _xml(text: str) -> Callable[[web.Request], Coroutine[Any, Any, web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=text, content_type="text/xml")

    return answer


def anywhere(_: str) -> bool:
    """The box is at this machine, where no router is."""
    return True


async def test_a_port_is_mapped_renewed_and_given_back() -> None:
    box = Box()
    async with running(box):
        async with mapped_ports(
            "192.168.1.2", [4711], ME, routers=box.found, may_call=anywhere, renew_s=0.01
        ) as outside:
            assert str(outside[4711]) == f"/ip4/44.0.0.9/tcp/4711/p2p/{ME}"
            await box.mapped_thrice.wait()
    first = box.mappings()[0]
    assert (first["ExternalPort"], first["InternalPort"], first["InternalClient"]) == ("4711", "4711", "192.168.1.2")
    assert (first["Protocol"], first["RemoteHost"], int(first["LeaseDuration"])) == ("TCP", "", port_mapping.LEASE_S)
    assert all(again == first for again in box.mappings())
    assert box.asked[-1] == ("DeletePortMapping", {"RemoteHost": "", "ExternalPort": "4711", "Protocol": "TCP"})


@pytest.mark.parametrize(("refused", "mapped"), [((), [4711, 4712]), ((None, 501), [4711]), ((501,), [])])
async def test_others_are_mapped_where_the_router_will_and_the_first_one_is(
    refused: tuple[int | None, ...], mapped: list[int]
) -> None:
    box = Box(refuses=refused)

    async with (
        running(box),
        mapped_ports("192.168.1.2", [4711, 4712], ME, routers=box.found, may_call=anywhere) as outside,
    ):
        assert [(number, at.port) for number, at in outside.items()] == [(number, number) for number in mapped]
    given_back = [words["ExternalPort"] for action, words in box.asked if action == "DeletePortMapping"]
    assert given_back == [str(port) for port in mapped]


async def test_a_port_that_is_taken_gives_way_and_leases_without_end_are_taken() -> None:
    box = Box(refuses=(718, 725))
    async with running(box):
        async with mapped_ports("192.168.1.2", [4711], ME, routers=box.found, may_call=anywhere) as outside:
            assert outside[4711].port == int(box.mappings()[-1]["ExternalPort"]) != 4711
    assert [int(words["LeaseDuration"]) for words in box.mappings()] == [port_mapping.LEASE_S] * 2 + [0]
    assert {words["InternalPort"] for words in box.mappings()} == {"4711"}


@pytest.mark.parametrize(
    "box", [Box(outside="100.64.0.7"), Box(outside="nonsense"), Box(refuses=(501,))], ids=["carrier", "nonsense", "no"]
)
async def test_what_helps_nobody_is_not_announced(box: Box) -> None:
    async with running(box):
        async with mapped_ports("192.168.1.2", [4711], ME, routers=box.found, may_call=anywhere) as outside:
            assert not outside


def test_nobody_is_asked_who_is_not_in_our_own_network() -> None:
    async def routers(_: str) -> list[str]:
        return ["http://44.0.0.1:1/", "nonsense", "http://[nonsense", "http://127.0.0.1:9/", "http://192.168.1.2:80/"]

    async def never(self: object) -> None:
        raise AssertionError("asked")

    async def work() -> None:
        async with mapped_ports("192.168.1.2", [4711], ME, routers=routers) as outside:
            assert not outside

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(port_mapping._Router, "mapped", never)
        asyncio.run(work())


def test_only_hosts_at_home_ask() -> None:
    hosts = ["192.168.1.2", "10.0.0.7", "127.0.0.1", "44.0.0.2", "fd00::2", "example.org", "100.64.0.2"]
    hosts += ["0.0.0.0", "169.254.169.254", "255.255.255.255", "::1", "::ffff:10.0.0.7"]
    assert [host for host in hosts if at_home(host)] == ["192.168.1.2", "10.0.0.7"]


async def test_others_are_told_when_the_outside_changes_and_when_a_lease_is_over() -> None:
    box, said = Box(), asyncio.Queue[Mapping[int, Address]]()
    async with running(box):
        start = mapped_ports(
            "192.168.1.2", [4711], ME, routers=box.found, may_call=anywhere, changed=said.put_nowait, renew_s=0.01
        )
        async with start:
            box.outside = "44.0.0.10"
            assert str((await said.get())[4711]) == f"/ip4/44.0.0.10/tcp/4711/p2p/{ME}"
            box.refuses = [718]
            moved = (await said.get())[4711]
            assert moved.port == int(box.mappings()[-1]["ExternalPort"]) != 4711
            # It is asked again before the lease is over.
            box.refuses, box.outside = [501] * 2, "44.0.0.11"
            again = await said.get()
            assert str(again[4711]) == f"/ip4/44.0.0.11/tcp/{moved.port}/p2p/{ME}"
            box.refuses = [501] * 50
            assert await said.get() == {}
            box.refuses = []
            assert await said.get() == again


async def test_a_mapping_without_end_that_is_ours_is_kept() -> None:
    box = Box(refuses=(718,))
    box.owner = "192.168.1.2"
    async with running(box):
        async with mapped_ports("192.168.1.2", [4711], ME, routers=box.found, may_call=anywhere) as outside:
            assert outside[4711].port == 4711
    assert len(box.mappings()) == 1


ENDLESS = b"<a>" + b" " * 65536


@pytest.mark.parametrize("bad", ["moved", "endless", "deep", "entities"])
async def test_who_is_no_router_costs_neither_memory_nor_time(bad: str) -> None:
    sent, followed = [], []

    async def first(request: web.Request) -> web.StreamResponse:
        sent.append(1)
        if bad == "moved":
            raise web.HTTPFound("/scpd")
        if bad == "deep":
            return web.Response(text=DEVICE.replace("<serviceList>", "<a>" * 9_000 + "</a>" * 9_000 + "<serviceList>"))
        if bad == "entities":
            declared = '<!DOCTYPE root [<!ENTITY e "b">]>' + DEVICE[DEVICE.index("<root") :]
            return web.Response(text=declared.replace("<friendlyName>", "<friendlyName>&e;"))
        answer = web.StreamResponse()
        await answer.prepare(request)
        with contextlib.suppress(OSError):
            while len(sent) < 1000:
                await answer.write(ENDLESS)
                sent.append(1)
        return answer

    async def scpd(_: web.Request) -> web.Response:
        followed.append(1)
        return web.Response()

    app = web.Application()
    app.router.add_get("/", first)
    app.router.add_get("/scpd", scpd)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()

    async def routers(_: str) -> list[str]:
        return [f"http://127.0.0.1:{runner.addresses[0][1]}/"]

    try:
        async with mapped_ports("192.168.1.2", [4711], ME, routers=routers, may_call=anywhere) as outside:
            assert not outside
    finally:
        await runner.cleanup()
    assert 1 <= len(sent) < 200, "it hung up"
    # Deep XML is read within a moment. It describes a router that forwards nothing.
    assert bool(followed) == (bad == "deep")
