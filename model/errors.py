"""Errors shared by every room: one base class with an HTTP status and a kind."""

from __future__ import annotations


class ForebayError(Exception):
    """Base of every error Forebay raises on purpose.

    Attributes:
        status: HTTP status a server answers with when a request caused it.
        kind: short machine-readable word (the OpenAI error `type`).
        param: name of the offending request field or setting, if there is one.
        code: OpenAI error `code`, if there is one.
        lengths: of a prompt that is too long, its tokens (at least) and the limit, for protocols with a sentence of their own.
    """

    status = 500
    kind = "internal_error"
    lengths: tuple[int, int] | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class RequestError(ForebayError):
    """The request itself is wrong; nothing of it was run."""

    status = 400
    kind = "invalid_request_error"


class ConfigError(ForebayError):
    """A setting or model configuration cannot be used; the server does not start."""

    kind = "config_error"


class CheckpointError(ForebayError):
    """The checkpoint on disk is incomplete, damaged or of another architecture."""

    kind = "checkpoint_error"
