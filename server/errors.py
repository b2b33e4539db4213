"""How errors leave the server: one OpenAI-shaped envelope, a status and, where a retry helps, `Retry-After`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

import orjson

from forebay.engine.types import QueueFullError, UnavailableError
from forebay.model.errors import ForebayError, RequestError

State = Literal["loading", "ready", "draining", "dead"]
Family = Literal["openai", "anthropic"]  # whose clients call a route: the shape of its errors
Headers = list[tuple[bytes, bytes]]

MAX_RETRY_AFTER_S = 30
MAX_MESSAGE = 2000  # characters: a key of the client may be megabytes long, and its error names it
MAX_PATH = 200
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_PATHS = ("/anthropic", "/v1/messages", "/messages")
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    529: "overloaded_error",
}  # fmt: skip
_INDEX = re.compile(r"\.(\d+)(?=[.\[]|$)")

# State of the engine -> error code and seconds after which a retry makes sense.
_UNAVAILABLE: dict[str, tuple[str, int]] = {"loading": ("model_loading", 5), "draining": ("draining", 1), "dead": ("engine_unavailable", 2)}


class HttpError(ForebayError):
    """A refusal that the server itself decides on, with its status and extra headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Headers | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.headers: Headers = headers or []
        self.retry_after = retry_after


class ClientGoneError(Exception):
    """The client closed the connection before it had its whole answer."""


@dataclass(frozen=True)
class Failure:
    """An error ready to be sent."""

    status: int
    message: str
    type: str
    param: str | None
    code: str
    headers: Headers = field(default_factory=list)
    expected: bool = True  # False: a fault of ours, worth a traceback in the log

    @property
    def error(self) -> dict[str, str | None]:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def status_for(self, family: Family) -> int:
        """Anthropic's clients know a server that is full, loading or going away as 529."""
        return 529 if family == "anthropic" and self.status == 503 and self.code != "engine_unavailable" else self.status

    def body(self, family: Family = "openai", request_id: str = "") -> bytes:
        """The envelope of spec/http-api.md §2.1."""
        if family == "openai":
            return orjson.dumps({"error": self.error})
        kind = _ANTHROPIC_TYPES.get(self.status_for(family), "api_error" if self.status >= 500 else "invalid_request_error")
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id})

    def event(self) -> bytes:
        """The error as the last data event of a chat or completions stream that has already started (spec/http-api.md §2.4)."""
        return b"data: " + self.body() + b"\n\ndata: [DONE]\n\n"


def unavailable(state: str, reason: str) -> HttpError:
    """503 for an engine that is loading, draining or dead; `reason` tells the progress or the cause."""
    code, retry_after = _UNAVAILABLE.get(state, _UNAVAILABLE["dead"])
    text = {"loading": "The model is still loading", "draining": "The server is shutting down"}.get(state, "The engine has stopped")
    if reason.lower() not in text.lower():
        text = f"{text}: {reason}"
    headers = [(b"connection", b"close")] if state == "draining" else []
    return HttpError(503, text, code=code, headers=headers, retry_after=retry_after)


def describe(error: BaseException, *, request_id: str, state: str) -> Failure:
    """Turn any exception into what the client may know about it.

    Faults of ours (status 500) are told generically with the request id; everything else keeps its own sentence.
    """
    if isinstance(error, UnavailableError) and (cause := error.code if error.code in _UNAVAILABLE else state) in _UNAVAILABLE:
        error = unavailable(cause or "", error.message)  # its own cause first: the engine may have gone on from it to the next state
    if not isinstance(error, ForebayError) or error.status == 500:
        message = f"The server failed while it ran this request; its log has the cause under request id {request_id}."
        return Failure(500, message, "server_error", None, "internal_error", expected=False)
    headers: Headers = []
    retry_after: float | None = None
    if isinstance(error, HttpError):
        headers, retry_after = list(error.headers), error.retry_after
    elif isinstance(error, QueueFullError):
        retry_after = error.retry_after
    elif error.status == 503:
        retry_after = 2
    if retry_after is not None:
        headers.append((b"retry-after", b"%d" % min(max(math.ceil(retry_after), 1), MAX_RETRY_AFTER_S)))
    code = error.code or ("invalid_value" if isinstance(error, RequestError) else error.kind)
    message, path = error.message, field_path(error.param)
    if isinstance(error, RequestError) and error.param and path and error.lengths is None:  # that sentence clients know by heart
        message = message.replace(error.param, path)
        if path not in message:
            message = f"Invalid '{path}': {message}"
    path = None if path is None else _shortened(path, MAX_PATH)
    return Failure(error.status, _shortened(message, MAX_MESSAGE), _openai_type(error.status), path, code, headers)


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-limit // 2 :]}"


def field_path(param: str | None) -> str | None:
    """`messages.3.content` -> `messages[3].content`, the spelling OpenAI clients know."""
    return None if param is None else _INDEX.sub(r"[\1]", param)


def _openai_type(status: int) -> str:
    return _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def family_of(path: str) -> Family:
    """Whose clients call a path, served or not."""
    path = path.replace("/v1/v1/", "/v1/", 1) if path.startswith("/v1/v1/") else path
    return "anthropic" if any(path == known or path.startswith(f"{known}/") for known in _ANTHROPIC_PATHS) else "openai"
