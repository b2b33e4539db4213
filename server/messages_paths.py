"""Where the fields of a translated body stand in the body that the client sent."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from forebay.model.errors import RequestError

_INDEX = re.compile(r"\[(\d+)\]")


@dataclass
class FieldPaths:
    """Paths of a chat-completions body, and what the client calls the same place. Paths are dotted, such as `messages.3.content.0`."""

    client: dict[str, str] = field(default_factory=dict)

    def put(self, chat: str, client: str) -> None:
        """Everything at or below `chat`, except what has a place of its own, is at or below `client`."""
        self.client[chat] = client

    def find(self, chat: str) -> str:
        """The client's path of a path in the chat body (`messages[3]` and `messages.3` mean the same)."""
        path = _INDEX.sub(r".\1", chat)
        head, rest = path, ""
        while head not in self.client:
            head, dot, last = head.rpartition(".")
            if not dot:
                return path
            rest = f".{last}{rest}"
        return self.client[head] + rest

    def renamed(self, error: RequestError) -> RequestError:
        """The same finding, told about the client's own field."""
        if error.param is None:
            return error
        place = self.find(error.param)
        return RequestError(error.message.replace(error.param, place), param=place, code=error.code)
