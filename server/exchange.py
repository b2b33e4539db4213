"""One HTTP request and its answer over raw ASGI: reading the body within limits, answering once, noticing that the client left."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any

from forebay.server.access import ANYONE, Caller
from forebay.server.body import check_encoding, to_json, too_large
from forebay.server.errors import ClientGoneError, Failure, Family, Headers, HttpError
from forebay.server.limits import Bodies, ServerOptions

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = (b"content-type", b"application/json")
LINK = "forebay.link"  # the ASGI extension by which the connection of a request is found
CLIENT_GONE = 499  # never sent; what the log and the metrics say when the client left first

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_DISCARD_S = 2.0
_SMALL_BODY = 1 << 20  # bytes up to which a body may use what is kept free for small ones
_SMALL_CANVASES = 16 << 20  # the same of canvases: three of the largest
_PART = 256 * 1024  # bytes of a large answer that are handed over at a time


class Link:
    """What an exchange may know of its connection, without a task that waits for news.

    Attributes:
        lost: it is closed. unread: it was closed here because its client took nothing in. watcher: called when it is lost.
        answering: the engine has begun to answer the request that runs on it.
        resume: takes up reading again, without which nobody would notice that the client leaves.
    """

    __slots__ = ("answering", "lost", "resume", "unread", "watcher")

    def __init__(self, resume: Callable[[], None]) -> None:
        self.lost = self.unread = self.answering = False
        self.watcher: Callable[[], object] | None = None
        self.resume = resume

    def lose(self) -> None:
        """The connection is gone."""
        self.lost = True
        if self.watcher is not None:
            self.watcher()


connection: ContextVar[Link | None] = ContextVar("connection", default=None)
"""The connection of the request that this task answers."""


class Exchange:
    """One request. `route` and `notes` are for the access log; `status` is 0 until an answer was started; `family` shapes errors."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            self.headers.setdefault(name, value)
        self.receive = receive
        self.send = send
        self._bodies: Bodies | None = None
        self._claimed = 0  # bytes of them
        self._canvases: tuple[Bodies, int] | None = None
        self._link: Link | None = scope.get("extensions", {}).get(LINK)
        given = self.headers.get(b"x-request-id", b"").decode("latin-1")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self.began = time.monotonic()
        self.arrived = self.began  # when the whole body was there
        self.route = "other"
        self.family: Family = "openai"
        self.caller: Caller = ANYONE
        self.over_limit: HttpError | None = None  # why the caller's limits refuse the request, for routes that say so themselves
        self.quiet = False  # successes are logged at debug level
        self.status = 0
        self.admitted = False  # the engine has it
        self.fail_stream: Callable[[Failure], Awaitable[None]] | None = None  # how a stream that has started tells an error
        self.notes: dict[str, Any] = {}
        self.extra_headers: Headers = []  # sent with every answer of this request
        self._body_read = self.headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in self.headers

    async def start(self, status: int, headers: Headers) -> None:
        """Send status and headers. `x-request-id` is added here."""
        self.status = status
        await self.send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*self._request_id_headers(), *self.extra_headers, *headers],
            }
        )

    def _request_id_headers(self) -> Headers:
        value = self.request_id.encode()
        return [(b"x-request-id", value), *([(b"request-id", value)] if self.family == "anthropic" else [])]

    async def reply(self, status: int, body: bytes, headers: Headers | None = None) -> None:
        """The whole answer. The body is JSON unless `headers` name another content type."""
        headers = headers or []
        if not any(name == b"content-type" for name, _ in headers):
            headers = [JSON, *headers]
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def reply_parts(self, status: int, parts: Sequence[bytes]) -> None:
        """The whole answer, JSON in parts: only as much of it is copied as the connection takes over at once."""
        if sum(map(len, parts)) <= _PART:
            await self.reply(status, b"".join(parts))
            return
        await self.start(status, [JSON, (b"content-length", b"%d" % sum(map(len, parts)))])
        for part in parts:
            for start in range(0, len(part), _PART):
                await self.send({"type": "http.response.body", "body": part[start : start + _PART], "more_body": True})
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def reply_json(self, status: int, value: Any, headers: Headers | None = None) -> None:
        await self.reply(status, to_json(value), headers)

    async def refuse(self, failure: Failure, options: ServerOptions) -> None:
        """Answer with an error. Up to `discard_body` of a body under way is dropped first, so that the client does not see a reset."""
        if self.fail_stream is not None:
            await self.fail_stream(failure)
            return
        headers = list(failure.headers)
        # A client that waits for leave to send would be told to go on; one that was too slow has had its time.
        useless = b"expect" in self.headers or failure.status == 408
        whole = self._body_read or (not useless and await self._discard(options.discard_body))
        if not whole and (b"connection", b"close") not in headers:
            headers.append((b"connection", b"close"))
        await self.reply(failure.status_for(self.family), failure.body(self.family, self.request_id), headers)

    def most_body(self, options: ServerOptions) -> int:
        """Bytes that the body may have; of a request that is refused anyway, as many as it takes to do that in the client's own way."""
        return options.max_body if self.over_limit is None else min(options.discard_body, options.max_body)

    def claim_body(self, size: int) -> None:
        """Say how much memory the body takes now; none once the prompt is made. Raises HttpError 503 if there is not so much."""
        if self._bodies is not None and size != self._claimed:
            if not self._bodies.change(self._claimed, size, _SMALL_BODY):
                text = "The server has as many request bodies in memory as it has room for. Try again later."
                raise HttpError(503, text, code="overloaded", retry_after=1)
            self._claimed = size

    def claim_more(self, size: int) -> None:
        """The body, or files that it names, take `size` bytes more. Raises like `claim_body`."""
        self.claim_body(self._claimed + size)

    def claim_canvases(self, size: int, canvases: Bodies) -> None:
        """Say how much memory what the model sees takes, until the exchange has ended. Raises HttpError 503 if there is not so much."""
        if not canvases.change(0, size, _SMALL_CANVASES):
            text = "The server has as many images in memory as it has room for. Try again later."
            raise HttpError(503, text, code="overloaded", retry_after=1)
        self._canvases = (canvases, size)

    def release(self) -> None:
        """Give back what was claimed: the exchange has ended."""
        self.claim_body(0)
        if self._canvases is not None:
            canvases, size = self._canvases
            canvases.change(size, 0, 0)
            self._canvases = None

    async def read_body(self, options: ServerOptions, bodies: Bodies | None = None) -> bytes:
        """The body as sent (still content-encoded). It counts among `bodies` until `claim_body` says otherwise.

        Raises HttpError 413 (too large), 415 (unknown Content-Encoding), 408 (paused or trickling), 503 (too many bodies);
        ClientGoneError. A request over the limits of its key is refused with that if its body is not small.
        """
        self._bodies = bodies
        check_encoding(self.headers.get(b"content-encoding", b"").decode("latin-1"))
        declared = self.headers.get(b"content-length", b"")
        most = self.most_body(options)
        if declared.isdigit() and (len(declared) > 18 or int(declared) > most):
            raise self.over_limit or too_large(most)
        loop = asyncio.get_running_loop()
        began, size, pieces = loop.time(), 0, []
        deadline = began + options.body_timeout_s
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    message = await self.receive()
            except TimeoutError:
                text = f"The request body did not arrive in time: {size} bytes in {loop.time() - began:.0f} s."
                raise HttpError(408, text, code="request_timeout", headers=[(b"connection", b"close")]) from None
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            piece = message.get("body", b"")
            self._body_read = not message.get("more_body", False)
            size += len(piece)
            # What came fast earns no more than one pause: else a large body that trickles at its end would hold its memory for long.
            deadline = min(deadline + len(piece) / options.body_floor, loop.time() + options.body_timeout_s)
            if size > most:
                raise self.over_limit or too_large(most)
            self.claim_body(size)
            pieces.append(piece)
            if self._body_read:
                self.arrived = time.monotonic()
                return b"".join(pieces)

    async def unless_gone(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`; cancel it and raise ClientGoneError as soon as the client closes the connection. For use once the body was read."""
        link, task = self._link, asyncio.current_task()
        if link is None or task is None:
            await self._unless_told(work)
            return
        if link.lost:
            work.close()
            raise ClientGoneError
        gone = False

        def leave() -> None:
            nonlocal gone
            gone = True
            task.cancel()

        connection.set(link)
        link.watcher = leave
        link.resume()
        try:
            await work
        except asyncio.CancelledError:
            if not gone:
                raise
        finally:
            link.watcher = None
        if gone:
            task.uncancel()
            if link.unread:
                self.notes["error"] = "slow_reader"
            raise ClientGoneError

    async def _unless_told(self, work: Coroutine[Any, Any, None]) -> None:
        """The same where only `receive` tells that the client has left."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGoneError
            await task
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
                # Wait for the clean-up: it is what frees the request's place in the engine.
                await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()  # seen; raised above unless the client is gone

    async def _gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def _discard(self, limit: int) -> bool:
        """Read and drop the rest of the body. True if it ended within `limit` bytes and a moment."""
        try:
            async with asyncio.timeout(_DISCARD_S):
                while limit > 0:
                    message = await self.receive()
                    limit -= len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        self._body_read = True
                        return True
        except TimeoutError:
            pass
        return False
