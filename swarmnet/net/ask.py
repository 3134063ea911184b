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
"""Of one call, where only silence is to end it."""


async def ask(
    transport: Transport,
    peer: PeerId,
    request: Request,
    payload: tuple[Packed, ...] = (),
    *,
    patience: Callable[[], float | None] = lambda: None,
    heard: Callable[[], None] = lambda: None,
    limit_s: float = _DEADLINE_S,
) -> Answer:
    """Return the first answer that is more than a sign of life. Cancel to give up.

    patience() is asked before every wait: the seconds of silence after which the peer is given up; None leaves that to
    the transport, which ends a call when nothing moves. heard() is called at every sign of life, the answer among them.
    limit_s: of the whole call, whatever the peer says meanwhile. Raises PeerTimeout (silent for too long, or over the
    limit), PeerGone, BadMessage.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + limit_s
    async with contextlib.aclosing(transport.call(peer, request, payload, deadline=deadline)) as answers:
        while True:
            patience_s = patience()
            try:
                async with asyncio.timeout_at(min(clock() + (patience_s or limit_s), deadline)):
                    answer = await anext(answers)
            except TimeoutError as error:
                if clock() >= deadline:
                    raise PeerTimeout("no answer in time", peer=peer, limit_s=round(limit_s, 2)) from error
                raise PeerTimeout("silent", peer=peer, patience_s=round(patience_s or 0.0, 2)) from error
            except StopAsyncIteration as error:
                raise PeerGone("the call ended without an answer", peer=peer) from error
            heard()
            if not isinstance(answer, Accepted | Running):
                return answer
