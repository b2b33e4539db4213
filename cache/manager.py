"""The cache manager: what a sequence owns, from admission to release, and who gets the memory.

One duty: every block and window slot has an owner, and a sequence is admitted with everything its prompt needs or not at all. Nothing
is ever held while waiting for more, so two half-admitted requests cannot starve each other. A running sequence that finds no room to
grow is told so at once (`ensure` is False and changes nothing) and the scheduler preempts someone.

Blocks that only the SSD store has are part of an admission too: the sequence gets memory for them, and `load` fills it block by block
as they arrive, before anything is computed.

Used by one thread, the one that runs steps. `KeyChain.extend` on a sequence that is not open yet may run elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from torch import Tensor

from forebay.cache.blocks import NULL_BLOCK, BlockPool, CacheBookkeepingError
from forebay.cache.layout import KVLayout
from forebay.cache.prefix import ImageSpan, KeyChain, PrefixIndex, root_key
from forebay.cache.replay import Geometry, KnownWindow, Mode, ResumePlan, least_hit_blocks, plan_resume
from forebay.cache.windows import NULL_SLOT, WindowPool

HEADROOM_BLOCKS = 1  # admitted beyond the prompt, so that a new sequence does not preempt someone with its first tokens


@dataclass(eq=False)
class SequenceCache:
    """What one sequence has in the cache. The manager changes it; others read it.

    Attributes:
        chain: keys of the full blocks of its tokens.
        table: block ids, block i holding tokens [i*block_tokens, (i+1)*block_tokens).
        slot: its window slot; the null slot while not open.
        plan: where it resumed; None while not open.
        committed: blocks at the head of the table that are complete and immutable, the adopted ones included.
        loading: blocks of the table that are to come from the SSD store; empty when all are in.
        own_from: blocks before this one were adopted every time it was opened, so never computed here.
        from_ssd: keys of its blocks that were loaded for it, whoever has cached them since.
    """

    chain: KeyChain
    table: list[int] = field(default_factory=list)
    slot: int = NULL_SLOT
    plan: ResumePlan | None = None
    committed: int = 0
    loading: range = range(0)
    own_from: int | None = None
    from_ssd: set[bytes] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        return self.plan is not None


@dataclass(frozen=True)
class Policy:
    """What a request accepts from the cache (`plan_resume`).

    `max_lineage` bounds the replays behind cached blocks, and behind what is computed after the resume unless `max_resumed` bounds that.
    """

    prefill: Mode = "bounded"
    replay: Mode = "bounded"
    max_lineage: int | None = None
    max_resumed: int | None = None


@dataclass(frozen=True)
class Offer:
    """What other tiers have for a sequence.

    Attributes:
        start: number of the block that `lineages` begins with.
        lineages: bounded replays behind each consecutive block that can be loaded.
        windows: those that can be loaded.
    """

    start: int = 0
    lineages: Sequence[int] = ()
    windows: Sequence[KnownWindow] = ()


@dataclass(frozen=True)
class Committed:
    """A block that has just become reusable: its place in the pool, key, number in its chain, and the replays behind it."""

    block: int
    key: bytes
    depth: int
    lineage: int


BOUNDED = Policy()
NOTHING = Offer()


@dataclass(frozen=True)
class CacheStats:
    """Blocks: `free + used + cached == total`, where `cached` is what eviction can free and `used` what sequences need.

    `indexed` counts cached keys, in use or not. `hits`, `misses`, `evictions` are totals since the start, in blocks.
    """

    total: int
    free: int
    used: int
    cached: int
    indexed: int
    windows_total: int
    windows_used: int
    hits: int
    misses: int
    evictions: int


class CacheManager:
    """Admission, growth, prefix reuse and release over one BlockPool and one WindowPool."""

    def __init__(
        self, layout: KVLayout, pool: BlockPool, windows: WindowPool, fingerprint: str, prefix_reuse: bool = True, *, poison: bool = False
    ) -> None:
        """`fingerprint` names weights, configuration and tokenizer; caches of different models never share a key.

        `poison` fills every block and slot that is handed out with values that show (for finding reads of what was never written).
        """
        self.layout = layout
        self.pool = pool
        self.windows = windows
        self.fingerprint = fingerprint
        self.prefix_reuse = prefix_reuse
        self.poison = poison
        self.geometry = Geometry(layout.window, layout.block_tokens, layout.encoder_layers, layout.layers - layout.encoder_layers)
        self.index = PrefixIndex(pool, least_hit_blocks(layout.window, layout.block_tokens))

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence that fits when it runs alone."""
        return self.pool.total * self.layout.block_tokens

    def never_fits(self, tokens: int) -> bool:
        """Whether a sequence of `tokens` tokens exceeds the whole pool, so that waiting cannot help: refuse it, do not queue it."""
        return tokens > self.capacity_tokens

    def available_blocks(self) -> int:
        """Blocks that can be handed out now: free ones and cached ones nobody needs."""
        return self.pool.free + self.index.evictable

    def sequence(self, salt: str = "", images: Sequence[ImageSpan] = ()) -> SequenceCache:
        """A handle that owns nothing yet. Sequences share prefixes only within one `salt`."""
        return SequenceCache(KeyChain(root_key(self.fingerprint, self.layout.identity, salt), self.layout.block_tokens, images))

    def open(
        self,
        seq: SequenceCache,
        tokens: Sequence[int],
        *,
        prompt_tokens: int | None = None,
        reuse: bool = True,
        at_most: int | None = None,
        policy: Policy = BOUNDED,
        offer: Offer = NOTHING,
    ) -> ResumePlan | None:
        """Admit a sequence whose known tokens are `tokens` (the prompt; after a preemption also what was generated).

        Takes a window slot, the cached prefix if `reuse` (no more than `at_most` tokens of it), and blocks for all of `tokens` plus one,
        in one step. Returns where to resume, or None when there is no room now: then nothing has changed and the caller tries again
        later. Whatever `never_fits(len(tokens))` refuses would stay None for ever.

        Blocks of the plan that are only on offer are in `seq.loading`: `load` them, in order, before the first step.
        """
        if seq.is_open:
            raise CacheBookkeepingError("the sequence is open already")
        if not tokens:
            raise CacheBookkeepingError("a sequence needs at least one token")
        size = self.layout.block_tokens
        hit: list[int] = []
        lineages: list[int] = []
        wanted = 0
        if self.prefix_reuse:
            seq.chain.extend(tokens)
            if reuse:
                wanted = (len(tokens) - 1 if at_most is None else min(len(tokens) - 1, at_most)) // size
                hit = self.index.match(seq.chain.keys[:wanted], policy.max_lineage)
                lineages = [self.index.lineage(block) for block in hit]
                if offer.start <= len(hit):
                    offered = offer.lineages[len(hit) - offer.start : wanted - offer.start]
                    lineages += takewhile(lambda lineage: policy.max_lineage is None or lineage <= policy.max_lineage, offered)
        plan = plan_resume(
            prompt_tokens or len(tokens),
            len(lineages) * size,
            self.geometry,
            windows=[w for w in offer.windows if policy.max_lineage is None or w.lineage <= policy.max_lineage],
            prefill=policy.prefill,
            replay=policy.replay,
            lineages=lineages,
            max_lineage=policy.max_lineage if policy.max_resumed is None else policy.max_resumed,
        )
        resumed = plan.resume // size
        hit = hit[:resumed]
        if not self._take_room(seq, tokens, hit):
            return None
        seq.loading = range(len(hit), resumed)
        seq.own_from = resumed if seq.own_from is None else min(seq.own_from, resumed)
        seq.plan = plan
        self.index.count(len(hit), max(0, wanted - len(hit)))
        return plan

    def reopen(self, seq: SequenceCache, tokens: Sequence[int], contents: Sequence[int], plan: ResumePlan) -> bool | None:
        """Admit a preempted sequence with the very blocks it had: `contents` tells what they held, `plan` where it once resumed.

        Returns True, None when there is no room now, or False when the cache holds these contents no more; then nothing has changed.
        """
        if seq.is_open:
            raise CacheBookkeepingError("the sequence is open already")
        seq.chain.extend(tokens)
        hit = self.index.match(seq.chain.keys[: len(contents)])
        if [self.index.serial(block) for block in hit] != list(contents):
            return False
        if not self._take_room(seq, tokens, hit):
            return None
        seq.loading = range(0)
        seq.own_from = len(hit) if seq.own_from is None else min(seq.own_from, len(hit))
        seq.plan = plan
        return True

    def reopens(self, seq: SequenceCache, tokens: Sequence[int], contents: Sequence[int]) -> bool:
        """Whether `reopen` would not find that there is no room now. Changes nothing."""
        seq.chain.extend(tokens)
        hit = self.index.match(seq.chain.keys[: len(contents)])
        return [self.index.serial(block) for block in hit] != list(contents) or self._has_room(self._fresh(tokens, hit), hit)

    def _fresh(self, tokens: Sequence[int], hit: Sequence[int]) -> int:
        """Blocks that `tokens` and one more take beside `hit`."""
        blocks = self.layout.blocks_for(len(tokens))
        # A prompt that fills the pool alone must still be admitted, without headroom.
        return min(blocks + HEADROOM_BLOCKS, max(blocks, self.pool.total)) - len(hit)

    def _has_room(self, fresh: int, hit: Sequence[int]) -> bool:
        # The hit's own idle blocks stop being evictable the moment it is adopted, so they cannot be promised twice.
        idle = sum(self.index.is_idle(block) for block in hit)
        return self.windows.free > 0 and fresh <= self.available_blocks() - idle

    def _take_room(self, seq: SequenceCache, tokens: Sequence[int], hit: Sequence[int]) -> bool:
        """Adopt `hit` and take a slot and blocks for the rest of `tokens` plus one; False, and nothing changes, when there is no room."""
        fresh = self._fresh(tokens, hit)
        if not self._has_room(fresh, hit):
            return False
        self.index.acquire(hit)
        self.pool.copies.fence()  # some of the hit may have been loaded for somebody else just now
        seq.table = list(hit) + self._take(fresh)
        seq.slot = self.windows.allocate()
        if self.poison:
            self.windows.poison(seq.slot)
        seq.committed = len(hit)
        return True

    def load(self, seq: SequenceCache, blocks: Iterable[tuple[int, Tensor, int]]) -> None:
        """Fill the next blocks of `seq.loading`: (number in the table, bytes [block_bytes] uint8 on the host, lineage), in order.

        They are cached like computed ones. A block that somebody else has cached meanwhile is shared instead. Bytes may still be on their
        way to the device on return (`pool.copies.after`); whoever can read them waits there, not here.
        """
        self._need_open(seq)
        copies: list[tuple[Tensor, Tensor]] = []
        try:
            self._load(seq, blocks, copies)
        finally:
            self.pool.copies.upload(copies)
        if not seq.loading:
            self.pool.copies.fence()

    def _load(self, seq: SequenceCache, blocks: Iterable[tuple[int, Tensor, int]], copies: list[tuple[Tensor, Tensor]]) -> None:
        """`load` but for the copies: (row of the pool, bytes)."""
        keys = seq.chain.keys
        for number, data, lineage in blocks:
            if number != seq.loading.start:
                raise CacheBookkeepingError(f"block {number} was loaded, the next one is {seq.loading.start}")
            seq.loading = range(number + 1, seq.loading.stop)
            seq.from_ssd.add(keys[number])
            known = self.index.find(keys[number])
            if known is not None and self.index.lineage(known) <= lineage:
                self.index.acquire((known,))
                self.pool.release((seq.table[number],))
                seq.table[number] = known
            else:
                copies.append((self.pool.data[seq.table[number]], data))
                parent = keys[number - 1] if number else None
                if parent is None or parent in self.index:  # else the cache was cleared meanwhile, and the block stays private
                    self.index.insert(keys[number], parent, seq.table[number], lineage)
            seq.committed = number + 1

    def ensure(self, seq: SequenceCache, upto: int) -> bool:
        """Make the table reach `upto` tokens, evicting cached blocks if needed; False when there is no room, and nothing has changed."""
        self._need_open(seq)
        fresh = self.layout.blocks_for(upto) - len(seq.table)
        if fresh <= 0:
            return True
        if fresh > self.available_blocks():
            return False
        seq.table += self._take(fresh)
        return True

    def writable_from(self, seq: SequenceCache) -> int:
        """Write floor in tokens: every block below it is shared or may be, and must not change any more."""
        return seq.committed * self.layout.block_tokens

    def contents(self, seq: SequenceCache) -> tuple[int, ...]:
        """What the committed blocks hold, a number each: the same number later means the very same bytes. 0 for a private block."""
        return tuple(self.index.serial(block) for block in seq.table[: seq.committed])

    def commit(self, seq: SequenceCache, tokens: Sequence[int], upto: int) -> list[Committed]:
        """Declare the entries of all positions below `upto` written and final; full blocks among them become reusable.

        `tokens` is the whole history, at least `upto` long. Returns the blocks cached by this call. A block whose key is cached already
        stays private, unless it has fewer replays behind it: the sequence keeps reading its own bytes, so its output does not depend on
        who came first.
        """
        self._need_open(seq)
        size = self.layout.block_tokens
        if upto > len(tokens) or upto > len(seq.table) * size:
            raise CacheBookkeepingError(f"commit of {upto} tokens exceeds the {len(tokens)} known or the {len(seq.table)} blocks held")
        if seq.loading:
            raise CacheBookkeepingError(f"blocks {seq.loading} are still to be loaded")
        full = upto // size
        cached: list[Committed] = []
        if full > seq.committed:
            if self.prefix_reuse:
                seq.chain.extend(tokens, upto)
                cached = self._register(seq, full)
            seq.committed = full
        return cached

    def release(self, seq: SequenceCache, keep: bool = True) -> None:
        """Give back everything; committed blocks stay cached until evicted. The handle can be opened again (preemption, retry).

        With `keep` False the blocks that this sequence computed leave the cache as well, unless others use them by now (for a
        sequence whose results cannot be trusted). Releasing a sequence that is not open does nothing.
        """
        if not seq.is_open:
            return
        if seq.loading:
            self.pool.copies.fence()  # whoever gets its blocks next must not be overtaken by copies into them
        self.index.release(seq.table)
        if keep:
            # Its private copies of blocks cached by others are gone; the cached ones were as recently wanted.
            self.index.touch(seq.chain.keys[: seq.committed])
        else:
            self.index.forget(seq.table[seq.own_from :])
        self.windows.release(seq.slot)
        seq.table = []
        seq.slot = NULL_SLOT
        seq.plan = None
        seq.committed = 0
        seq.loading = range(0)

    def clear(self) -> None:
        """Forget every cached prefix. Running sequences keep their blocks."""
        self.index.clear()

    def stats(self) -> CacheStats:
        cached = self.index.evictable
        return CacheStats(
            total=self.pool.total,
            free=self.pool.free,
            used=self.pool.total - self.pool.free - cached,
            cached=cached,
            indexed=len(self.index),
            windows_total=self.windows.total,
            windows_used=self.windows.total - self.windows.free,
            hits=self.index.hits,
            misses=self.index.misses,
            evictions=self.index.evictions,
        )

    def check(self, open_sequences: Sequence[SequenceCache]) -> None:
        """Raise CacheBookkeepingError unless every reference and slot has exactly the owners it should. For tests.

        `open_sequences` are all open sequences.
        """
        self.pool.check()
        self.windows.check()
        self.index.check()
        owners = [0] * (self.pool.total + 1)
        for seq in open_sequences:
            for block in seq.table:
                owners[block] += 1
        for block in range(self.pool.total + 1):
            expected = owners[block] + self.index.holds(block)
            if self.pool.references(block) != expected:
                raise CacheBookkeepingError(f"block {block} has {self.pool.references(block)} references, {expected} owners")
        slots = sorted(seq.slot for seq in open_sequences)
        if len(set(slots)) != len(slots) or NULL_SLOT in slots or len(slots) != self.windows.total - self.windows.free:
            raise CacheBookkeepingError(f"window slots {slots} do not match the {self.windows.total - self.windows.free} in use")
        if owners[NULL_BLOCK]:
            raise CacheBookkeepingError("a block table names the null block")

    def _take(self, n: int) -> list[int]:
        """Allocate `n` blocks that `available_blocks` has promised."""
        self.index.evict(n - self.pool.free)
        blocks = self.pool.allocate(n)
        if self.poison and blocks:
            self.pool.poison(blocks)
        return blocks

    def _register(self, seq: SequenceCache, full: int) -> list[Committed]:
        """Cache blocks [committed, full) of the table, and again any before them whose cached twin was evicted meanwhile."""
        assert seq.plan is not None
        keys, lineage = seq.chain.keys, seq.plan.lineage
        first = seq.committed
        while first and keys[first - 1] not in self.index:
            first -= 1
        cached = []
        for i in range(first, full):
            block = seq.table[i]
            if not self.index.holds(block) and self.index.insert(keys[i], keys[i - 1] if i else None, block, lineage) == block:
                cached.append(Committed(block, keys[i], i, lineage))
        return cached

    def _need_open(self, seq: SequenceCache) -> None:
        if not seq.is_open:
            raise CacheBookkeepingError("the sequence is not open")
