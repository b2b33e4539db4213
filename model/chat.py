"""DeepSeek-V4.1 chat: an OpenAI chat request becomes prompt ids, and sampled ids become reasoning, content and tool calls.

The prompt text comes from the vendor's library (deepseek-recipe), which also says which of its characters are control tokens. Added here is
what it has no switch for: efforts other than the named ones, keeping the reasoning of earlier turns without tools, and tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import deepseek_recipe as recipe

from forebay.model.chat_images import ChatVision, PlacedImage
from forebay.model.chat_parse import Channel, Delta, OutputParser, ParseOptions
from forebay.model.chat_request import DEFAULT_EFFORT, AnswerForm, ChatRequest, ToolSchema, parse_chat_request, parse_response_format
from forebay.model.errors import ForebayError, RequestError
from forebay.model.image_plan import ImagePlan, expand
from forebay.model.token_cache import LongRunError, TokenCache, TooManyTokensError
from forebay.model.tokenizer import ASSISTANT, IMAGE, THINK_END, THINK_START, Tokenizer

__all__ = [
    "ENCODING_VERSION", "AnswerForm", "Channel", "ChatCodec", "ChatVision", "Delta", "EncodedPrompt", "OutputParser", "ParseOptions",
    "PlacedImage", "ToolSchema", "context_overflow", "parse_response_format", "undivided",
]  # fmt: skip

ENCODING_VERSION = f"chat1-recipe{version('deepseek-recipe')}"  # of the prompt encoding; the first number counts our own changes to it
TOKEN_CACHE_BYTES = 64 << 20  # ids of about as many characters of prompts
EFFORT_LINE = "Reasoning Effort: "
GROUNDING = frozenset(f"<｜{slash}{tag}｜>" for tag in ("ref", "box", "point", "polygon") for slash in ("", "/"))


@dataclass(frozen=True)
class EncodedPrompt:
    """A rendered and tokenised chat request.

    Attributes:
        token_ids: the prompt, beginning with the begin-of-sentence id, images widened to their spans.
        text: the same as text, in which look-alikes of control tokens cannot be told from control tokens; "" once nothing reads it.
        thinking: whether the answer begins with reasoning. `effort` is then 1..100, otherwise None.
        initial_channel: where the first sampled token goes.
        parse: how to read the answer.
        continues: the prompt ends inside an assistant message that the answer continues.
        form: what form the answer is to have.
        images: where each image of the prompt is, in its order.
    """

    token_ids: list[int]
    text: str
    thinking: bool
    effort: int | None
    initial_channel: Channel
    parse: ParseOptions
    continues: bool
    form: AnswerForm = field(default_factory=AnswerForm)
    images: tuple[PlacedImage, ...] = ()


@dataclass(frozen=True)
class _Segment:
    """A piece of a prompt: the spelling of one control token, or plain text."""

    text: str
    marker: bool


@dataclass(frozen=True)
class _Rendered:
    """A prompt in pieces; `images` are the parts of the body that its image markers stand for, in their order."""

    segments: list[_Segment]
    images: list[str]


class ChatCodec:
    """Encodes chat requests for one tokenizer. Every method may be called from several threads at once.

    Of a request it holds nothing but the ids of its text, so that a turn that extends it is not tokenised from the start.

    Attributes:
        vision: how the model sees images; None if it sees none, and they are refused.
    """

    def __init__(self, tokenizer: Tokenizer, *, vision: ChatVision | None = None, cache_bytes: int = TOKEN_CACHE_BYTES) -> None:
        """`cache_bytes`: memory for ids of earlier prompts, 0 for none.

        Raises CheckpointError naming every token that chat needs and the vocabulary lacks.
        """
        tokenizer.require_chat_tokens()
        self._tokenizer, self.vision = tokenizer, vision
        self.token_cache = TokenCache(tokenizer.encodings, cut=tokenizer.may_cut, max_bytes=cache_bytes)
        self._encoding = recipe.DeepseekV41Encoding().with_special_tokens(recipe.SpecialTokens(image=IMAGE))

    def encode(
        self,
        body: Mapping[str, Any],
        *,
        plans: Mapping[str, ImagePlan] | None = None,
        default_effort: int | str = "high",
        thinking_default: bool = True,
        max_tokens: int | None = None,
        slack: int = 2,
        asked_output: int = 0,
        strict_tool_messages: bool = False,
        salt: str = "",
    ) -> EncodedPrompt:
        """Render and tokenise a chat-completions request; takes CPU time in proportion to the text, most of it without the GIL.

        Args:
            body: the JSON object of the request. Read are messages, tools, tool_choice, parallel_tool_calls, response_format,
                thinking, enable_thinking, reasoning_effort, reasoning, drop_thinking, chat_template_kwargs, continue_final_message and
                the older names of these.
            plans: of its images, by the part of the body that each is, such as `messages.3.content.0`.
            default_effort: effort of requests that name none; "none" answers them without thinking.
            thinking_default: whether requests that do not say think.
            max_tokens: refuse a prompt that is much longer with as little work as it takes to know that.
            slack: how many times as long may pass.
            asked_output: tokens of output that the request asks for; only that refusal tells them.
            strict_tool_messages: refuse results and calls that do not match each other, which are otherwise put right.
            salt: separates tenants: only prompts with the same one share remembered ids.

        Raises RequestError naming the field.
        """
        request = parse_chat_request(body, default_effort, thinking_default, strict_tool_messages, self.vision is not None)
        rendered = self._render(request)
        shown = self._shown(rendered, plans)
        parse = ParseOptions(
            start=request.start,
            continues=request.continues,
            tools=request.tools,
            properties=request.properties,
            max_calls=request.max_calls,
            json=request.json,
        )
        ids = self._token_ids(rendered.segments, sum(plan.tokens for plan in shown), max_tokens, slack, asked_output, salt)
        spans: list[tuple[int, int]] = []
        if shown and self.vision is not None:
            ids, spans = expand(ids, self.vision.image_id, shown)
            if max_tokens is not None and len(ids) > slack * max_tokens:
                raise context_overflow(len(ids), max_tokens, asked_output)
        return EncodedPrompt(
            token_ids=ids,
            text="".join(segment.text for segment in rendered.segments),
            thinking=request.thinking,
            effort=request.effort,
            initial_channel="tool_calls" if request.start == "calls" else request.start,
            parse=parse,
            continues=request.continues,
            form=request.form,
            images=tuple(PlacedImage(part, *span) for part, span in zip(rendered.images, spans, strict=True)),
        )

    def count(
        self,
        body: Mapping[str, Any],
        *,
        plans: Mapping[str, ImagePlan] | None = None,
        default_effort: int | str = "high",
        thinking_default: bool = True,
        strict_tool_messages: bool = False,
        salt: str = "",
    ) -> int:
        """How many ids `encode` would give, in memory that does not grow with them. The arguments and errors are those of `encode`."""
        sees = self.vision is not None
        rendered = self._render(parse_chat_request(body, default_effort, thinking_default, strict_tool_messages, sees))
        shown = sum(plan.tokens - 1 for plan in self._shown(rendered, plans))
        try:
            plain = self.token_cache.count([segment.text for segment in rendered.segments if not segment.marker], salt)
        except LongRunError as error:
            raise undivided(error) from None
        return plain + sum(self._marker_id(segment) is not None for segment in rendered.segments if segment.marker) + shown

    def parser(self, prompt: EncodedPrompt) -> OutputParser:
        """A parser for one answer to `prompt`."""
        return OutputParser(self._tokenizer, prompt.parse)

    @staticmethod
    def _shown(rendered: _Rendered, plans: Mapping[str, ImagePlan] | None) -> list[ImagePlan]:
        """The plans of a prompt's images, in its order."""
        found = []
        for part in rendered.images:
            if plans is None or part not in plans:
                raise RequestError(f"{part} is an image that cannot be read", param=part, code="invalid_value")
            found.append(plans[part])
        return found

    def _render(self, request: ChatRequest) -> _Rendered:
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
            segments.append(_Segment(IMAGE if text[start:stop] == request.stand_in else text[start:stop], True))
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
        return _Rendered(segments, [source.path for source in rendered.image_sources])

    def _token_ids(
        self, segments: list[_Segment], shown: int, max_tokens: int | None, slack: int, asked_output: int, salt: str
    ) -> list[int]:
        """Ids with one for each image; all of those together have `shown` tokens."""
        plain_texts = [segment.text for segment in segments if not segment.marker]
        if max_tokens is not None:
            least = sum(len(text.encode()) for text in plain_texts) // self._tokenizer.longest_token
            if least > max_tokens or least + shown > slack * max_tokens:
                raise context_overflow(least + shown, max_tokens, asked_output)
        try:
            # What is a little too long is told with its exact length, by whoever knows the output that is to follow.
            texts = self.token_cache.encode_many(plain_texts, salt, None if max_tokens is None else slack * max_tokens)
        except TooManyTokensError as error:
            raise context_overflow(error.least, max_tokens or 0, asked_output) from None
        except LongRunError as error:
            raise undivided(error) from None
        plain = iter(texts)
        ids: list[int] = []
        for segment in segments:
            if not segment.marker:
                ids += next(plain)
                continue
            ids.append(self._marker_id(segment))
        return ids

    def _marker_id(self, segment: _Segment) -> int:
        if segment.text == IMAGE and self.vision is not None:
            return self.vision.image_id  # whatever the vocabulary calls it
        token_id = self._tokenizer.special_id(segment.text)
        if token_id is None:
            raise RequestError(f"the served checkpoint has no token {segment.text}", param="messages", code="unsupported_value")
        return token_id


def undivided(error: LongRunError, param: str = "messages") -> RequestError:
    """The refusal of a text with a run that is too long to be tokenised: megabytes without a space, a digit or a line break."""
    text = f"{param} has {error.size} bytes in a row that the tokenizer does not divide; the limit is {error.limit}"
    return RequestError(text, param=param, code="string_above_max_length")


def context_overflow(prompt: int, limit: int, output: int = 0, param: str = "messages") -> RequestError:
    """The refusal of a request that does not fit into the context of `limit` tokens.

    Clients look for this sentence, DeepSeek's own, to learn that they must shorten the conversation (spec/http-api.md §2.3): it is the
    same for every field and route, and nothing may be put in front of it.

    Args:
        prompt: its tokens, or as many as it is known to have at least. output: tokens that the request asks for, 0 if it does not say.
    """
    text = (
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt + output} tokens "
        f"({prompt} in the messages, {output} in the completion). Please reduce the length of the messages or completion."
    )
    error = RequestError(text, param=param, code="context_length_exceeded")
    error.lengths = (prompt, limit)
    return error


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
