"""What answers while the model loads: the process is alive, not ready, and says how far it is. Then the real application takes over."""

from __future__ import annotations

from collections.abc import Callable

from forebay.server.errors import describe, unavailable
from forebay.server.exchange import ASGIApp, Exchange, Message, Receive, Scope, Send
from forebay.server.limits import ServerOptions

LIVE_PATHS = ("/health/live", "/livez")
READY_PATHS = ("/health/ready", "/health", "/healthz", "/readyz", "/ready", "/ping", "/v1/health")


class Gate:
    """ASGI application that answers by itself until `open` gives it the real one.

    `progress` is asked for a sentence on how far the load is.
    """

    def __init__(self, progress: Callable[[], str], options: ServerOptions) -> None:
        self._progress = progress
        self._options = options
        self._app: ASGIApp | None = None

    def open(self, app: ASGIApp) -> None:
        """Hand every following request to `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)
        else:
            await self._answer(Exchange(scope, receive, send))

    async def _answer(self, exchange: Exchange) -> None:
        path = exchange.path.rstrip("/")
        if path in LIVE_PATHS:
            await exchange.reply_json(200, {"status": "ok"})
            return
        failure = describe(unavailable("loading", self._progress()), request_id=exchange.request_id, state="loading")
        if path in READY_PATHS:
            await exchange.reply_json(failure.status, {"status": "loading", "error": failure.error}, failure.headers)
        else:
            await exchange.refuse(failure, self._options)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Start-up is ours: there is no application yet. The shutdown is passed on to it, so that its threads end."""
        await receive()
        await send({"type": "lifespan.startup.complete"})
        shutdown = await receive()
        if self._app is None:
            await send({"type": "lifespan.shutdown.complete"})
            return

        async def last() -> Message:
            return shutdown

        await self._app(scope, last, send)
