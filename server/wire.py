"""How uvicorn is run: its HTTP protocol with limits on request heads, which it lacks, and errors in our envelope."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import sys
from typing import Any, ClassVar

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from forebay.server.errors import HttpError, describe
from forebay.server.exchange import LINK, ASGIApp, Link
from forebay.server.limits import ServerOptions

_LINGER_S = 1.0  # how long what still arrives after a refusal is dropped
_LINGER_BODY_S = 5.0  # the same of a body that was refused
_NEW_OBJECTS = 50_000  # more than one step for thousands of streams makes at once
_SWITCH_S = 0.001
_PIPELINED = 64 * 1024  # bytes that are kept of what a client sends before it has its answer; with more, the connection ends with that
_MAX_PIPELINED = 64  # requests among them that one packet brought
_PROMPT_S = 0.05  # a client that ends its side so soon after its request does it on purpose
_LOOK_S = 0.25  # between looks whether a client that ended its side is still there
_PROBE_S = 5.0  # between questions to it
_TCP_CLOSE = 7  # state of a connection that was reset
_UNSENT = 64 * 1024  # bytes of one connection that the kernel takes over before they can be sent; its own bound is megabytes

log = logging.getLogger("forebay.server")


class HeadRefusedError(Exception):
    """Ends parsing of a head that is over its limits."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, except that a request head has a size limit (431) and a deadline (408), and connections a limit (503).

    A connection on which nothing arrives is closed like an idle one, and one whose client takes nothing in is cut off: its request ends,
    and what waits to be sent is dropped. After a refusal, what still arrives is dropped for a moment before the connection closes, so that
    the client reads the answer and not a reset. An error is never written into an answer that has begun.

    What arrives while a request runs is kept, up to a bound, and never keeps the connection from being read: else nobody would notice that
    the client left. A client that has ended its side of the connection gets its answer as long as it is there (see `eof_received`).
    """

    options: ClassVar[ServerOptions]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._head_bytes = 0  # of the name and value lines parsed so far
        self._unparsed = 0  # received for a head that is not complete
        self._mixed = False  # what was received last held the end of another request, too
        self._deadline: asyncio.TimerHandle | None = None
        self._refusal: HttpError | None = None
        self._link = Link(self._resume_reading)
        self._unread: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None  # of the requests here the one that is answered
        self._body_ended = 0.0  # when its body was complete
        self._later = bytearray()  # what arrived behind it
        self._ended = False  # the client's side of the connection
        self._probe_at = 0.0
        self._looks: asyncio.TimerHandle | None = None
        self._upgrade: bytes | None = None  # the head of a request that asks for a protocol which is not spoken here

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        with contextlib.suppress(OSError, AttributeError):  # not every system and not every transport has it
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
        self._deadline = self.loop.call_later(self.options.keep_alive_s, self.timeout_keep_alive_handler)
        if len(self.connections) > self.options.max_connections:
            text = f"The server has {self.options.max_connections} connections, all it has room for. Try again later."
            self._refuse(HttpError(503, text, code="too_many_connections", retry_after=1))

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(None)
        self._watch_reader(False)
        if self._looks is not None:
            self._looks.cancel()
        super().connection_lost(exc)
        self._leave()
        self._link.lose()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if self._answers() and not self._running_body():
            self._keep(data)
            return
        self._mixed = False
        self._feed(data)
        if self._in_head and self._refusal is None and not self._mixed:
            self._unparsed += len(data)
            if self._unparsed > self.options.max_head:
                self._refuse(_head_too_large(self.options.max_head))

    def _feed(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if (head := self._upgrade) is not None:
                # The parser takes the connection for the other protocol's from here on; the request is HTTP all the same, body and all.
                self._upgrade = None
                self.parser = _parser(self)
                self._feed(head + data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(self._refusal or HttpError(400, "Invalid HTTP request received.", code="invalid_http"))

    def _answers(self) -> bool:
        """Whether an answer is under way."""
        return self._running is not None and not self._running.response_complete

    def _running_body(self) -> bool:
        """Whether what arrives is the body of the request that is answered."""
        return self._running is self.cycle and self._running is not None and self._running.more_body

    def _keep(self, data: bytes) -> None:
        """Keep what a client sends ahead for when its turn comes."""
        if self._running is not None and self._running.keep_alive:
            self._later += data
            if len(self._later) > _PIPELINED:
                self._last()

    def _last(self) -> None:
        """Let the connection end with the answer under way, and forget what came behind its request."""
        if self._running is not None:
            self._running.keep_alive = False
        self._later.clear()
        self.pipeline.clear()

    def _leave(self) -> None:
        """Tell the request under way that its client has gone: also one with others behind it, which is none that uvicorn tells."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client has ended its side: it has left, or it has said all it wants to and waits for its answer.

        Before the engine has begun to answer it may still be there. Whether it is, only something that is sent to it can tell: a system
        whose program has closed the connection answers that with a reset. Until the answer begins an interim response does, which
        clients skip. A client that ends its side while it is being answered has left.
        """
        running = self._running
        if running is None or not self._answers() or running.more_body or self._refusal is not None or self._link.answering:
            return False
        if running.scope["http_version"] == "1.0":  # whose clients know no interim responses
            return False
        self._ended = True
        if not self.pipeline and not self._later:
            running.keep_alive = False
        self._probe_at = self.loop.time() + (1.0 if self.loop.time() - self._body_ended < _PROMPT_S else 0.0)
        self._look_for_client()
        return True

    def _look_for_client(self) -> None:
        if self._looks is not None:
            self._looks.cancel()
        if self.transport.is_closing() or not self._answers():
            return
        if _was_reset(self.transport):
            self.transport.abort()
            return
        now, wait = self.loop.time(), _LOOK_S
        if now >= self._probe_at and self._running is not None and not self._running.response_started:
            self.transport.write(STATUS_LINE[102] + b"\r\n")
            self._probe_at = now + _PROBE_S
            wait = _LOOK_S / 10  # on the same machine the reset is there at once
        self._looks = self.loop.call_later(wait, self._look_for_client)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._link.answering = False
        if cycle.more_body:
            cycle.transport = _Lingering(self)  # type: ignore[assignment]
        else:
            self._body_ended = self.loop.time()
        super()._start_asgi_task(cycle, app)
        if self._ended:
            self._look_for_client()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._refusal = HttpError(400, "Too many requests were sent ahead.", code="invalid_http")
            raise HeadRefusedError
        self._unset_keepalive_if_required()  # not before: line feeds between requests would keep a connection for ever
        super().on_message_begin()
        self.scope["extensions"] = {LINK: self._link}  # type: ignore[dict-item]
        self._in_head, self._head_bytes, self._unparsed = True, 0, 0
        self._set_deadline(self.loop.call_later(self.options.head_timeout_s, self._late))

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if self._in_head:  # behind a body of chunks it is a trailer, which nobody in front of us has looked at
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._set_deadline(None)
        if self.parser.get_http_version() == "1.1" and [name for name, _ in self.headers].count(b"host") != 1:
            self._refusal = HttpError(400, "A request of HTTP/1.1 must have one Host header.", code="invalid_http")
            raise HeadRefusedError
        wished = b",".join([value.lower() for name, value in self.headers if name == b"upgrade"])
        if self.parser.should_upgrade() and b"websocket" not in wished and self.parser.get_method() != b"CONNECT":
            self._upgrade = self._plain_head()
            return
        super().on_headers_complete()
        if self.cycle is not self._running:
            self.flow.resume_reading()  # a request behind another one waits without that

    def on_body(self, body: bytes) -> None:
        self._mixed = True
        if self._upgrade is None:
            super().on_body(body)
            if self.cycle is not self._running:
                self.flow.resume_reading()

    def on_message_complete(self) -> None:
        self._mixed = True
        if self._upgrade is None:
            super().on_message_complete()
            if self.cycle is self._running:
                self._body_ended = self.loop.time()

    def _plain_head(self) -> bytes:
        """The head that was parsed, without the wish for another protocol."""
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() not in (b"upgrade", b"http2-settings"))
            if name not in (b"upgrade", b"http2-settings") and (value or name != b"connection"):
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch_reader(False)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self._later and (not self._answers() or self._running_body()):
            data, self._later = bytes(self._later), bytearray()
            self.data_received(data)
        if self._ended and (not self._answers() or self._running_body()):
            self._leave()
            self.transport.close()
        if self.transport.get_write_buffer_size():  # nothing more will be written, so nothing would notice
            self._watch_reader(True)

    def shutdown(self) -> None:
        super().shutdown()
        if self._answers():
            self._last()

    def _watch_reader(self, on: bool) -> None:
        """Look after `write_timeout_s` how much of what waits now the client has taken in."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        if on:
            waiting = self.transport.get_write_buffer_size()
            self._unread = self.loop.call_later(self.options.write_timeout_s, self._look_at_reader, waiting)

    def _look_at_reader(self, waiting: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left and waiting - left < self.options.write_floor * self.options.write_timeout_s:
            self._cut()
        else:
            self._watch_reader(left > 0)

    def _cut(self) -> None:
        """Drop a client that does not read, with all that waits for it."""
        log.info("a client was cut off: it left %d bytes of its answer unread", self.transport.get_write_buffer_size())
        self._link.unread = True
        self.transport.abort()

    def _resume_reading(self) -> None:
        self.flow.resume_reading()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.options.max_head:
            self._refusal = _head_too_large(self.options.max_head)
            raise HeadRefusedError

    def _late(self) -> None:
        if self._answers():
            # The head of a pipelined request; the answer before it is still being written.
            self._set_deadline(self.loop.call_later(self.options.head_timeout_s, self._late))
            return
        text = f"The request head did not arrive within {self.options.head_timeout_s:g} s."
        self._refuse(HttpError(408, text, code="request_timeout"))

    def _refuse(self, error: HttpError) -> None:
        self._refusal = error
        self._in_head = False
        if self.transport.is_closing():
            return
        if self._running is not None and self._answers():
            within = self._running.more_body and not self._running.response_started
            if not within:
                self._last()
                return
            self._leave()  # what is wrong is in its body, and nobody else may answer it now
        failure = describe(error, request_id="", state="ready")
        body = failure.body()
        head = b"".join(b"%b: %b\r\n" % header for header in failure.headers if header[0] != b"connection")
        head += b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[failure.status] + head + body)
        self._linger(_LINGER_S)

    def end_answered(self) -> None:
        """Close after an answer. What still comes of a request that was answered before its end is dropped for a moment."""
        if self._running is None or not self._running.more_body or not self._running.response_complete:
            self.transport.close()
        elif not self.transport.is_closing() and self._refusal is None:
            self._refusal = HttpError(400, "The request was answered before its end.", code="invalid_http")  # which nobody is told
            self._linger(_LINGER_BODY_S)
            self.flow.resume_reading()

    def _linger(self, seconds: float) -> None:
        """End our side, so that a client that reads to the end has its answer now, and soon the connection. Closed at once, with bytes
        unread, it would send a reset, by which some clients lose the answer."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._set_deadline(self.loop.call_later(seconds, self.transport.close))

    def _set_deadline(self, handle: asyncio.TimerHandle | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = handle


class _Lingering:
    """The transport of a request whose body was not there when it began: closed within that, the connection ends gently."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, protocol: BoundedProtocol) -> None:
        self.write, self.is_closing, self.close = protocol.transport.write, protocol.transport.is_closing, protocol.end_answered


