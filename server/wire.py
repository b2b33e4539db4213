"""How uvicorn is run: its HTTP protocol with limits on request heads, which it lacks, and errors in our envelope."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import sys
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from forebay.server.errors import HttpError, describe
from forebay.server.exchange import LINK, ASGIApp, Link
from forebay.server.limits import ServerOptions

_LINGER_S = 1.0
_NEW_OBJECTS = 50_000  # more than one step for thousands of streams makes at once
_SWITCH_S = 0.001
_UNSENT = 64 * 1024  # bytes of one connection that the kernel takes over before they can be sent; its own bound is megabytes

log = logging.getLogger("forebay.server")


class HeadRefusedError(Exception):
    """Ends parsing of a head that is over its limits."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, except that a request head has a size limit (431) and a deadline (408), and connections a limit (503).

    A connection on which nothing arrives is closed like an idle one, and one whose client takes nothing in is cut off: its request ends,
    and what waits to be sent is dropped. After a refusal, what still arrives is dropped for a moment before the connection closes, so that
    the client reads the answer and not a reset.
    """

    options: ClassVar[ServerOptions]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._head_bytes = 0  # of the name and value lines parsed so far
        self._unparsed = 0  # received for a head that is not complete
        self._deadline: asyncio.TimerHandle | None = None
        self._refusal: HttpError | None = None
        self._dropped = 0
        self._link = Link(self._resume_reading)
        self._unread: asyncio.TimerHandle | None = None

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
        super().connection_lost(exc)
        self._link.lose()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            self._dropped += len(data)
            if self._dropped > self.options.discard_body:
                self.transport.close()
            return
        super().data_received(data)
        if self._in_head and self._refusal is None:
            self._unparsed += len(data)
            if self._unparsed > self.options.max_head:
                self._refuse(_head_too_large(self.options.max_head))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {LINK: self._link}  # type: ignore[dict-item]
        self._in_head, self._head_bytes, self._unparsed = True, 0, 0
        self._set_deadline(self.loop.call_later(self.options.head_timeout_s, self._late))

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._set_deadline(None)
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch_reader(False)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():  # nothing more will be written, so nothing would notice
            self._watch_reader(True)

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
        if not self.pipeline:  # a request that waits behind this one is what reading was paused for
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Called for whatever the parser did not accept, including what `_count` refused."""
        self._refuse(self._refusal or HttpError(400, msg, code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing to warn of: agents ask for a WebSocket first and go on over HTTP, and the advice to install a library is wrong."""

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.options.max_head:
            self._refusal = _head_too_large(self.options.max_head)
            raise HeadRefusedError

    def _late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
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
        failure = describe(error, request_id="", state="ready")
        body = failure.body()
        head = b"".join(b"%b: %b\r\n" % header for header in failure.headers if header[0] != b"connection")
        head += b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[failure.status] + head + body)
        self._set_deadline(self.loop.call_later(_LINGER_S, self.transport.close))

    def _set_deadline(self, handle: asyncio.TimerHandle | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = handle


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
