"""A request while the engine has it: its tokens, how far they are computed, and what it owns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forebay.cache.manager import Policy, SequenceCache
from forebay.cache.replay import ResumePlan
from forebay.cache.restore import Restore
from forebay.cache.snapshot import Snapshot
from forebay.engine.output import OutputProcessor
from forebay.engine.sampler import SamplingState
from forebay.engine.types import PrefillMode, Request, TierCounts, Times, TokenLogprob, Usage


@dataclass
class SavedWindow:
    """What a preempted sequence cannot get back from cached blocks: its window slot and its last, unfinished block (host copies).

    `contents` says what its cached blocks held (`CacheManager.contents`); without the very same ones the rest is of no use. `plan` is
    where it had resumed.
    """

    codes: Tensor  # [layers, window, head_dim] uint8
    scales: Tensor  # [layers, window, head_dim/32] uint8
    pending: Tensor  # [gated sources, ratio - 1, 2, head_dim] fp32
    block: Tensor | None  # [block_bytes] uint8, None when `computed` ends on a block boundary
    computed: int
    contents: tuple[int, ...]
    plan: ResumePlan


class Sequence:
    """One running or waiting choice.

    Attributes:
        tokens: prompt and output so far.
        prompt_tokens: length of the original prompt; decoder replay is anchored at its end, also after a preemption.
        computed: positions below it have their final KV; `plan.start` right after a resume with replay.
        limit: most output tokens.
        tie_tokens: set to compare with the reference (`Span.tie_tokens`); what such a sequence computes is not for the cache.
        followers: choices of the same prompt that wait for this one's prefill; `leader` is the one that a choice waits for.
        policy: what it accepts from the cache.
        first_plan: how the first admission resumed; a recompute after preemption must resume just as well, or the text would change.
        resumed_from: the window of that resume, if no other one gives the same text.
        restore: what other tiers have for it, while it waits and until its blocks are in.
        embeddings: of the request's images [positions, D] bf16, None where there are none yet or they are not needed any more.
        encoded: when a picture of it was encoded last, in turns of the encode stage; 0 before it first lacks one.
        copy_at: boundaries within its known tokens at which its window is copied on the way.
        copies: copies taken in the last step, by boundary, [layers, window, row_bytes] u8.
        windows: those of earlier steps that it still keeps; `stored` are the boundaries whose window went to the snapshot pool.
    """

    def __init__(
        self,
        request: Request,
        cache: SequenceCache,
        sampling: SamplingState,
        output: OutputProcessor,
        mode: PrefillMode,
        limit: int,
        order: int,
        policy: Policy | None = None,
    ) -> None:
        self.request = request
        self.id = request.request_id
        self.tokens = list(request.prompt_ids)
        self.prompt_tokens = len(self.tokens)
        self.cache = cache
        self.sampling = sampling
        self.output = output
        self.mode: PrefillMode = mode
        self.limit = limit
        self.tie_tokens: int | None = None
        self.order = order
        self.computed = 0
        self.policy = policy or Policy(mode)
        self.first_plan: ResumePlan | None = None
        self.resumed_from: Snapshot | None = None
        self.restore: Restore | None = None
        self.copy_at: list[int] = []
        self.copies: dict[int, Tensor] = {}
        self.windows: dict[int, Snapshot] = {}
        self.stored: set[int] = set()
        self.saved: SavedWindow | None = None
        self.embeddings: list[Tensor | None] = [None] * len(request.images)
        self.encoded = 0
        self.followers: list[Sequence] = []
        self.leader: Sequence | None = None
        self.tiers: TierCounts | None = None
        self.times = Times(arrived=request.arrived)
        self.preemptions = 0
        self.prompt_logprobs: list[TokenLogprob | None] = [None]

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Positions still to compute before the next token can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """Only the newest generated token is missing: the next row is a plain decode row."""
        return self.remaining == 1 and self.generated > 0

    @property
    def restoring(self) -> bool:
        """Admitted, but some of its blocks are still on their way from the SSD store."""
        return bool(self.cache.loading)

    @property
    def seen_upto(self) -> int | None:
        """Where the first image begins that has to be embedded before its positions can be computed; None if there is none."""
        for image, embeddings in zip(self.request.images, self.embeddings, strict=True):
            if embeddings is None and image.stop > self.computed:
                return max(image.start, self.computed)
        return None

    def images_in(self, start: int, stop: int) -> list[tuple[int, int, Tensor | None]]:
        """Parts of images within positions [start, stop): where each begins and ends, and their embeddings, None without any."""
        found = []
        for image, embeddings in zip(self.request.images, self.embeddings, strict=True):
            first, last = max(start, image.start), min(stop, image.stop)
            if first < last:
                part = None if embeddings is None else embeddings[first - image.start : last - image.start]
                found.append((first, last, part))
        return found

    def text(self, start: int, stop: int) -> list[int]:
        """Its tokens at positions [start, stop) that it has, -1 where an image is."""
        tokens = self.tokens[start:stop]
        if self.request.images and start < self.request.images[-1].stop:
            for first, last, _ in self.images_in(start, stop):
                tokens[first - start : last - start] = [-1] * (last - first)
        return tokens

    @property
    def scores_prompt(self) -> bool:
        return self.request.params.prompt_logprobs is not None

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.generated,
            reasoning_tokens=self.output.reasoning_tokens,
            cached_tokens=self.tiers.cached if self.tiers else 0,
        )