def _parser(protocol: BoundedProtocol) -> httptools.HttpRequestParser:
    """A new parser, as lenient as the one that uvicorn makes."""
    parser = httptools.HttpRequestParser(protocol)
    with contextlib.suppress(AttributeError):  # older than 0.6.3
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _was_reset(transport: asyncio.Transport) -> bool:
    """Whether the other system has closed the connection; False where that cannot be known without writing."""
    with contextlib.suppress(OSError, AttributeError):
        state: bytes = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return state[0] == _TCP_CLOSE
    return False


def _head_too_large(limit: int) -> HttpError:
    return HttpError(431, f"The request line and headers are larger than the limit of {limit} bytes.", code="request_head_too_large")


def uvicorn_config(app: ASGIApp, options: ServerOptions, **overrides: Any) -> uvicorn.Config:
    """uvicorn's settings for `app`; `overrides` are uvicorn's own, such as host, port, backlog or fd.

    uvicorn keeps quiet: the application writes the access log, and the caller sets up logging.
    """
    protocol = type("BoundedProtocol", (BoundedProtocol,), {"options": options})
    settings: dict[str, Any] = {
        "http": protocol,
        "ws": "none",
        "loop": "uvloop",
        "lifespan": "on",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "timeout_keep_alive": int(options.keep_alive_s),
    }
    return uvicorn.Config(app, **{**settings, **overrides})


def steady_process() -> None:
    """Set the interpreter up for thousands of streams, once all that stays is loaded.

    The collector looks for cycles less often and never again at what is there now: each stream keeps a hundred objects, and with the
    default a step for 2,500 streams would set off walks over all of them. Threads give way to the event loop within a millisecond.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 20, 100)
    sys.setswitchinterval(_SWITCH_S)
