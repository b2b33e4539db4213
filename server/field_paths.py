"""Where the fields of a translated body stand in the body that the client sent."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from forebay.model.errors import ForebayError
from forebay.server.errors import field_path

_STEPS = re.compile(r"[.\[]")


@dataclass
class FieldPaths:
    """Paths of a chat-completions body, such as `messages[3].content[0]`, and what the client calls the same place.

    Everything at or below a path, except what has a place of its own, is at or below the client's path. `messages.3` means `messages[3]`.
    """

    client: dict[str, str] = field(default_factory=dict)

    def put(self, chat: str, client: str) -> None:
        """`chat` has brackets, `client` may be spelled either way."""
        self.client[chat] = client

    def find(self, chat: str) -> str:
        """The client's path of a path in the chat body; one that no other field became stays as it is."""
        path = field_path(chat) or ""
        for end in (len(path), *(found.start() for found in reversed(list(_STEPS.finditer(path))))):
            if (known := self.client.get(path[:end])) is not None:
                return (field_path(known) or "") + path[end:]
        return path

    def translate(self, error: ForebayError) -> None:
        """Let an error about the chat body speak of the client's fields."""
        if not error.param:
            return
        path = self.find(error.param)
        if error.lengths is None:  # otherwise it is the sentence that clients know by heart
            for old in {error.param, field_path(error.param) or ""}:
                error.message = re.sub(rf"(?<![\w.]){re.escape(old)}(?!\w)", lambda _: path, error.message)
        error.param = path
