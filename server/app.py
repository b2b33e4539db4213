"""The ASGI application: the table of routes and the small ones among them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from forebay.server.access import KeyRing
from forebay.server.chat import ChatRoute
from forebay.server.completions import CompletionRoute
from forebay.server.errors import describe, unavailable
from forebay.server.exchange import Exchange, Receive, Scope, Send
from forebay.server.front import Front, House, Route
from forebay.server.limits import Lanes, ServerOptions
from forebay.server.messages import MessagesRoute
from forebay.server.models import ModelRoutes
from forebay.server.openapi import document
from forebay.server.responses import InputTokensRoute, ResponsesRoute
from forebay.server.throttle import Throttle
from forebay.server.tokens import TokenRoutes
from forebay.server.turns import Engine, Turns

_METRICS_TYPE = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


class App:
    """The application.

    Attributes:
        routes: the whole table; whatever is not in it answers 404.
        admin: the application of the operator's own bind, None unless `options.metrics_apart`.

    Raises ConfigError if the API keys cannot be read.
    """

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self._engine = engine
        self._options = options
        self._lanes = Lanes(options.large)
        self._turns = Turns(engine, options, self._lanes)
        models, tokens = ModelRoutes(self._turns), TokenRoutes(self._turns)
        probe: dict[str, Any] = {"methods": ("GET", "HEAD"), "open": True, "quiet": True}
        routes: Sequence[Route] = (
            Route(
                "/v1/chat/completions",
                ("POST",),
                ("/v1/chat/completions", "/chat/completions", "/beta/chat/completions", "/beta/v1/chat/completions"),
                ChatRoute(self._turns),
                generates=True,
            ),
            Route(
                "/v1/completions",
                ("POST",),
                ("/v1/completions", "/completions", "/beta/completions", "/beta/v1/completions"),
                CompletionRoute(self._turns),
                generates=True,
            ),
            # GET is only for the upgrade to a WebSocket that Codex tries first; the handler refuses it.
            Route(
                "/v1/responses",
                ("POST", "GET"),
                ("/v1/responses", "/responses"),
                ResponsesRoute(self._turns),
                tells_limits=True,
                generates=True,
            ),
            Route("/v1/responses/input_tokens", ("POST",), ("/v1/responses/input_tokens",), InputTokensRoute(self._turns)),
            Route(
                "/v1/messages",
                ("POST",),
                ("/v1/messages", "/anthropic/v1/messages", "/messages"),
                MessagesRoute(self._turns),
                family="anthropic",
                generates=True,
            ),
            Route(
                "/v1/messages/count_tokens",
                ("POST",),
                ("/v1/messages/count_tokens", "/anthropic/v1/messages/count_tokens"),
                MessagesRoute(self._turns, counting=True),
                family="anthropic",
            ),
            Route("/v1/models", ("GET",), ("/v1/models", "/models"), models.models, below=True),
            Route("/v1/models", ("GET",), ("/anthropic/v1/models",), models.models, below=True, family="anthropic"),
            Route("/tokenize", ("POST",), ("/tokenize", "/v1/tokenize"), tokens.tokenize),
            Route("/detokenize", ("POST",), ("/detokenize", "/v1/detokenize"), tokens.detokenize),
            Route("/health/live", paths=("/health/live", "/livez"), handler=self._live, **probe),
            Route(
                "/health/ready",
                paths=("/health/ready", "/health", "/healthz", "/readyz", "/ready", "/ping", "/v1/health"),
                handler=self._ready,
                **probe,
            ),
            Route("/", paths=("/", "/api/hello"), handler=self._hello, **probe),
            Route("/version", ("GET",), ("/version",), models.version, open=True),
            Route("/openapi.json", ("GET",), ("/openapi.json",), self._openapi, open=True),
            Route("/metrics", ("GET",), ("/metrics",), self._metrics, open=not options.metrics_key, quiet=True, admin=True),
        )
        keys = KeyRing(options)
        house = House(engine, options, keys, Throttle(), self._turns.pace)
        self.routes = tuple(route for route in routes if not (route.admin and options.metrics_apart))
        self._document = functools.cache(lambda: orjson.dumps(document(self.routes, self._turns.names, open_to_all=keys.open)))
        self._front = Front(self.routes, house)
        self.admin = Admin(Front([r for r in routes if r.admin or r.name.startswith("/health")], house)) if options.metrics_apart else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send, self.close)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})
        else:
            await self._front.answer(Exchange(scope, receive, send))

    # ---- small routes

    async def _hello(self, exchange: Exchange) -> None:
        await exchange.reply_json(200, {"status": "ok"})

    async def _live(self, exchange: Exchange) -> None:
        """200 while the engine moves or idles (also while it loads); 503 asks for a restart."""
        if self._stuck():
            await self._unwell(exchange, "dead")
        else:
            await exchange.reply_json(200, {"status": "ok"})

    async def _ready(self, exchange: Exchange) -> None:
        """200 if a request would be taken now."""
        state = "dead" if self._stuck() else self._engine.state
        if state == "ready":
            await exchange.reply_json(200, {"status": "ok"})
        else:
            await self._unwell(exchange, state)

    def _stuck(self) -> bool:
        engine = self._engine
        return engine.state == "dead" or (engine.state != "loading" and engine.last_progress_age() > self._options.liveness_timeout_s)

    async def _unwell(self, exchange: Exchange, state: str) -> None:
        reason = self._engine.reason
        if self._engine.state not in ("dead", state):
            reason = f"no step for {self._engine.last_progress_age():.0f} s"
        failure = describe(unavailable(state, reason), request_id=exchange.request_id, state=state)
        await exchange.reply_json(failure.status, {"status": state, "error": failure.error}, failure.headers)

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.reply(200, self._document())

    async def _metrics(self, exchange: Exchange) -> None:
        # Asks the SSD store, whose disk may be slow.
        await exchange.reply(200, await asyncio.to_thread(self._engine.metrics.render), [_METRICS_TYPE])

    def close(self) -> None:
        """Let the threads end. Called at the end of the lifespan; who runs the application without one calls it."""
        self._lanes.close()
        self._turns.images.close()
        self._turns.desk.close()
        self._turns.grammars.close()


class Admin:
    """The routes for the operator alone, as an application for a bind of their own."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send, lambda: None)
        else:
            await self._front.answer(Exchange(scope, receive, send))


async def lifespan(receive: Receive, send: Send, close: Callable[[], None]) -> None:
    """The engine is started and stopped by whoever made it; here only `close` is called at the end."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            close()
            return


def create_app(engine: Engine, options: ServerOptions) -> App:
    """The application for uvicorn; see `forebay.server.wire.uvicorn_config` for how to run it."""
    return App(engine, options)
