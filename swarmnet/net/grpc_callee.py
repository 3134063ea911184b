"""The callee's side: prove who calls, refuse strangers before their payload is read, hand the rest to the service.

Refusals travel in band (an aborted upload reaches its sender as an internal error).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import grpc

from swarmnet import telemetry
from swarmnet.bounds import Recent, one_less
from swarmnet.clock import loop_time
from swarmnet.errors import BadMessage, PeerGone, Refused, RejectCode, leaves
from swarmnet.ids import PeerId
from swarmnet.messages import STRANGERS_ASK, Accepted, Answer, Busy, Control, Packed, Rejected, Request, gives_way
from swarmnet.net.address import endpoint_of
from swarmnet.net.background import running
from swarmnet.net.bulk.connection import BulkSession
from swarmnet.net.bulk.pool import BulkListener
from swarmnet.net.greeting import HELLO
from swarmnet.net.grpc_caller import METHODS
from swarmnet.net.grpc_channels import SERVICE_FAILED, Dialling
from swarmnet.net.grpc_link import LINK, Outbox
from swarmnet.net.grpc_options import GrpcConfig
from swarmnet.net.limits import ALL_COMPLAINTS, COMPLAINTS
from swarmnet.net.nat.circuits import Handler
from swarmnet.net.payloads import CallPayloads
from swarmnet.net.tls import caller_of
from swarmnet.net.traffic import Flow, Traffic
from swarmnet.net.twins import TWIN_REFUSED
from swarmnet.pacing import Budgets
from swarmnet.transport import ReadPayload, Service
from swarmnet.wire.convert import (
    Done,
    GreetFirst,
    Hello,
    Lane,
    Ping,
    Pong,
    Pulse,
    Signal,
    TensorHeader,
    Told,
    read_hello,
    write_answer,
    write_hello_reply,
)
from swarmnet.wire.deflate import Deflater, Inflater
from swarmnet.wire.framing import answer_messages, check_declared

log = telemetry.get(__name__)

_REQUESTS = {method: request for request, method in METHODS.items()}
_NOBODY = Rejected(RejectCode.UNKNOWN_IDENTITY, "the certificate chain proves no peer id")

_STRANGERS_CALLS, _ALL_STRANGERS_CALLS = 4, 64
"""Open at a time: of one caller that has not greeted, and of all of them."""

_STRANGERS_WORD_S = 2.0
"""A caller that has not greeted and sends no request for so long gives its slot to another caller."""

_MOST_GREETED = 1 << 14
"""So many callers' greetings are remembered: half a kilobyte each."""


