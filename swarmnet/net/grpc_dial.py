"""One new connection, opened to find out whether a peer can be connected to at all, and closed again.

A plain TCP dial first: only it can tell silence (a firewall) from a refusal. Then TLS, which proves who answers. It
calls nothing: a peer whose event loop is busy can be connected to all the same.
"""

from __future__ import annotations

import asyncio

import grpc

from swarmnet.errors import PeerGone, PeerTimeout, UsageError
from swarmnet.ids import PeerId
from swarmnet.net.address import Address
from swarmnet.net.grpc_options import CHANNEL_OPTIONS
from swarmnet.net.tls import Leaf

SILENCE_S = 3.5
"""A TCP dial that is not answered for so long is dropped on the way: lost packets were sent again after 1 and 3 s."""


async def dial(peer: PeerId, text: str, leaf: Leaf, *, deadline: float) -> None:
    try:
        address = Address.parse(text)
    except UsageError as error:
        raise PeerGone("no TCP address", peer=peer, address=text) from error
    if address.peer not in (None, peer):
        raise PeerGone("the address of another peer", peer=peer, address=text)
    await _connect(peer, address, deadline)
    channel = grpc.aio.secure_channel(address.target, leaf.channel_credentials(peer), options=CHANNEL_OPTIONS)
    try:
        async with asyncio.timeout_at(deadline):
            await _prove(peer, channel)
    except TimeoutError as error:
        raise PeerTimeout("something answers, and does not say in time who it is", peer=peer) from error
    finally:
        await channel.close()


async def _connect(peer: PeerId, address: Address, deadline: float) -> None:
    limit = min(deadline, asyncio.get_running_loop().time() + SILENCE_S)
    try:
        async with asyncio.timeout_at(limit):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except TimeoutError as error:
        raise PeerGone("no answer", peer=peer) from error
    except ConnectionRefusedError as error:
        raise PeerGone("refused", peer=peer) from error
    except OSError as error:
        raise PeerGone("no way there", peer=peer) from error
    writer.close()


async def _prove(peer: PeerId, channel: grpc.aio.Channel) -> None:
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            raise PeerGone("somebody else answers there", peer=peer)
        await channel.wait_for_state_change(state)
