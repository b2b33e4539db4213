"""What a request becomes before it is queued: checked, and a sequence with everything that its answer depends on."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np

from forebay.cache.manager import CacheManager, Policy
from forebay.cache.prefix import DIGEST_BYTES, ImageSpan
from forebay.engine.constraint import Constraint
from forebay.engine.metrics import Metrics
from forebay.engine.options import EngineOptions
from forebay.engine.output import OutputProcessor
from forebay.engine.sampler import Sampler, SamplingState
from forebay.engine.sequence import Sequence
from forebay.engine.types import PrefillMode, Request
from forebay.model.chat import ChatCodec
from forebay.model.config import ModelConfig
from forebay.model.errors import RequestError
from forebay.model.tokenizer import Tokenizer


class Admission:
    """Builds sequences of one engine. Changes nothing, so any thread may call it.

    Attributes:
        max_context: most tokens of a prompt and its output together.
    """

    def __init__(
        self,
        config: ModelConfig,
        manager: CacheManager,
        tokenizer: Tokenizer,
        options: EngineOptions,
        metrics: Metrics,
        sampler: Sampler,
        prefill: PrefillMode,
        codec: ChatCodec | None,
        vision: bool = False,
    ) -> None:
        """`prefill` is the engine's, for requests that name none; without a `codec` every request is plain text. `vision`: whether there
        is somebody to embed images."""
        self.vision = vision
        self.manager, self.tokenizer, self.options, self.metrics = manager, tokenizer, options, metrics
        self.sampler, self.prefill, self.codec = sampler, prefill, codec
        self.vocab_size, self.eos_id = config.vocab_size, config.eos_token_id
        longest = config.max_position_embeddings
        self.max_context = min(options.max_context or longest, longest, manager.capacity_tokens)

    def prepare(self, request: Request) -> Sequence:
        """Check a request and build its sequence, in time proportional to its prompt. Nothing is queued and nothing need be undone.

        Raises:
            RequestError: it can never run (too long, ids outside the vocabulary).
        """
        params, prompt = request.params, request.prompt_ids
        name = "messages" if request.prompt is not None else "prompt"
        self.check_ids(prompt, name)
        self._check_images(request, name)
        if len(prompt) >= self.max_context:
            self.metrics.request_rejected("context_length")
            room = " (what the KV pool of this server holds)" if self.max_context == self.manager.capacity_tokens else ""
            error = RequestError(
                f"This model's maximum context length is {self.max_context} tokens{room}. However, your prompt has {len(prompt)} tokens.",
                param=name,
                code="context_length_exceeded",
            )
            error.lengths = (len(prompt), self.max_context)
            raise error
        self.sampler.check(params)
        room_left = self.max_context - len(prompt)
        limit = room_left if params.max_tokens is None else min(room_left, params.max_tokens)
        parser = self.codec.parser(request.prompt) if request.prompt is not None and self.codec is not None else None
        own = frozenset(self.tokenizer.stop_ids if parser is not None else {self.eos_id})
        constraint = self._constraint(request)
        # An answer held to a form ends when it is complete, whatever else was asked for.
        endless = params.ignore_eos and not (constraint is not None and constraint.begins_at_once)
        stops = frozenset(params.stop_token_ids) | (frozenset() if endless else own)
        output = OutputProcessor(self.tokenizer, params.stop, stops, parser=parser, include_stop=params.include_stop)
        # `min_tokens` holds back every id that would end this choice, not only those the request names.
        chosen = replace(params, stop_token_ids=tuple(sorted(i for i in stops if i < self.vocab_size))) if params.min_tokens else params
        mode: PrefillMode = "exact" if params.prompt_logprobs is not None else request.prefill or self.prefill
        cache = self.manager.sequence(request.salt, [ImageSpan(image.start, image.stop, image.digest) for image in request.images])
        if self.manager.prefix_reuse:
            cache.chain.extend(prompt)
        sampling = SamplingState(chosen, prompt, params.seed, constraint)
        return Sequence(request, cache, sampling, output, mode, limit, 0, self._policy(request, mode))

    def _constraint(self, request: Request) -> Constraint | None:
        """What holds the request's answer to a form, None if nothing does."""
        grammar, budget, params = request.grammar, request.reasoning_budget, request.params
        reasons = request.prompt is not None and request.prompt.initial_channel == "reasoning"
        if grammar is not None and grammar.spec.begins == "marker" and params.ignore_eos:
            grammar = None  # nothing may end the answer, so nothing can be complete
        if grammar is None and (budget is None or not reasons):
            return None
        calls = request.prompt is None or request.prompt.parse.tools
        return Constraint(self.tokenizer, grammar, reasoning=reasons, budget=budget, calls=calls)

    def _policy(self, request: Request, mode: PrefillMode) -> Policy:
        """What the request accepts from the cache: its own wishes before the engine's, and nothing approximate for an exact prefill."""
        most = request.max_lineage if request.max_lineage is not None else self.options.max_lineage
        replay = request.replay or self.options.replay
        if mode == "exact":
            return Policy("exact", "exact", 0)
        return Policy(mode, replay, 0 if replay == "exact" and most is None else most)

    def _check_images(self, request: Request, name: str) -> None:
        """Raise RequestError unless the images are in order, within the prompt, as long as their plans say, and the model sees."""
        end = 0
        for number, image in enumerate(request.images):
            if not self.vision:
                raise RequestError("this model does not see images", param=name)
            if image.start < end or image.stop - image.start != image.plan.tokens or image.stop > len(request.prompt_ids):
                raise RequestError(f"image {number} is at [{image.start}, {image.stop}): out of order or out of place", param=name)
            height, width = image.plan.canvas[::-1]
            if image.canvas.dtype != np.uint8 or image.canvas.shape != (height, width, 3):
                found = f"{image.canvas.dtype} {list(image.canvas.shape)}"
                raise RequestError(f"the canvas of image {number} is {found}, its plan has uint8 [{height}, {width}, 3]", param=name)
            if len(image.digest) != DIGEST_BYTES:
                raise RequestError(f"the digest of image {number} has {len(image.digest)} bytes, not {DIGEST_BYTES}", param=name)
            end = image.stop

    def check_ids(self, ids: SequenceOf[int], name: str) -> None:
        """Raise RequestError unless there are ids and all of them are in the vocabulary."""
        if not ids:
            raise RequestError(f"{name} has no tokens", param=name)
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            raise RequestError(f"{name} holds token id {low if low < 0 else high}, outside the vocabulary of {self.vocab_size}", param=name)
