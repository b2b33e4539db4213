"""What answers while the model loads: the process is alive, not ready, and says how far it is. Then the real application takes over.

As soon as the tokenizer is there, the application itself answers, over a stand-in for the engine: models are listed, texts tokenised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from prometheus_client import CollectorRegistry

from forebay.engine.metrics import Metrics
from forebay.engine.preview import preview
from forebay.engine.types import Request, UnavailableError
from forebay.model.chat import ChatCodec, ChatVision
from forebay.model.tokenizer import Tokenizer
from forebay.server.errors import State, describe, family_of, unavailable
from forebay.server.exchange import ASGIApp, Exchange, Message, Receive, Scope, Send
from forebay.server.limits import ServerOptions

if TYPE_CHECKING:
    from forebay.server.config import Config

LIVE_PATHS = ("/health/live", "/livez")
READY_PATHS = ("/health/ready", "/health", "/healthz", "/readyz", "/ready", "/ping", "/v1/health")


class LoadingEngine:
    """Stands in for an engine that loads. Nothing can be submitted; the rest it knows without weights.

    Attributes:
        max_context: tokens; the engine may have to do with fewer, if its KV does not fit into memory.
    """

    state: State = "loading"

    def __init__(
        self, tokenizer: Tokenizer, model_name: str, max_context: int, progress: Callable[[], str], vision: ChatVision | None = None
    ) -> None:
        """`progress` is asked for a sentence on how far the load is."""
        self.tokenizer = tokenizer
        self.codec = ChatCodec(tokenizer, vision=vision)
        self.model_name = model_name
        self.max_context = max_context
        self.metrics = Metrics(CollectorRegistry(), model=model_name)
        self._progress = progress

    @classmethod
    def of(cls, config: Config, progress: Callable[[], str]) -> LoadingEngine:
        """Over the model that is to be loaded, which takes a moment. Raises ConfigError or CheckpointError like the load itself."""
        found = preview(config.model.path)
        context = min(config.engine.max_context or found.longest, found.longest)
        return cls(found.tokenizer, config.model.name or found.name, context, progress, found.vision)

    @property
    def reason(self) -> str:
        return self._progress()

    def last_progress_age(self) -> float:
        return 0.0

    def submit(self, request: Request) -> NoReturn:
        raise UnavailableError(self.reason, code=self.state)


class Gate:
    """ASGI application that answers by itself until `open` gives it the real one.

    `progress` is asked for a sentence on how far the load is.
    """

    def __init__(self, progress: Callable[[], str], options: ServerOptions) -> None:
        self._progress = progress
        self._options = options
        self._app: ASGIApp | None = None

    @property
    def opened(self) -> bool:
        return self._app is not None

    def open(self, app: ASGIApp) -> None:
        """Hand every following request to `app`; again, to another one."""
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
        exchange.family = family_of(exchange.path)
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
