"""Content blocks of the Messages protocol as parts of chat messages.

Blocks of unknown types become a line of text that says so, and a response header names them: agents send their whole history with every
request, and a refusal of one old block would end the session. A document that cannot be read is refused, like an image.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from typing import Any

from forebay.server.field_errors import bad, object_at, string_at, wrong_type

_SEAL = "thought1."
_NUMBER = re.compile(r"\.\d+")

# What is read of a block, by its type.
_READ = {
    "text": frozenset({"type", "text"}), "image": frozenset({"type", "source"}),
    "document": frozenset({"type", "source", "title", "context"}), "search_result": frozenset({"type", "title", "source", "content"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error"}), "tool_use": frozenset({"type", "id", "name", "input"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
}  # fmt: skip

Block = Mapping[str, Any]
Part = dict[str, Any]


class LeftOut:
    """Names of what changes nothing in blocks and tools. A history repeats itself, so each is told once: `messages[].content[].NAME`.

    Attributes:
        names: in the order in which they were met.
    """

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def add(self, name: str, where: str) -> None:
        """A field, or a block by its type, at the path `where`."""
        self.names[f"{_NUMBER.sub('[]', where)}.{name}"] = None

    def unread(self, item: Block, read: frozenset[str], where: str) -> None:
        """The fields of an object beside those that are read. Null and empty values say nothing."""
        if not item.keys() <= read:
            for name, value in item.items():
                if name not in read and value not in (None, "", [], {}):
                    self.add(name, where)


def text_at(parent: Block, name: str, where: str) -> str:
    """The string under `name`. Raises RequestError: missing, another type."""
    return string_at(parent.get(name), f"{where}.{name}")


def object_in(parent: Block, name: str, where: str) -> Block:
    """The object under `name`. Raises RequestError: missing, another type."""
    return object_at(parent.get(name), f"{where}.{name}" if where else name)


def each_block(value: Any, where: str, left_out: LeftOut) -> Iterator[tuple[Block, str, str]]:
    """(block, its type, its path) of a content array. Raises RequestError: not an array, an entry without a type."""
    if not isinstance(value, list):
        raise wrong_type(where, "a string or an array of content blocks", value)
    for i, block in enumerate(value):
        path = f"{where}.{i}"
        if not isinstance(block, Mapping):
            raise wrong_type(path, "an object", block)
        kind = text_at(block, "type", path)
        left_out.unread(block, _READ.get(kind, frozenset(block)), path)
        yield block, kind, path


def part_of(block: Block, kind: str, where: str, left_out: LeftOut) -> Part:
    """What the model reads of one block of a user message, a tool result or the system prompt."""
    if kind == "text":
        return text_part(text_at(block, "text", where))
    if kind == "image":
        return _image(object_in(block, "source", where), f"{where}.source")
    if kind == "document":
        return text_part(_document(block, where, left_out))
    if kind == "search_result":
        texts = _texts(block.get("content") or [], f"{where}.content", left_out)
        heads = [block[name] for name in ("title", "source") if isinstance(block.get(name), str)]
        return text_part("\n".join([*heads, "\n\n".join(texts)]))
    left_out.add(kind, where)
    return text_part(f"[Unsupported content: {kind[:64]}]")


def result_content(block: Block, where: str, left_out: LeftOut) -> str | list[Part]:
    """Content of a tool result. The protocol has a flag for failures and the prompt has none: an empty failure would look like success."""
    content = block.get("content")
    if content is None:
        content = ""
    parts = content if isinstance(content, str) else _parts(content, f"{where}.content", left_out)
    filled = bool(parts) if isinstance(parts, str) else any(part != text_part("") for part in parts)
    if block.get("is_error") is True and not filled:
        return "Error: "
    return parts


def seal(thinking: str) -> str:
    """A signature that brings back a thought which the client does not see: without it the next prompt would not extend this one."""
    return _SEAL + base64.urlsafe_b64encode(thinking.encode()).decode()


def unsealed(signature: Any) -> str:
    """The thought in a signature; none of one that another server wrote."""
    if not isinstance(signature, str) or not signature.startswith(_SEAL):
        return ""
    try:
        return base64.urlsafe_b64decode(signature.removeprefix(_SEAL)).decode()
    except ValueError:
        return ""  # cut off or changed on its way: no reason to end the session


def thinking_of(block: Block, where: str) -> str:
    """The thought of a thinking block, or what its signature holds if it has been left out."""
    text = text_at(block, "thinking", where)
    return text or unsealed(block.get("signature"))


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def _parts(content: Any, where: str, left_out: LeftOut) -> list[Part]:
    return [part_of(block, kind, path, left_out) for block, kind, path in each_block(content, where, left_out)]


def _texts(content: Any, where: str, left_out: LeftOut) -> list[str]:
    """The texts in what becomes one text; its images are left out."""
    parts = _parts(content, where, left_out)
    for k, part in enumerate(parts):
        if part["type"] != "text":
            left_out.add("image", f"{where}.{k}")
    return [part["text"] for part in parts if part["type"] == "text"]


def _image(source: Block, where: str) -> Part:
    kind = text_at(source, "type", where)
    if kind == "base64":
        url = f"data:{text_at(source, 'media_type', where)};base64,{text_at(source, 'data', where)}"
    elif kind == "url":
        url = text_at(source, "url", where)
    else:
        path = f"{where}.type"
        text = f"Unsupported value: '{path}' must be base64 or url, got '{kind[:64]}'; this server stores no files."
        raise bad(path, text, "unsupported_value")
    return {"type": "image_url", "image_url": {"url": url}}


def _document(block: Block, where: str, left_out: LeftOut) -> str:
    source = object_in(block, "source", where)
    kind = text_at(source, "type", f"{where}.source")
    if kind == "text":
        text = text_at(source, "data", f"{where}.source")
    elif kind == "content":
        content = source.get("content")
        texts = [content] if isinstance(content, str) else _texts(content, f"{where}.source.content", left_out)
        text = "\n\n".join(texts)
    else:
        path = f"{where}.source.type"
        media = source.get("media_type")
        given = f"'{kind[:64]}' of '{media[:64]}'" if isinstance(media, str) else f"'{kind[:64]}'"
        raise bad(path, f"Unsupported value: '{path}' must be text or content, got {given}; only text is read.", "unsupported_value")
    return "\n".join([*(block[name] for name in ("title", "context") if isinstance(block.get(name), str)), text])
