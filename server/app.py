"""The ASGI application: a table of routes, one place where errors become answers, and the access log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forebay import __version__
from forebay.model.errors import ForebayError
from forebay.server.chat import ChatRoute
from forebay.server.errors import ClientGoneError, Family, HttpError, describe, unavailable
from forebay.server.exchange import CLIENT_GONE, Exchange, Receive, Scope, Send
from forebay.server.limits import Lanes, ServerOptions
from forebay.server.turns import Engine, Turns

log = logging.getLogger("forebay.server")
access = logging.getLogger("forebay.access")

Handler = Callable[[Exchange], Awaitable[None]]

_METRICS_TYPE = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


@dataclass(frozen=True)
class Route:
    """One row of the table. `open` routes never need a key; `quiet` ones log their successes at debug level."""

    name: str
    methods: tuple[str, ...]
    paths: tuple[str, ...]
    handler: Handler
    open: bool = False
    quiet: bool = False
    below: bool = False  # also everything under `path/`, which the handler reads
    family: Family = "openai"


class App:
    """The application. `routes` is the whole table; whatever is not in it answers 404."""

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self._engine = engine
        self._options = options
        self._lanes = Lanes(options.large)
        self._created = int(time.time())
        self._turns = Turns(engine, options, self._lanes)
        self._names = self._turns.names
        probe: dict[str, Any] = {"methods": ("GET", "HEAD"), "open": True, "quiet": True}
        self.routes: Sequence[Route] = (
            Route(
                "/v1/chat/completions",
                ("POST",),
                ("/v1/chat/completions", "/chat/completions", "/beta/chat/completions", "/beta/v1/chat/completions"),
                ChatRoute(self._turns),
            ),
            Route("/v1/models", ("GET",), ("/v1/models", "/models"), self._models, below=True),
            Route("/health/live", paths=("/health/live", "/livez"), handler=self._live, **probe),
            Route(
                "/health/ready",
                paths=("/health/ready", "/health", "/healthz", "/readyz", "/ready", "/ping", "/v1/health"),
                handler=self._ready,
                **probe,
            ),
            Route("/", paths=("/", "/api/hello"), handler=self._hello, **probe),
            Route("/version", ("GET",), ("/version",), self._version, open=True),
            Route("/metrics", ("GET",), ("/metrics",), self._metrics, open=True, quiet=True),
        )
        self._table = {path: route for route in self.routes for path in route.paths}
        self._below = tuple((f"{path}/", route) for route in self.routes if route.below for path in route.paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})
        else:
            await self._answer(Exchange(scope, receive, send))

    # ---- one request

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._dispatch(exchange)
        except ClientGoneError:
            exchange.status = CLIENT_GONE
        except asyncio.CancelledError:
            # The server stops and this client has neither sent its whole request nor read its whole answer.
            # The task ends here anyway; raised, it would be a traceback in the log.
            if not exchange.status:
                failure = describe(unavailable("draining", ""), request_id=exchange.request_id, state="draining")
                with contextlib.suppress(Exception):
                    status, body = failure.status_for(exchange.family), failure.body(exchange.family, exchange.request_id)
                    await exchange.reply(status, body, failure.headers)
        except Exception as error:
            failure = describe(error, request_id=exchange.request_id, state=self._engine.state)
            exchange.notes["error"] = failure.code
            if not failure.expected:
                log.error("request %s failed", exchange.request_id, exc_info=error)
            if not isinstance(error, ForebayError):  # the engine counts its own
                self._engine.metrics.error("internal_error")
            if exchange.status and exchange.fail_stream is None:
                raise  # an answer is under way and cannot be taken back: the connection is dropped
            await exchange.refuse(failure, self._options)
        finally:
            self._engine.metrics.http(exchange.route, exchange.status)
            self._log(exchange)

    async def _dispatch(self, exchange: Exchange) -> None:
        path = exchange.path
        if len(path) > 1 and path.endswith("/"):
            path = path[:-1]  # a redirect would turn POST into GET in some clients
        route = self._table.get(path) or next((route for prefix, route in self._below if path.startswith(prefix)), None)
        self._allow_origin(exchange)
        exchange.family = route.family if route is not None else "anthropic" if path.startswith("/anthropic/") else "openai"
        if route is None:
            text = f"Unknown request URL: {exchange.method} {exchange.path[:200]}. See the README for the routes of this server."
            raise HttpError(404, text, code="unknown_url")
        exchange.route, exchange.quiet = route.name, route.quiet
        if exchange.method == "OPTIONS" and self._options.cors_origins:
            await self._preflight(exchange, route)
            return
        if exchange.method not in route.methods:
            text = f"Method {exchange.method[:32]} is not allowed on {exchange.path[:200]}. Use {' or '.join(route.methods)}."
            raise HttpError(405, text, code="method_not_allowed", headers=[(b"allow", ", ".join(route.methods).encode())])
        await route.handler(exchange)

    def _log(self, exchange: Exchange) -> None:
        level = logging.DEBUG if exchange.quiet and exchange.status < 400 else logging.INFO
        if access.isEnabledFor(level):
            line = {
                "request_id": exchange.request_id,
                "method": exchange.method,
                "route": exchange.route,
                "status": exchange.status,
                "seconds": round(time.monotonic() - exchange.began, 4),
                **exchange.notes,
            }
            access.log(level, "%s", json.dumps(line, ensure_ascii=True))

    def _allow_origin(self, exchange: Exchange) -> None:
        origin = exchange.headers.get(b"origin", b"")
        allowed = self._options.cors_origins
        if origin and ("*" in allowed or origin.decode("latin-1") in allowed):
            exchange.extra_headers += [
                (b"access-control-allow-origin", b"*" if "*" in allowed else origin),
                (b"access-control-expose-headers", b"x-request-id, x-forebay-ignored, x-forebay-effort, retry-after"),
                (b"vary", b"origin"),
            ]

    async def _preflight(self, exchange: Exchange, route: Route) -> None:
        wanted = exchange.headers.get(b"access-control-request-headers", b"*")
        headers = [(b"access-control-allow-methods", ", ".join(route.methods).encode()), (b"access-control-allow-headers", wanted)]
        await exchange.start(204, [*headers, (b"access-control-max-age", b"600")])
        await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})

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

    async def _version(self, exchange: Exchange) -> None:
        features = {"chat_completions": True, "logprobs": "of the model's distribution, before temperature, penalties and filters"}
        await exchange.reply_json(200, {"version": __version__, "model": self._names[0], "api": features})

    async def _metrics(self, exchange: Exchange) -> None:
        # Asks the SSD store, whose disk may be slow.
        await exchange.reply(200, await asyncio.to_thread(self._engine.metrics.render), [_METRICS_TYPE])

    async def _models(self, exchange: Exchange) -> None:
        entries = [self._entry(name) for name in self._names]
        rest = exchange.path.partition("models")[2]
        if rest in ("", "/"):
            await exchange.reply_json(200, {"object": "list", "data": entries})
            return
        exchange.route = "/v1/models/{id}"
        wanted = rest[1:].removesuffix("/")
        for entry in entries:
            if entry["id"] == wanted:
                await exchange.reply_json(200, entry)
                return
        text = f"The model `{wanted[:128]}` does not exist. Available: {', '.join(self._names)}"
        raise HttpError(404, text, code="model_not_found", param="model")

    def _entry(self, name: str) -> dict[str, Any]:
        context = self._engine.max_context
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "forebay",
            "root": self._names[0],
            "parent": None,
            "max_model_len": context,
            "context_length": context,
            "max_output_tokens": min(self._options.max_output, context),
            "capabilities": {"vision": False, "tools": True, "reasoning": True},
        }

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """The engine is started and stopped by whoever made it; here only the threads end."""
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                self.close()
                return

    def close(self) -> None:
        """Let the threads end. Called at the end of the lifespan; who runs the application without one calls it."""
        self._lanes.close()


def create_app(engine: Engine, options: ServerOptions) -> App:
    """The application for uvicorn; see `forebay.server.wire.uvicorn_config` for how to run it."""
    return App(engine, options)
