"""Asks a model in one mode, so that the state its answers rest on is the one that the mode names."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forebay.cache.replay import least_hit_blocks
from forebay.engine.llm import LLM
from forebay.engine.quality_modes import Mode
from forebay.engine.types import Output, ReplayMode, Request, SamplingParams
from forebay.model.chat import ChatCodec, EncodedPrompt
from forebay.model.demo.tasks import Conversation
from forebay.model.errors import ForebayError

ANSWER_TOKENS = (48, 512)  # least and most room for an answer
POOL_SHARE = 0.5  # of the block pool that what is asked at once may fill


class QualityError(ForebayError):
    """The measurement could not be made as it claims to be made."""


@dataclass(frozen=True)
class Answer:
    """What the model said.

    Attributes:
        reply: an assistant message: content, reasoning_content with thinking, tool_calls if there are any.
        tokens: generated, the end of the turn included. `ended`: by itself, not at its limit.
        prompt_tokens, lineage: of the request; the bounded replays behind its KV.
    """

    reply: dict[str, Any]
    tokens: int
    ended: bool
    prompt_tokens: int
    lineage: int


def boundaries(blocks: int, count: int, least: int) -> list[int] | None:
    """`count` numbers of blocks, evenly spread, the last one `blocks`, at which a prompt that is grown from one to the next resumes.

    A prompt resumes after `least` blocks or more. None when there are too few blocks.
    """
    if blocks < least + count - 1:
        return None
    return [max(least + i, (i + 1) * blocks // count) for i in range(count)]


class Asker:
    """One model in one mode (`quality_modes.running`).

    Requests of one group share the beginning of their prompts through the cache, and no more than all of them do: some may go on alike for
    another block, which the first of them leaves in the cache with one more replay behind it. A mode without boundaries resumes by exact
    replay, so that every answer equals that of a prompt computed from scratch. One with k of them grows the common beginning in k steps,
    each a request that ends at a block boundary and resumes where the one before ended, and the question is the last resume.
    """

    def __init__(self, llm: LLM, mode: Mode) -> None:
        assert llm.engine.codec is not None
        self.llm, self.mode = llm, mode
        self.codec: ChatCodec = llm.engine.codec
        layout = llm.engine.manager.layout
        self.size, self.least = layout.block_tokens, least_hit_blocks(layout.window, layout.block_tokens)
        self._salts = itertools.count()

    def ask(
        self, groups: Sequence[Sequence[Conversation]], limit: int | None = None, lead: Sequence[int] = ()
    ) -> list[list[Answer] | None]:
        """Answers to every conversation of every group, greedy; None for a group whose prompts are too short for the mode's boundaries.

        Args:
            limit: most tokens of an answer; None for as many as `limit` gives each conversation.
            lead: ids before every prompt. A group then shares what is in it and no more, so that all boundaries lie in it.

        Raises:
            QualityError: an answer does not rest on as many replays as it should.
        """
        room = int(self.llm.engine.manager.capacity_tokens * POOL_SHARE)
        found: list[list[Answer] | None] = []
        wave: list[_Group] = []
        for conversations in groups:
            group = self._group(conversations, limit, list(lead))
            if wave and sum(known.tokens for known in wave) + group.tokens > room:
                found += self._run(wave)
                wave = []
            wave.append(group)
        return found + self._run(wave)

    def grow(self, groups: Sequence[tuple[Sequence[int], str]]) -> list[bool]:
        """Compute and cache beginnings [ids, salt] of whole blocks, so that the next request of each makes the mode's last resume.

        Returns which of them are long enough; nothing is computed for the others.
        """
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        places: list[list[int] | None] = []
        for ids, _ in groups:
            blocks = len(ids) // self.size
            if self.mode.boundaries:
                places.append(boundaries(blocks, self.mode.boundaries, self.least))
            else:
                places.append([blocks] if blocks >= self.least else [])
        for step in range(max(1, self.mode.boundaries)):
            prompts = [(ids[: at[step] * self.size], salt) for (ids, salt), at in zip(groups, places, strict=True) if at]
            requests = [Request(ids, params, prefill=self.mode.prefill, salt=salt) for ids, salt in prompts]
            for output in self.llm.run(requests):
                self._expect(output, step)
        return [at is not None for at in places]

    def request(
        self, ids: Sequence[int], params: SamplingParams, salt: str, prompt: EncodedPrompt | None = None, shared: int | None = None
    ) -> Request:
        """A request that resumes as the mode says, on no more than the first `shared` tokens."""
        replay: ReplayMode = "bounded" if self.mode.boundaries else "exact"
        return Request(ids, params, prompt=prompt, prefill=self.mode.prefill, replay=replay, salt=salt, resume_at_most=shared)

    def salt(self) -> str:
        """A tenant of its own, which shares nothing with what was computed before."""
        return f"quality {self.mode.name} {next(self._salts)}"

    def limit(self, conversation: Conversation) -> int:
        """Room for an answer half as long again as the reference's, and some."""
        text = json.dumps(conversation.answer, ensure_ascii=False)
        least, most = ANSWER_TOKENS
        return min(most, least + len(self.llm.tokenizer.encode(text)) * 3 // 2)

    def _group(self, conversations: Sequence[Conversation], limit: int | None, lead: list[int]) -> _Group:
        prompts = [self.codec.encode(c.body) for c in conversations]
        ids = [lead + prompt.token_ids for prompt in prompts]
        if lead:
            shared = len(lead)
        else:
            shared = min(_shared(ids[0], other) for other in ids[1:]) if len(ids) > 1 else len(ids[0]) - 1
        limits = [self.limit(c) if limit is None else limit for c in conversations]
        return _Group(prompts, ids, limits, ids[0][: shared // self.size * self.size], self.salt(), self.size)

    def _run(self, wave: Sequence[_Group]) -> list[list[Answer] | None]:
        # A lone prompt without boundaries has nobody to share its beginning with.
        grown = [group for group in wave if self.mode.boundaries or len(group.prompts) > 1]
        fits = dict(zip([group.salt for group in grown], self.grow([(group.shared, group.salt) for group in grown]), strict=True))
        asked = [group for group in wave if fits.get(group.salt, True)]
        room = int(self.llm.engine.manager.capacity_tokens * POOL_SHARE) - sum(len(group.shared) for group in asked)
        portions: list[list[Request]] = [[]]
        left = room
        for group in asked:
            for prompt, ids, limit, size in zip(group.prompts, group.ids, group.limits, group.own, strict=True):
                if portions[-1] and size > left:
                    portions.append([])
                    left = room
                params = SamplingParams(temperature=0.0, max_tokens=limit)
                portions[-1].append(self.request(ids, params, group.salt, prompt, len(group.shared)))
                left -= size
        outputs = iter([output for portion in portions for output in self.llm.run(portion)])
        found: list[list[Answer] | None] = []
        for group in wave:
            found.append([self._answer(prompt, next(outputs)) for prompt in group.prompts] if group in asked else None)
        return found

    def _answer(self, prompt: EncodedPrompt, output: Output) -> Answer:
        self._expect(output, self.mode.boundaries)
        reply = message(self.codec, prompt, output.token_ids, self.llm.tokenizer.stop_ids)
        ended = output.finish_reason != "length"
        return Answer(reply, len(output.token_ids), ended, output.usage.prompt_tokens, output.tiers.lineage)

    def _expect(self, output: Output, lineage: int) -> None:
        if output.tiers.lineage != lineage or output.preemptions:
            raise QualityError(
                f"in mode {self.mode.name!r} a request has {output.tiers.lineage} bounded replays behind it instead of {lineage} "
                f"({output.preemptions} preemptions)"
            )


@dataclass(frozen=True, eq=False)
class _Group:
    """Prompts that begin with `shared`, whole blocks. `ids` has what is before each prompt too."""

    prompts: list[EncodedPrompt]
    ids: list[list[int]]
    limits: list[int]
    shared: list[int]
    salt: str
    size: int

    @property
    def own(self) -> list[int]:
        """What each of its requests takes of the block pool beside what is shared, tokens."""
        lengths = [len(ids) - len(self.shared) + limit for ids, limit in zip(self.ids, self.limits, strict=True)]
        return [(-(-length // self.size) + 2) * self.size for length in lengths]

    @property
    def tokens(self) -> int:
        """What all of them take, tokens."""
        return len(self.shared) + sum(self.own)


def message(codec: ChatCodec, prompt: EncodedPrompt, token_ids: Sequence[int], stop_ids: frozenset[int]) -> dict[str, Any]:
    """The assistant message that sampled ids spell, as the server gives it. An id that ends the turn may be the last one."""
    parser = codec.parser(prompt)
    ended = bool(token_ids) and token_ids[-1] in stop_ids
    deltas = [delta for token in (token_ids[:-1] if ended else token_ids) for delta in parser.push(token)]
    deltas += parser.finish("stop" if ended else "length")
    reply: dict[str, Any] = {"role": "assistant", "content": "".join(d.text for d in deltas if d.channel == "content")}
    if prompt.thinking:
        reply["reasoning_content"] = "".join(d.text for d in deltas if d.channel == "reasoning")
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if delta.channel == "tool_calls":
            call = calls.setdefault(delta.index, {"id": None, "type": "function", "function": {"name": None, "arguments": ""}})
            call["id"] = call["id"] or delta.call_id
            call["function"]["name"] = call["function"]["name"] or delta.name
            call["function"]["arguments"] += delta.text
    if calls:
        reply["tool_calls"] = list(calls.values())
    return reply


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens with which both begin; at least one of each is left over."""
    most = min(len(left), len(right)) - 1
    return next((i for i in range(most) if left[i] != right[i]), most)
