"""DeepSeek-V4.1 chat: an OpenAI chat request becomes prompt ids, and sampled ids become reasoning, content and tool calls.

The prompt text comes from the vendor's library (deepseek-recipe), which also says which of its characters are control tokens. Added here is
what it has no switch for: efforts other than the named ones, keeping the reasoning of earlier turns without tools, and tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import deepseek_recipe as recipe

from forebay.model.chat_parse import Channel, Delta, OutputParser, ParseOptions
from forebay.model.chat_request import DEFAULT_EFFORT, ChatRequest, parse_chat_request
from forebay.model.errors import ForebayError, RequestError
from forebay.model.tokenizer import ASSISTANT, IMAGE, THINK_END, THINK_START, Tokenizer

__all__ = ["ENCODING_VERSION", "Channel", "ChatCodec", "Delta", "EncodedPrompt", "OutputParser", "ParseOptions"]

ENCODING_VERSION = f"chat1-recipe{version('deepseek-recipe')}"  # of the prompt encoding; the first number counts our own changes to it
EFFORT_LINE = "Reasoning Effort: "
GROUNDING = frozenset(f"<｜{slash}{tag}｜>" for tag in ("ref", "box", "point", "polygon") for slash in ("", "/"))


@dataclass(frozen=True)
class EncodedPrompt:
    """A rendered and tokenised chat request.

    Attributes:
        token_ids: the prompt, beginning with the begin-of-sentence id.
        text: the same as text; look-alikes of control tokens cannot be told from control tokens here.
        thinking: whether the answer begins with reasoning. `effort` is then 1..100, otherwise None.
        initial_channel: where the first sampled token goes.
        parse: how to read the answer.
        continues: the prompt ends inside an assistant message that the answer continues.
    """

    token_ids: list[int]
    text: str
    thinking: bool
    effort: int | None
    initial_channel: Channel
    parse: ParseOptions
    continues: bool


@dataclass(frozen=True)
class _Segment:
    """A piece of a prompt: the spelling of one control token, or plain text."""

    text: str
    marker: bool


class ChatCodec:
    """Encodes chat requests for one tokenizer. Holds no state of a request; every method may be called from several threads at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises CheckpointError naming every token that chat needs and the vocabulary lacks."""
        tokenizer.require_chat_tokens()
        self._tokenizer = tokenizer
        self._encoding = recipe.DeepseekV41Encoding().with_special_tokens(recipe.SpecialTokens(image=IMAGE))

    def encode(
        self,
        body: Mapping[str, Any],
        *,
        default_effort: int | str = "high",
        thinking_default: bool = True,
        max_tokens: int | None = None,
    ) -> EncodedPrompt:
        """Render and tokenise a chat-completions request; takes CPU time in proportion to the text, most of it without the GIL.

        Args:
            body: the JSON object of the request. Read are messages, tools, tool_choice, parallel_tool_calls, response_format,
                thinking, enable_thinking, reasoning_effort, reasoning, drop_thinking, chat_template_kwargs, continue_final_message and
                the older names of these.
            default_effort: effort of requests that name none; "none" answers them without thinking.
            thinking_default: whether requests that do not say think.
            max_tokens: refuse a prompt that must be longer, as its bytes tell, before the work of tokenising it. Shorter ones may pass.

        Raises RequestError naming the field.
        """
        request = parse_chat_request(body, default_effort, thinking_default)
        segments = self._render(request)
        parse = ParseOptions(
            start=request.start,
            continues=request.continues,
            tools=request.tools,
            properties=request.properties,
            max_calls=request.max_calls,
            json=request.json,
        )
        return EncodedPrompt(
            token_ids=self._token_ids(segments, max_tokens),
            text="".join(segment.text for segment in segments),
            thinking=request.thinking,
            effort=request.effort,
            initial_channel="tool_calls" if request.start == "calls" else request.start,
            parse=parse,
            continues=request.continues,
        )

    def parser(self, prompt: EncodedPrompt) -> OutputParser:
        """A parser for one answer to `prompt`."""
        return OutputParser(self._tokenizer, prompt.parse)

    def _render(self, request: ChatRequest) -> list[_Segment]:
        try:
            rendered = self._encoding.render_conversation(request.conversation)
        except (ValueError, RuntimeError) as error:
            raise RequestError(f"the conversation cannot be rendered: {error}", param="messages") from error
        text = rendered.prompt
        segments: list[_Segment] = []
        end = 0
        for start, stop in rendered.special_ranges:
            if text[start:stop] in GROUNDING and self._tokenizer.special_id(text[start:stop]) is None:
                continue  # in the answers of earlier turns the library marks these too; small vocabularies write them as text
            if start > end:
                segments.append(_Segment(request.exact.restore(text[end:start]), False))
            segments.append(_Segment(text[start:stop], True))
            end = stop
        if end < len(text):
            segments.append(_Segment(request.exact.restore(text[end:]), False))
        if request.effort not in (None, DEFAULT_EFFORT):
            _write_effort(segments, request.effort)
        if request.earlier_reasoning is not None:
            segments = _write_reasoning(segments, request.earlier_reasoning)
        if request.task is not None:
            # The action task follows the usual header, the others stand in its place: `<｜Assistant｜>` and the think marker.
            segments = [*(segments if request.task == "action" else segments[:-2]), _Segment(f"<｜{request.task}｜>", True)]
        return segments

    def _token_ids(self, segments: list[_Segment], max_tokens: int | None) -> list[int]:
        if max_tokens is not None:
            least = sum(len(s.text.encode()) for s in segments if not s.marker) // self._tokenizer.longest_token
            if least > max_tokens:
                raise RequestError(
                    f"This model's maximum context length is {max_tokens} tokens. However, your messages are at least {least} tokens long.",
                    param="messages",
                    code="context_length_exceeded",
                )
        texts = self._tokenizer.encode_many([segment.text for segment in segments if not segment.marker])
        plain = iter(texts)
        ids: list[int] = []
        for segment in segments:
            if not segment.marker:
                ids += next(plain)
                continue
            token_id = self._tokenizer.special_id(segment.text)
            if token_id is None:
                raise RequestError(f"the served checkpoint has no token {segment.text}", param="messages", code="unsupported_value")
            ids.append(token_id)
        return ids


def _write_effort(segments: list[_Segment], effort: int | None) -> None:
    """Write `effort` into the line that follows the first marker after begin of sentence."""
    line = f"{EFFORT_LINE}{DEFAULT_EFFORT} "
    if len(segments) < 3 or not segments[2].text.startswith(line):
        raise ForebayError("the installed deepseek-recipe writes another effort line than this version of forebay knows")
    segments[2] = _Segment(f"{EFFORT_LINE}{effort} " + segments[2].text[len(line):], False)


def _write_reasoning(segments: list[_Segment], reasoning: list[str]) -> list[_Segment]:
    """Give each finished assistant turn, which the library renders as `<｜Assistant｜></think>…`, its reasoning back."""
    texts = iter(reasoning)
    out: list[_Segment] = []
    for i, segment in enumerate(segments):
        if segment == _Segment(THINK_END, True) and segments[i - 1] == _Segment(ASSISTANT, True):
            out.append(_Segment(THINK_START, True))
            if text := next(texts):
                out.append(_Segment(text, False))
        out.append(segment)
    return out
