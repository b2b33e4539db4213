"""Content blocks of the Messages protocol as parts of chat messages.

What this server cannot show the model becomes a line of text that says so: agents send their whole history with every request, and a
refusal of one old block would end the session.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any

from forebay.server.field_errors import bad, object_at, string_at, wrong_type

_SEAL = "thought1."

Block = Mapping[str, Any]
Part = dict[str, Any]


def text_at(parent: Block, name: str, where: str) -> str:
    """The string under `name`. Raises RequestError: missing, another type."""
    return string_at(parent.get(name), f"{where}.{name}")


def object_in(parent: Block, name: str, where: str) -> Block:
    """The object under `name`. Raises RequestError: missing, another type."""
    return object_at(parent.get(name), f"{where}.{name}" if where else name)


def each_block(value: Any, where: str) -> Iterator[tuple[Block, str, str]]:
    """(block, its type, its path) of a content array. Raises RequestError: not an array, an entry without a type."""
    if not isinstance(value, list):
        raise wrong_type(where, "a string or an array of content blocks", value)
    for i, block in enumerate(value):
        path = f"{where}.{i}"
        if not isinstance(block, Mapping):
            raise wrong_type(path, "an object", block)
        yield block, text_at(block, "type", path), path


def part_of(block: Block, kind: str, where: str) -> Part:
    """What the model reads of one block of a user message, a tool result or the system prompt."""
    if kind == "text":
        return text_part(text_at(block, "text", where))
    if kind == "image":
        return _image(object_in(block, "source", where), f"{where}.source")
    if kind == "document":
        return text_part(_document(block, where))
    if kind == "search_result":
        texts = [part["text"] for part in _parts(block.get("content") or [], f"{where}.content") if part["type"] == "text"]
        heads = [block[name] for name in ("title", "source") if isinstance(block.get(name), str)]
        return text_part("\n".join([*heads, "\n\n".join(texts)]))
    return text_part(f"[Unsupported content: {kind[:64]}]")


def result_content(block: Block, where: str) -> str | list[Part]:
    """Content of a tool result. The protocol has a flag for failures and the prompt has none: an empty failure would look like success."""
    content = block.get("content")
    if content is None:
        content = ""
    parts = content if isinstance(content, str) else _parts(content, f"{where}.content")
    filled = bool(parts) if isinstance(parts, str) else any(part != text_part("") for part in parts)
    if block.get("is_error") is True and not filled:
        return "Error: "
    return parts


def seal(thinking: str) -> str:
    """A signature that brings back a thought which the client does not see: without it the next prompt would not extend this one."""
    return _SEAL + base64.urlsafe_b64encode(thinking.encode()).decode()


def thinking_of(block: Block, where: str) -> str:
    """The thought of a thinking block, or what its signature holds if it has been left out."""
    text = text_at(block, "thinking", where)
    signature = block.get("signature")
    if text or not isinstance(signature, str) or not signature.startswith(_SEAL):
        return text
    try:
        return base64.urlsafe_b64decode(signature.removeprefix(_SEAL)).decode()
    except ValueError:
        return ""  # cut off or changed on its way: no reason to end the session


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def _parts(content: Any, where: str) -> list[Part]:
    return [part_of(block, kind, path) for block, kind, path in each_block(content, where)]


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


def _document(block: Block, where: str) -> str:
    source = object_in(block, "source", where)
    kind = text_at(source, "type", f"{where}.source")
    if kind == "text":
        text = text_at(source, "data", f"{where}.source")
    elif kind == "content":
        content = source.get("content")
        parts = [text_part(content)] if isinstance(content, str) else _parts(content, f"{where}.source.content")
        text = "\n\n".join(part["text"] for part in parts if part["type"] == "text")
    else:
        media = source.get("media_type")
        return f"[Unsupported document type: {media[:64] if isinstance(media, str) else kind[:64]}]"
    return "\n".join([*(block[name] for name in ("title", "context") if isinstance(block.get(name), str)), text])
