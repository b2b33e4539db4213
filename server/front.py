"""One door: finds the route of a request, asks for its key and limits, turns errors into answers, and writes the access log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from forebay.engine.types import QueueFullError
from forebay.model.errors import ForebayError
from forebay.server.access import KeyRing, forbidden, identify
from forebay.server.errors import ClientGoneError, Family, HttpError, describe, family_of, unavailable
from forebay.server.exchange import CLIENT_GONE, Exchange
from forebay.server.limits import ServerOptions
from forebay.server.throttle import Pace, Throttle, current
from forebay.server.turns import Engine

log = logging.getLogger("forebay.server")
access = logging.getLogger("forebay.access")

Handler = Callable[[Exchange], Awaitable[None]]

_EXPOSED = (  # headers that a browser shows to a page of another origin
    b"x-request-id, request-id, x-forebay-ignored, x-forebay-effort, retry-after, "
    b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)


@dataclass(frozen=True)
class Route:
    """One row of the table. `open` routes never need a key; `quiet` ones log their successes at debug level.

    Attributes:
        below: also everything under `path/`, which the handler reads.
        admin: for the operator: on the bind of `server.metrics_bind` if there is one, and then only there.
        tells_limits: the handler itself answers a request that is over the limits of its key: `Exchange.over_limit`.
        generates: the engine runs its requests, which therefore count towards the limits of their keys.
    """

    name: str
    methods: tuple[str, ...]
    paths: tuple[str, ...]
    handler: Handler
    open: bool = False
    quiet: bool = False
    below: bool = False
    family: Family = "openai"
    admin: bool = False
    tells_limits: bool = False
    generates: bool = False


@dataclass
class House:
    """What all doors of one server share."""

    engine: Engine
    options: ServerOptions
    keys: KeyRing
    throttle: Throttle
    pace: Pace


class Front:
    """Answers HTTP requests by a table of routes. What is not in it answers 404; what is not `open` needs a key, whatever its spelling,
    since route and key are decided by the same, decoded path."""

    def __init__(self, routes: Sequence[Route], house: House) -> None:
        self._house = house
        self._engine, self._options = house.engine, house.options
        self._table = {path: route for route in routes for path in route.paths}
        self._below = tuple((f"{path}/", route) for route in routes if route.below for path in route.paths)

    async def answer(self, exchange: Exchange) -> None:
        """Answer one request, whatever happens, and log it."""
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
            await self._refuse(exchange, error)
        finally:
            if (ticket := current.get()) is not None:
                ticket.close()
            exchange.release()
            self._engine.metrics.http(exchange.route, exchange.status)
            self._log(exchange)

    def find(self, path: str) -> Route | None:
        """The route of a decoded path, with or without a slash at its end: a redirect would turn POST into GET in some clients."""
        if len(path) > 1 and path.endswith("/"):
            path = path[:-1]
        return self._table.get(path) or next((route for prefix, route in self._below if path.startswith(prefix)), None)

    def _unknown(self, method: str, path: str) -> str:
        """What a 404 says: a base URL with a /v1 too many is the commonest mistake, a misspelt path the next."""
        text = f"Unknown request URL: {method[:32]} {path[:200]}."
        if path.startswith("/v1/v1/") and self.find(path[3:]) is not None:
            return f"{text} This client adds /v1 itself: give it the base URL without /v1."
        near = get_close_matches(path[:64], [known for known in self._table if known != "/"], 1, 0.7)
        return f"{text} The nearest route is {near[0]}." if near else f"{text} GET /openapi.json lists the routes."

    async def _dispatch(self, exchange: Exchange) -> None:
        current.set(None)
        route = self.find(exchange.path)
        self._allow_origin(exchange)
        exchange.family = route.family if route is not None else family_of(exchange.path)
        if route is None:
            raise HttpError(404, self._unknown(exchange.method, exchange.path), code="unknown_url")
        exchange.route, exchange.quiet = route.name, route.quiet
        if exchange.method == "OPTIONS" and self._options.cors_origins:
            await self._preflight(exchange, route)  # browsers send it without the key
            return
        if not route.open:
            self._require_key(exchange, route)
        if exchange.method not in route.methods:
            text = f"Method {exchange.method[:32]} is not allowed on {exchange.path[:200]}. Use {' or '.join(route.methods)}."
            raise HttpError(405, text, code="method_not_allowed", headers=[(b"allow", ", ".join(route.methods).encode())])
        if route.generates and exchange.method == "POST" and exchange.caller.key is not None:
            self._take_ticket(exchange, route)
        await route.handler(exchange)

    def _require_key(self, exchange: Exchange, route: Route) -> None:
        try:
            caller = identify(self._house.keys, exchange.headers)
            if route.admin and caller.key is not None and not caller.key.admin:
                raise forbidden("This API key may not do that; it takes one with `admin`.")
        except HttpError:
            self._engine.metrics.request_rejected("unauthorized")
            raise
        exchange.caller = caller
        if caller.name:
            exchange.notes.update(key=caller.name, tenant=caller.tenant)

    def _take_ticket(self, exchange: Exchange, route: Route) -> None:
        try:
            ticket, headers = self._house.throttle.admit(exchange.caller)
        except HttpError as error:
            if route.tells_limits:
                exchange.over_limit = error
                return
            self._engine.metrics.request_rejected("rate_limited")
            raise
        current.set(ticket)
        exchange.extra_headers += headers

    async def _refuse(self, exchange: Exchange, error: Exception) -> None:
        if isinstance(error, QueueFullError):
            error.retry_after = self._house.pace.promise(error.retry_after)
        failure = describe(error, request_id=exchange.request_id, state=self._engine.state)
        exchange.notes["error"] = failure.code
        if not failure.expected:
            log.error("request %s failed", exchange.request_id, exc_info=error)
        if not isinstance(error, ForebayError):  # the engine counts its own
            self._engine.metrics.error("internal_error")
        if exchange.status and exchange.fail_stream is None:
            raise error  # an answer is under way and cannot be taken back: the connection is dropped
        await exchange.refuse(failure, self._options)

    def _log(self, exchange: Exchange) -> None:
        level = logging.DEBUG if exchange.quiet and exchange.status < 400 else logging.INFO
        if access.isEnabledFor(level):
            line: Mapping[str, Any] = {
                "request_id": exchange.request_id,
                "method": exchange.method[:32],
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
                (b"access-control-expose-headers", _EXPOSED),
                (b"vary", b"origin"),
            ]

    async def _preflight(self, exchange: Exchange, route: Route) -> None:
        wanted = exchange.headers.get(b"access-control-request-headers", b"*")
        headers = [(b"access-control-allow-methods", ", ".join(route.methods).encode()), (b"access-control-allow-headers", wanted)]
        await exchange.start(204, [*headers, (b"access-control-max-age", b"600")])
        await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