class Callee(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers every method of services.proto for one service."""

    def __init__(
        self,
        dialling: Dialling,
        service: Callable[[], Service],
        link_ended: Callable[[PeerId, int], None],
        traffic: Traffic,
        write: Callable[[Control], bytes],
        bulk: BulkListener,
        others: Mapping[str, Handler] = {},
    ) -> None:
        """write: as for links (`grpc_link.Link`). others: methods with another handler."""
        self._bulk = bulk
        self._greeter, self._dials, self._config = dialling.greeter, dialling.dials, dialling.config
        self._me, self._lives, self._on_twin = dialling.leaf.peer, dialling.lives, dialling.on_twin
        self._service, self._link_ended, self._traffic, self._write = service, link_ended, traffic, write
        self._others = others
        # Who is forgotten is asked to greet again, and loses nothing else.
        self.greeted: Recent[PeerId, Hello] = Recent(_MOST_GREETED)
        self._messages = Budgets[PeerId](self._config.messages)
        self._message_bytes = Budgets[PeerId](self._config.message_bytes)
        self._links: Counter[PeerId] = Counter()
        self._back: dict[PeerId, Outbox] = {}  # what goes to the caller of a link on the way back, on its newest one
        self._calls: Counter[PeerId] = Counter()
        self._strange: Counter[type] = Counter()  # of those who have not greeted, by what they ask
        self._complaints = Budgets[tuple[str, PeerId]](COMPLAINTS)
        self._all_complaints = ALL_COMPLAINTS.bucket()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """gRPC asks who answers a method."""
        method = handler_call_details.method
        if method == HELLO:
            return grpc.unary_unary_rpc_method_handler(self._hello)
        if method == LINK:
            return grpc.stream_stream_rpc_method_handler(self._link)
        if method in _REQUESTS:
            return grpc.stream_stream_rpc_method_handler(functools.partial(self._call, _REQUESTS[method]))
        if method in self._others:
            return grpc.stream_stream_rpc_method_handler(self._others[method])
        return None

    # ------------------------------------------------------------ hello, link

    async def _hello(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        caller = caller_of(context.auth_context())
        # TLS let it in, but no certificate in its chain signed its leaf.
        if caller is None:
            return write_hello_reply(_NOBODY)
        try:
            hello = read_hello(data)
        except BadMessage as error:
            return write_hello_reply(Rejected(error.code, error.reason))
        refusal, host = self._greeter.judge(hello, caller), endpoint_of(context.peer())[0]
        # My own key: it has to learn that I am alive, whatever its clock shows.
        if caller == self._me and hello.run == self._greeter.run:
            self._on_twin(hello, host, refusal is None)
            return write_hello_reply(self._greeter.hello())
        if refusal is None and self._lives.another(caller, hello.boot_id, loop_time()):
            refusal = TWIN_REFUSED
        if refusal is not None:
            return write_hello_reply(refusal)
        self.greeted[caller] = hello
        # It has proved who it is, and from which host: that host may be dialled for it.
        # One that came through a relay has shown no host.
        if host:
            self._dials.called(caller, host)
        return write_hello_reply(self._greeter.hello())

    async def _link(self, _: object, context: grpc.aio.ServicerContext) -> None:
        caller = caller_of(context.auth_context())
        if caller is None:
            await context.write(write_answer(_NOBODY))
            return
        if not self.knows(caller):
            await context.write(write_answer(GreetFirst()))
            return
        # It has one, and those of connections that broke without a word. More would only hold our memory.
        if self._links[caller] >= self._config.links:
            await context.write(write_answer(Busy(self._config.stall_s, version=-1)))
            return
        self._links[caller] += 1
        boot_id = hello.boot_id if (hello := self.greeted.get(caller)) is not None else 0
        writing, back = asyncio.Lock(), Outbox(self._config.outbox, self._write)
        self._back[caller] = back
        try:
            await context.write(write_answer(Accepted()))
            async with running(self._tell_back(context, writing, back)):
                await self._read_link(context, caller, boot_id, writing)
        except* TimeoutError:
            # It asks and does not read the answer. It will open another link when it is well.
            log.debug("link_stalls", peer=caller)
        except* BadMessage as found:
            # The link ends, and no other link does.
            error = next(leaves(found))
            if self._may_complain("bad_control", caller):
                log.warning("bad_control", peer=caller, error=error)
            await _last_word(context, Rejected(error.code, error.reason))
        except* Refused:
            await _last_word(context, GreetFirst())
        except* Exception:
            await _confess(context, "link", caller)
        finally:
            # A newer link of the same caller may have replaced it.
            if self._back.get(caller) is back:
                del self._back[caller]
            one_less(self._links, caller)
            self._link_ended(caller, boot_id)

    async def _read_link(
        self, context: grpc.aio.ServicerContext, caller: PeerId, boot_id: int, writing: asyncio.Lock
    ) -> None:
        unpacked = Inflater(self._config.reader.longest)
        while (data := await context.read()) is not grpc.aio.EOF:
            self._lives.seen(caller, boot_id, loop_time())
            # Answered by the event loop itself: it proves that this process runs, not that its service is quick.
            if (ping := await self._take(caller, data, unpacked)) is not None:
                await self._say(context, writing, Pong(ping.nonce))

    async def _take(self, peer: PeerId, data: bytes, unpacked: Inflater) -> Ping | None:
        """Take one message of a link, opened by either end; returns a ping. Raises BadMessage, and Refused for a peer
        that is not admitted any more."""
        self._traffic.down.spend(len(data))
        message_bytes = unpacked(data)
        await self._hold_back(peer, max(len(data), len(message_bytes)))
        # At every message: a link may be open for days.
        if self._greeter.unwelcome(peer):  # banned since, or its invitation has ended
            raise Refused(RejectCode.NOT_ADMITTED, "not admitted any more", peer=peer)
        message = self._config.reader.control(message_bytes)
        if isinstance(message, Ping):
            return message
        self._service().on_tell(peer, message)
        return None

    # ------------------------------------------------------------ the way back

    def tell_back(self, peer: PeerId, message: Control) -> bool:
        """Say it on the newest link that this peer has open to us. False: it has none."""
        if peer in self._back:
            self._back[peer].put(message)
        return peer in self._back

    async def told(self, peer: PeerId, data: bytes, unpacked: Inflater) -> None:
        """Take what the callee of a link of ours says on it. Raises BadMessage, Refused."""
        # Replies on a link must not contain pings: pings go the other way.
        if await self._take(peer, data, unpacked) is not None:
            raise BadMessage(RejectCode.MALFORMED, "a ping on the way back", peer=peer)

    async def _tell_back(self, context: grpc.aio.ServicerContext, writing: asyncio.Lock, back: Outbox) -> None:
        packed = Deflater()
        while True:
            await back.filled()
            await self._say(context, writing, Told(packed(back.pop())))

    def knows(self, caller: PeerId) -> bool:
        """Has it greeted, and is it still admitted? If not it has to greet again, and is told why it is not."""
        if caller not in self.greeted:
            return False
        if self._greeter.unwelcome(caller) is None:
            return True
        del self.greeted[caller]
        self._bulk.drop(self._greeter.unwelcome)
        return False

    async def _say(self, context: grpc.aio.ServicerContext, writing: asyncio.Lock, signal: Signal) -> None:
        """Raises TimeoutError if the caller does not read."""
        data = write_answer(signal)
        self._traffic.up.spend(len(data))
        async with asyncio.timeout(self._config.stall_s), writing:
            await context.write(data)

    async def _hold_back(self, caller: PeerId, num_bytes: int) -> None:
        """Leave the link unread for a while if too much came: the rest waits at the caller's end."""
        now, config = loop_time(), self._config
        pause_s = max(self._messages.of(caller).take(now), self._message_bytes.of(caller).take(now, num_bytes))
        if pause_s:
            if self._may_complain("too_many_messages", caller):
                per_s, bytes_per_s = config.messages.per_s, round(config.message_bytes.per_s)
                log.warning("too_many_messages", peer=caller, messages_per_s=per_s, bytes_per_s=bytes_per_s)
            await asyncio.sleep(pause_s)

    # ------------------------------------------------------------ calls

    async def _call(self, expected: type, _: object, context: grpc.aio.ServicerContext) -> None:
        caller = caller_of(context.auth_context())
        # Strangers are refused and leave no trace in the counters.
        flow = self._traffic.flow(caller, expected) if caller and caller in self.greeted else Flow()
        inbound = Inbound(context, caller, self._config, flow)
        try:
            if caller is None:
                await inbound.answer(_NOBODY)
            elif expected not in STRANGERS_ASK and not self.knows(caller):
                # Before anything of the call is read.
                await inbound.answer(GreetFirst())
            elif self._calls[caller] >= self._most_calls(caller, expected):
                # Each open call holds a header and a stream. Refused unread, it costs neither.
                await inbound.answer(Busy(self._config.stall_s / _PULSES_PER_STALL, version=-1))
            else:
                stranger = caller not in self.greeted
                self._calls[caller] += 1
                self._strange[expected] += stranger
                try:
                    await self._serve(expected, caller, inbound)
                finally:
                    inbound.payloads.end()
                    one_less(self._calls, caller)
                    self._strange[expected] -= stranger
            await inbound.finish()
        except PeerGone as error:
            log.debug("caller_left", peer=caller, error=error)

    def _most_calls(self, caller: PeerId, expected: type) -> int:
        """Open at a time: few of who has not greeted, and few of all of them for one thing. What they send half takes
        memory."""
        if caller in self.greeted:
            return self._config.calls
        return _STRANGERS_CALLS if self._strange[expected] < _ALL_STRANGERS_CALLS else 0

    def _may_complain(self, event: str, caller: PeerId) -> bool:
        """Is it time to log that of this caller? What it sends costs it nothing, and neither does another identity."""
        mine, now = self._complaints.of((event, caller)), loop_time()
        return not (mine.wait_s(now) or self._all_complaints.ask(now) or mine.ask(now))

    async def _serve(self, expected: type, caller: PeerId, inbound: Inbound) -> None:
        try:
            request, declared, lane = self._config.reader.request(
                await inbound.read(within_s=math.inf if caller in self.greeted else _STRANGERS_WORD_S)
            )
            if lane is not None:
                inbound.payloads = inbound.begin(self._bulk.session(caller, lane), lane)
            # Limits were chosen by the method: a Process must not come in as a Part.
            if type(request) is not expected:
                raise BadMessage(RejectCode.MALFORMED, "the request belongs to another method")
            check_declared(declared, max_bytes=self._config.max_bytes(expected))
        except BadMessage as error:
            if self._may_complain("bad_request", caller):
                log.warning("bad_request", peer=caller, error=error)
            await inbound.answer(Rejected(error.code, error.reason))
            return
        # From here on the caller may be uploading, and must be told when it is not wanted.
        inbound.unread, inbound.gives_way = bool(declared), gives_way(request)
        async with running(inbound.pulse()):
            await self._answer(caller, request, inbound, inbound.payload_reader(declared))

    async def _answer(self, caller: PeerId, request: Request, inbound: Inbound, payload: ReadPayload) -> None:
        answers = self._service().on_call(caller, request, payload)
        try:
            async for answer in answers:
                await inbound.answer(answer)
        except (BadMessage, Refused) as error:
            write = log.info if self._may_complain("refused", caller) else log.debug
            write("refused", peer=caller, request=type(request).__name__, error=error)
            with contextlib.suppress(PeerGone):  # the caller may have left
                await inbound.answer(Rejected(error.code, error.reason))
        except PeerGone as error:
            log.debug("call_ended", peer=caller, error=error)
        except Exception:
            await _confess(inbound.context, type(request).__name__, caller)
        finally:
            # The caller may have left in the middle: what the service holds for it is let go now, not when it is
            # collected.
            if isinstance(answers, AsyncGenerator):
                await answers.aclose()


async def _last_word(context: grpc.aio.ServicerContext, answer: Answer | GreetFirst) -> None:
    """Say on a link why it ends, if that can still be said."""
    # A message that was on its way back, and is cancelled, may still be being written: gRPC takes no second one.
    with contextlib.suppress(grpc.aio.InternalError):
        await context.write(write_answer(answer))


async def _confess(context: grpc.aio.ServicerContext, what: str, caller: PeerId) -> None:
    """A bug of ours costs this call alone: it is logged in full and the caller learns that it was us."""
    log.exception("service_failed", request=what, peer=caller)
    context.set_code(grpc.StatusCode.INTERNAL)
    context.set_details(SERVICE_FAILED)


# ---------------------------------------------------------------- one call


_PULSES_PER_STALL = 4


class Inbound:
    """One call being answered: its stream, guarded against callers that stop moving, and the bulk connections.

    While a service thinks, pulses tell the caller that this process is alive. A caller that dies in the middle of an
    upload looks like a clean end of stream: a payload is whole when every declared byte has come, and not before.
    """

    def __init__(
        self, context: grpc.aio.ServicerContext, caller: PeerId | None, config: GrpcConfig, flow: Flow
    ) -> None:
        self.context = context
        self.unread = True  # the caller may still be sending
        self.gives_way = False  # it asks for what can wait
        self._caller, self._config, self._flow = caller, config, flow
        self._writing = asyncio.Lock()
        self.payloads = self.begin(BulkSession(mine=False), None)

    def begin(self, session: BulkSession, lane: Lane | None) -> CallPayloads:
        """Its payloads. lane: what its header says."""
        return CallPayloads(session, self._flow, self.read, max_bytes=self._config.max_payload_bytes, lane=lane)

    async def read(self, *, within_s: float = math.inf) -> bytes:
        """The caller's next message. Raises PeerGone if there is none or it does not come."""
        try:
            async with asyncio.timeout(min(within_s, self._config.stall_s)):
                data: bytes = await self.context.read()
        except TimeoutError as error:
            raise PeerGone("the caller stalls", peer=self._caller) from error
        # A dying sender looks like one that has finished; this one had not.
        if data is grpc.aio.EOF:
            raise PeerGone("the caller left in the middle", peer=self._caller)
        self._flow.receives(len(data))
        return data

    def payload_reader(self, declared: Sequence[TensorHeader]) -> ReadPayload:
        """Read what was declared, once."""
        reading = False

        async def payload() -> tuple[Packed, ...]:
            nonlocal reading
            assert not reading, "a payload can be read once"
            reading = True
            self.payloads.receive(declared)
            try:
                await self.payloads.come(stall_s=self._config.stall_s)
            except TimeoutError as error:
                raise PeerGone("the caller stalls", peer=self._caller) from error
            self.unread = False
            return self.payloads.payload

        return ReadPayload(tuple((tensor.codec, tensor.shape) for tensor in declared), payload)

    async def answer(self, answer: Answer | Signal) -> None:
        """Send one answer with its payload. Raises PeerGone if the caller is gone or does not take it."""
        payload: tuple[Packed, ...] = getattr(answer, "payload", ())
        # State for a joiner gives way to all other tensors. While it waits the caller gets keepalives.
        if payload and self.gives_way:
            await self._flow.priority.turn(sum(packed.num_bytes for packed in payload))
        async with self._writing:
            left = self.payloads.send(payload)
            header = write_answer(answer, self.payloads.lane)
            with self._flow.priority.urgent() if payload and not self.gives_way else contextlib.nullcontext():
                for message in answer_messages(header, left):
                    if left:
                        await self._flow.up.turn()
                    await self._write(message)
                try:
                    await self.payloads.left(stall_s=self._config.stall_s)
                except TimeoutError as error:
                    raise PeerGone("the caller does not read", peer=self._caller) from error

    async def finish(self) -> None:
        """After the last answer: a caller that may still be uploading is told to leave, and leaving cancels us here."""
        if self.unread:
            await self.answer(Done())
            await asyncio.sleep(self._config.stall_s)

    async def pulse(self) -> None:
        """Until cancelled: let the caller know that we are alive."""
        while True:
            await asyncio.sleep(self._config.stall_s / _PULSES_PER_STALL)
            # What is being written is a sign of life itself.
            if not self._writing.locked():
                try:
                    await self.answer(Pulse())
                except PeerGone:
                    return

    async def _write(self, message: bytes) -> None:
        self._flow.sends(len(message))  # first: a caller that has all it wants leaves, and cancels us in the write
        try:
            async with asyncio.timeout(self._config.stall_s):
                await self.context.write(message)
        except TimeoutError as error:
            raise PeerGone("the caller does not read", peer=self._caller) from error
        except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError) as error:
            raise PeerGone("the caller left", peer=self._caller) from error
