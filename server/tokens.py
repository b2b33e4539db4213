"""POST /tokenize and /detokenize: what a prompt is in tokens, and back. Neither needs the engine, only its tokenizer.

The names of vLLM (`prompt`, `messages`, `return_token_strs`) and of llama.cpp (`content`, `with_pieces`, `parse_special`, `add_special`)
are taken alike; so is SGLang's `text`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import ValidationError

from forebay.model.chat import EncodedPrompt
from forebay.model.errors import RequestError
from forebay.model.tokenizer import Tokenizer
from forebay.server import ignored
from forebay.server.chat_fields import Body
from forebay.server.chat_names import ENCODED, UNSUPPORTED
from forebay.server.exchange import Exchange
from forebay.server.field_errors import bad, invalid, missing, refusal, unsupported, wrong_type
from forebay.server.prompts import integers, text_ids
from forebay.server.protocol import ChatCall, parse_chat
from forebay.server.turns import Turns

LISTED = 4  # times the context: most tokens of one answer, and of one text that is put together again
_SLICE = 1 << 15  # tokens of an answer that are written at a time
TEXTS = ("prompt", "content", "text")  # names of the same thing in vLLM, llama.cpp and SGLang


class TokenizeFields(Body):
    """The fields of /tokenize beside the text and what the chat encoding reads."""

    model: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None
    return_prompt: bool | None = None

    @property
    def bos(self) -> bool:
        """Whether begin of sentence is put in front of a text."""
        return self.add_special_tokens is not False and self.add_special is not False


@dataclass
class TokenizeCall:
    """A validated request: a text, or a conversation for the chat encoding."""

    fields: TokenizeFields
    chat: ChatCall | None
    text: str
    path: str
    ignored: tuple[str, ...]  # names for the response header


@dataclass
class DetokenizeCall:
    """Ids to be made a text of."""

    ids: list[int]
    model: str | None
    ignored: tuple[str, ...]


def parse_tokenize(body: dict[str, Any], turns: Turns) -> TokenizeCall:
    """Validate a body of /tokenize. Raises RequestError naming the field."""
    body = {name: value for name, value in body.items() if value is not None}
    given = [name for name in (*TEXTS, "messages") if name in body]
    if not given:
        text = "Missing required parameter: 'prompt', a text ('content' and 'text' mean the same), or 'messages'."
        raise bad("prompt", text, "missing_required_parameter")
    if len(given) > 1:
        raise invalid(given[1], f"'{given[0]}' is there already, and only one of them can be tokenised")
    own = {name: body.pop(name) for name in TokenizeFields.model_fields if name in body}
    try:
        fields = TokenizeFields.model_validate(own)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)[0]) from None
    if given[0] == "messages":
        idle: list[str] = [name for name in ("add_special_tokens", "add_special", "parse_special") if name in own]
        idle += [name for name in body if name not in ENCODED and name not in UNSUPPORTED and name != "add_generation_prompt"]
        named = {**body, **({"model": fields.model} if fields.model else {})}
        chat = parse_chat(named, turns.options, turns.engine.tokenizer, also=idle)
        return TokenizeCall(fields, chat, "", "messages", chat.ignored)
    text = body.pop(given[0])
    if not isinstance(text, str):
        raise wrong_type(given[0], "a string", text)
    if body.get("tools"):
        raise unsupported("tools", "a text has none; send 'messages'")
    return TokenizeCall(fields, None, text, given[0], ignored.ignored(body))


def parse_detokenize(body: dict[str, Any], tokenizer: Tokenizer) -> DetokenizeCall:
    """Validate a body of /detokenize. Raises RequestError naming the field or the id that no token has."""
    body = {name: value for name, value in body.items() if value is not None}
    tokens, model = body.pop("tokens", None), body.pop("model", None)
    if tokens is None:
        raise missing("tokens")
    if model is not None and not isinstance(model, str):
        raise wrong_type("model", "a string", model)
    if not isinstance(tokens, list):
        raise wrong_type("tokens", "an array of token ids", tokens)
    ids = integers(tokens, "tokens")
    if ids and (min(ids) < 0 or max(ids) >= tokenizer.vocab_size):
        place = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < tokenizer.vocab_size)
        raise invalid(f"tokens[{place}]", f"expected a token id from 0 to {tokenizer.vocab_size - 1}, got {str(ids[place])[:40]}")
    return DetokenizeCall(ids, model, ignored.ignored(body))


class TokenRoutes:
    """The handlers of both routes. They answer whenever the tokenizer is there, also while the engine drains."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def tokenize(self, exchange: Exchange) -> None:
        """{count, max_model_len, tokens, token_strs}, and the rendered `prompt` if asked for."""
        await self._counted(exchange, self._tokenize)

    async def detokenize(self, exchange: Exchange) -> None:
        """{prompt, text, content}, all the same."""
        await self._counted(exchange, self._detokenize)

    async def _counted(self, exchange: Exchange, serve: Callable[[Exchange, bytes], Coroutine[Any, Any, None]]) -> None:
        await self._turns.run(exchange, lambda data: serve(exchange, data), needs_engine=False)

    async def _tokenize(self, exchange: Exchange, data: bytes) -> None:
        turns = self._turns
        call, size = await turns.read(exchange, data, lambda body: parse_tokenize(body, turns))
        del data
        self._accept(exchange, call.fields.model, call.ignored, size)
        most = LISTED * turns.engine.max_context
        prompt = None
        try:
            if call.chat is not None:
                prompt, _ = await turns.encode(exchange, call.chat, size, most=most)
            parts = await turns.lanes.run(size, lambda: self._listed(call, prompt, most))
        except RequestError as error:
            if error.lengths is None:
                raise
            rule = f"at most {most} tokens are listed, and these are {error.lengths[0]} or more; /v1/messages/count_tokens only counts"
            raise bad(call.path, f"Invalid '{call.path}': {rule}.", "string_above_max_length") from None
        await exchange.reply_parts(200, parts)

    def _listed(self, call: TokenizeCall, prompt: EncodedPrompt | None, most: int) -> list[bytes]:
        """The answer in parts, none of which takes long to write."""
        tokenizer, fields, context = self._turns.engine.tokenizer, call.fields, self._turns.engine.max_context
        if prompt is not None:
            ids, rendered = prompt.token_ids, prompt.text
        else:
            control, rendered = fields.parse_special is not False, call.text
            ids = text_ids(call.text, tokenizer, path=call.path, bos=fields.bos, control=control, max_tokens=most, slack=1)
        for name, asked in (("with_pieces", fields.with_pieces), ("return_token_strs", fields.return_token_strs)):
            if asked and len(ids) > context:
                raise invalid(name, f"the texts of at most {context} tokens are listed, and these are {len(ids)}")
        parts = [orjson.dumps({"count": len(ids), "max_model_len": context})[:-1], b',"tokens":']
        if fields.with_pieces:
            parts += _array(ids, lambda i: {"id": i, "piece": _piece(tokenizer, i)})
        else:
            parts += _array(ids, lambda i: i)
        parts.append(b',"token_strs":')
        parts += _array(ids, tokenizer.token_text) if fields.return_token_strs else [b"null"]
        if fields.return_prompt:
            parts += [b',"prompt":', orjson.dumps(rendered)]
        return [*parts, b"}"]

    async def _detokenize(self, exchange: Exchange, data: bytes) -> None:
        turns = self._turns
        tokenizer = turns.engine.tokenizer
        call, size = await turns.read(exchange, data, lambda body: parse_detokenize(body, tokenizer))
        del data
        self._accept(exchange, call.model, call.ignored, size)
        if len(call.ids) > (most := LISTED * turns.engine.max_context):
            raise invalid("tokens", f"at most {most} tokens become a text, and these are {len(call.ids)}")
        text = await turns.lanes.run(size, lambda: orjson.dumps(tokenizer.decode(call.ids)))
        await exchange.reply_parts(200, [b'{"prompt":', text, b',"text":', text, b',"content":', text, b"}"])

    def _accept(self, exchange: Exchange, model: str | None, names: tuple[str, ...], size: int) -> None:
        self._turns.require_model(model)
        exchange.extra_headers += ignored.header(names)
        exchange.notes.update(body_bytes=size)


def _array(ids: list[int], entry: Callable[[int], Any]) -> list[bytes]:
    """A JSON array with an entry for each id. The entries of a slice are all that is ever there of them."""
    slices = [orjson.dumps([entry(i) for i in ids[start : start + _SLICE]])[1:-1] for start in range(0, len(ids), _SLICE)]
    return [b"[", *(b"," + text if i else text for i, text in enumerate(slices)), b"]"]


def _piece(tokenizer: Tokenizer, token_id: int) -> str | list[int]:
    """llama.cpp's form of a token: its text, or its bytes if it holds part of a character."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)
