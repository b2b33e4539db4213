"""Sampled ids of a chat turn become reasoning, content and tool calls, token by token.

A turn is written as

    reasoning </think> content \\n\\n <｜DSML｜ calls> (<｜DSML｜ invoke name="f"> parameters </｜DSML｜ invoke>)* </｜DSML｜ calls>

where `</think>` and `｜DSML｜` are control ids and all else is text. Only the ids act as markers: the same characters spelled out by
ordinary tokens stay text. What may still turn out to be markup (a last `<` or `</`, newlines before a call) is held back, nothing else is,
so the deltas do not depend on how the text was cut into tokens. Malformed turns lose no text outside of tags:

- a call inside reasoning ends the reasoning; an `invoke` without `calls` around it is a call; tag names of earlier versions are known
- an element that is still open when the next begins or its parent ends is closed; one that is open when the output ends is left open,
  so that its arguments are not valid JSON and nobody runs half a call
- a tag with an unknown name is text; an unfinished tag at the end of the output is dropped
- of two parameters of one name the first counts; an unquoted value that is not JSON becomes a JSON string
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from forebay.model.json_fence import FenceRemover
from forebay.model.tokenizer import DSML, THINK_END, THINK_START, Tokenizer

Channel = Literal["reasoning", "content", "tool_calls"]
State = Literal["reasoning", "content", "calls", "invoke", "param", "done"]

BLOCK_NAMES = frozenset({"calls", "tool_calls", "toolcalls", "tool", "function_calls"})
TAG_NAMES = BLOCK_NAMES | {"invoke", "parameter"}
WRAPPER_NAMES = frozenset({"arguments", "input"})
MAX_TAG_CHARS = 4096

TAG_NAME = re.compile(r" ?([a-z_]*)")
TAG_REST = re.compile(r'[\s\w=/-]*(?:"[^"]*"[\s\w=/-]*)*')
ATTRIBUTE = re.compile(r'(\w+)\s*=\s*"([^"]*)"')


@dataclass(frozen=True)
class Delta:
    """A piece of output. On `tool_calls`, `text` is a fragment of the arguments of call `index`; its first delta has the id and name."""

    channel: Channel
    text: str = ""
    index: int = 0
    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class ParseOptions:
    """How to read the turn that follows a prompt.

    Attributes:
        start: where the prompt left off; `calls` is inside a block of calls that the prompt opened.
        continues: the prompt ended inside a message, so leading newlines belong to it.
        tools: whether markup of calls is read as calls; if not it is text.
        properties: declared property names of each tool, used to unwrap a needless `arguments` parameter.
        max_calls: calls after these are dropped; None is no limit.
        json: the content is to be JSON, so a Markdown fence around it is removed.
    """

    start: Literal["reasoning", "content", "calls"] = "content"
    continues: bool = False
    tools: bool = False
    properties: Mapping[str, frozenset[str]] = field(default_factory=dict)
    max_calls: int | None = None
    json: bool = False


@dataclass
class _Tag:
    """A tag being read: `<` or `</`, the marker, then `text` so far."""

    closing: bool
    text: str = ""

    def literal(self) -> str:
        return ("</" if self.closing else "<") + DSML + self.text


class OutputParser:
    """The parser of one choice. Feed every sampled id except those that end the turn, then call `finish` once."""

    def __init__(self, tokenizer: Tokenizer, options: ParseOptions) -> None:
        self._options = options
        self._detokenizer = tokenizer.detokenizer()
        self._markers = {tokenizer.think_end_id: THINK_END, tokenizer.think_start_id: THINK_START, tokenizer.dsml_id: DSML}
        self._state: State = options.start
        self._trim = not options.continues  # newlines at the start of a channel are dropped
        self._held = ""  # text that may yet turn out to be the space or the `<` in front of a tag
        self._tag: _Tag | None = None
        self._tag_tokens = 0
        self._fence = FenceRemover() if options.json else None
        self._deltas: list[Delta] = []
        self.calls = 0
        self.reasoning_tokens = 0
        # The open call: names of its parameters, its text outside of parameters, a value kept until the call ends.
        self._tool = ""
        self._keys: set[str] = set()
        self._body: list[str] = []
        self._wrapped: tuple[str, str, bool] | None = None
        # The open parameter.
        self._key = ""
        self._quoted = False
        self._streams = False
        self._value: list[str] = []

    @property
    def channel(self) -> Channel:
        """Where the text of the next token goes."""
        return self._state if self._state in ("reasoning", "content") else "tool_calls"

    def push(self, token_id: int) -> list[Delta]:
        """Read one token; gives what became certain by it."""
        deltas = self._deltas = []
        reasoned = self._state == "reasoning"
        marker = self._markers.get(token_id)
        if marker is None:
            if text := self._detokenizer.push(token_id):
                self._read(text)
        else:
            if tail := self._detokenizer.flush():
                self._read(tail)
            self._mark(marker)
        if reasoned:
            self._count()
        return deltas

    def finish(self, reason: str) -> list[Delta]:
        """End the turn for `reason`; gives what was held back. A call that is still open stays without its closing brace."""
        deltas = self._deltas = []
        if tail := self._detokenizer.flush():
            self._read(tail)
        held, self._held = ("" if self._tag else self._held), ""
        if self._state in ("reasoning", "content"):
            self._emit_prose(held)
            self._end_content()
        elif self._state == "param":
            if self._streams:
                self._emit_arguments(_inside_string(held))
            else:
                self._emit_wrapped()
                self._emit_key()
        elif self._state == "invoke":
            self._emit_wrapped()
            if not self._keys:
                self._emit_arguments("{")
        self._tag, self._state = None, "done"
        return deltas

    def finish_reason(self, reason: str) -> str:
        """The word for the client: a turn that stopped by itself after calling tools is `tool_calls`."""
        return "tool_calls" if reason == "stop" and self.calls else reason

    # ---- events

    def _count(self) -> None:
        """Attribute a token read in reasoning: `</think>` and tokens of a tag that became a call are not reasoning."""
        if self._tag is not None:
            self._tag_tokens += 1
            return
        if self._state == "reasoning":
            self.reasoning_tokens += self._tag_tokens + 1
        self._tag_tokens = 0

    def _mark(self, marker: str) -> None:
        if self._tag is not None:  # an unfinished tag ends here; only its last characters can open another one
            opener = self._tag.text[_text_end(self._tag.text):]
            self._tag, self._held = None, opener
        if marker == DSML:
            self._open_tag()
        elif self._state == "reasoning":
            if marker == THINK_END:
                self._emit_prose(self._held if self._held.endswith(("<", "/")) else "")
                self._held, self._state, self._trim = "", "content", True
        elif self._state == "param" or (self._state == "content" and marker == THINK_START):
            self._read(marker)

    def _open_tag(self) -> None:
        """The marker: a tag if `<` or `</` is in front of it (in prose only `<`, and only if calls are read), otherwise text."""
        prose = self._state in ("reasoning", "content")
        closing = self._held.endswith("</")
        if self._state == "done" or not (closing or self._held.endswith("<")) or (prose and (closing or not self._options.tools)):
            self._read(DSML)
            return
        self._held = self._held[: -2 if closing else -1]
        self._tag = _Tag(closing)

    def _read(self, text: str) -> None:
        while text:
            if self._tag is not None:
                text = self._read_tag(self._tag, text)
            else:
                self._read_text(text)
                return

    def _read_text(self, text: str) -> None:
        """Text outside of tags."""
        if self._state == "done":
            return
        prose = self._state in ("reasoning", "content")
        if prose and self._trim:
            text = text.lstrip("\n")
            if not text:
                return
            self._trim = False
        text = self._held + text
        end = len(text) if prose and not self._options.tools else _text_end(text)
        if prose and (self._options.tools or self._state == "reasoning"):
            end = len(text[:end].rstrip("\n"))
        text, self._held = text[:end], text[end:]
        if prose:
            self._emit_prose(text)
        elif self._state == "param":
            if self._streams:
                self._emit_arguments(_inside_string(text))
            else:
                self._value.append(text)
        elif self._state == "invoke":
            self._body.append(text)

    def _read_tag(self, tag: _Tag, text: str) -> str:
        """Add `text` to the open tag; gives the rest once the tag is complete."""
        tag.text += text
        name = TAG_NAME.match(tag.text)
        assert name is not None  # the pattern matches the empty string
        if name.end() == len(tag.text):
            if any(known.startswith(name[1]) for known in TAG_NAMES):
                return ""
        elif name[1] in TAG_NAMES and tag.text[name.end()] in " \t\r\n/>":
            rest = TAG_REST.match(tag.text, name.end())
            assert rest is not None
            end = rest.end()
            if end == len(tag.text) or tag.text[end] == '"':
                if len(tag.text) < MAX_TAG_CHARS:
                    return ""
            elif tag.text[end] == ">" and end < MAX_TAG_CHARS:
                attributes = dict(ATTRIBUTE.findall(rest[0]))
                if self._element(tag.closing, name[1], attributes, rest[0].rstrip().endswith("/")):
                    return tag.text[end + 1 :]
        self._tag = None
        self._read_text(tag.literal())
        return ""

    def _element(self, closing: bool, name: str, attributes: dict[str, str], empty: bool) -> bool:
        """Act on a complete tag. False if it means nothing here, so that it is text."""
        block = name in BLOCK_NAMES
        prose = self._state in ("reasoning", "content")
        nameless = not closing and not block and "name" not in attributes
        if nameless or (prose and name == "parameter") or (self._state == "param" and block and not closing):
            return False
        self._tag, self._held = None, ""
        if prose:
            self._end_content()
            self._state = "calls"
        elif self._state == "param":
            self._end_parameter()
        if not closing and name == "parameter":
            if self._state == "invoke":
                self._start_parameter(attributes)
                if empty:
                    self._end_parameter()
        elif name != "parameter":
            if self._state == "invoke" and (closing or not block):
                self._end_call()
            if closing and block:
                self._state = "done"
            elif not closing and not block:
                self._start_call(attributes["name"])
                if empty and self._state == "invoke":
                    self._end_call()
        return True

    # ---- calls

    def _start_call(self, name: str) -> None:
        if self._options.max_calls is not None and self.calls >= self._options.max_calls:
            self._state = "done"
            return
        index = self.calls
        self.calls += 1
        self._tool, self._keys, self._body, self._wrapped = name, set(), [], None
        self._state = "invoke"
        self._deltas.append(Delta("tool_calls", "", index, f"call_{index:02d}_{secrets.token_hex(12)}", name))

    def _end_call(self) -> None:
        self._state = "calls"
        if self._wrapped is not None:
            declared = self._options.properties[self._tool]
            inner = self._wrapped[1].strip()
            value = _parsed(inner)
            if isinstance(value, dict) and value and declared.issuperset(value):
                self._emit_arguments(inner)
                self._wrapped = None
                return
            self._emit_wrapped()
        if self._keys:
            self._emit_arguments("}")
        else:
            body = "".join(self._body).strip()
            self._emit_arguments(body if isinstance(_parsed(body), dict) else "{}")

    def _start_parameter(self, attributes: dict[str, str]) -> None:
        self._emit_wrapped()
        self._state = "param"
        self._key, self._value = attributes["name"], []
        self._quoted = attributes.get("string") == "true"
        self._streams = self._quoted and self._key not in self._keys and not self._may_wrap()
        if self._streams:
            self._emit_key('"')

    def _end_parameter(self) -> None:
        self._state = "invoke"
        value = "".join(self._value)
        if self._streams:
            self._emit_arguments('"')
        elif self._may_wrap():
            self._wrapped = (self._key, value, self._quoted)
        elif self._key not in self._keys:
            self._emit_key(_json_value(value, self._quoted))
        self._value = []

    def _may_wrap(self) -> bool:
        """Whether the open parameter may turn out to hold all arguments of the call in one object."""
        declared = self._options.properties.get(self._tool, frozenset())
        return bool(declared) and not self._keys and self._key in WRAPPER_NAMES and self._key not in declared

    # ---- output

    def _emit_prose(self, text: str) -> None:
        if self._state == "reasoning":
            channel: Channel = "reasoning"
        else:
            channel = "content"
            if self._fence is not None:
                text = self._fence.feed(text)
        if text:
            self._emit(channel, text, 0)

    def _end_content(self) -> None:
        if self._fence is not None and (text := self._fence.flush()):
            self._emit("content", text, 0)

    def _emit_key(self, value: str = "") -> None:
        """The name of the open parameter and the start or whole of its value; nothing for a name already used."""
        if self._key not in self._keys:
            start = ", " if self._keys else "{"
            self._keys.add(self._key)
            self._emit_arguments(f"{start}{json.dumps(self._key, ensure_ascii=False)}: {value}")

    def _emit_wrapped(self) -> None:
        """Give up on unwrapping: emit the kept parameter like any other."""
        if self._wrapped is not None:
            key, self._key = self._key, self._wrapped[0]
            self._emit_key(_json_value(self._wrapped[1], self._wrapped[2]))
            self._key, self._wrapped = key, None

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._emit("tool_calls", text, self.calls - 1)

    def _emit(self, channel: Channel, text: str, index: int) -> None:
        if self._deltas:
            last = self._deltas[-1]
            if last.channel == channel and last.index == index and last.name is None:
                self._deltas[-1] = Delta(channel, last.text + text, index)
                return
        self._deltas.append(Delta(channel, text, index))


def _text_end(text: str) -> int:
    """Where a last `<` or `</`, which may open a tag, begins."""
    return len(text) - (2 if text.endswith("</") else 1 if text.endswith("<") else 0)


def _inside_string(text: str) -> str:
    """`text` as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _parsed(text: str) -> object:
    """The JSON value of `text`, or a ValueError object if it has none."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return ValueError(str(error))


def _json_value(text: str, quoted: bool) -> str:
    """JSON of a parameter value: a string if it is quoted or not JSON, otherwise as written without the space around it."""
    if not quoted and not isinstance(_parsed(text.strip()), ValueError):
        return text.strip()
    return json.dumps(text, ensure_ascii=False)
