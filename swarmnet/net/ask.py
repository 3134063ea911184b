"""Ask a peer and wait for what it has to say, as long as it shows signs of life.

What every caller of `Transport.call` does: `Accepted` and `Running` only say "wait", silence and an end without an
answer are the peer's failures. What an answer means, a refusal included, is the caller's business.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from swarmnet.errors import PeerGone, PeerTimeout
from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Answer, Packed, Request, Running
from swarmnet.net.transport import Transport

_DEADLINE_S = 3600.0
"""Of one call: silence ends calls, not their length."""


async def ask(
    transport: Transport,
    peer: PeerId,
    request: Request,
    payload: tuple[Packed, ...] = (),
    *,
    patience: Callable[[], float | None] = lambda: None,
    heard: Callable[[], None] = lambda: None,
) -> Answer:
    """Return the first answer that is more than a sign of life. Cancel to give up.

    patience() is asked before every wait: the seconds of silence after which the peer is given up; None leaves that to
    the transport, which ends a call when nothing moves. heard() is called at every sign of life, the answer among them.
    Raises PeerTimeout (silent for too long), PeerGone, BadMessage.
    """
    deadline = asyncio.get_running_loop().time() + _DEADLINE_S
    async with contextlib.aclosing(transport.call(peer, request, payload, deadline=deadline)) as answers:
        while True:
            patience_s = patience()
            try:
                async with asyncio.timeout(patience_s):
                    answer = await anext(answers)
            except TimeoutError as error:
                raise PeerTimeout("silent", peer=peer, patience_s=round(patience_s or 0.0, 2)) from error
            except StopAsyncIteration as error:
                raise PeerGone("the call ended without an answer", peer=peer) from error
            heard()
            if not isinstance(answer, Accepted | Running):
                return answer
