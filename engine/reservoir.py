"""The tiers beyond the device, as the engine uses them: what it computed goes to the SSD store, windows at block boundaries to Redis.

Nothing here waits for a disk or a server. Copies of blocks and windows are taken on the stepping thread, right after the step that
completed them and on its stream, so that no later step can change them; the rest happens on the tiers' own threads.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forebay.cache.blocks import BlockPool
from forebay.cache.embedded import EmbeddedRedis
from forebay.cache.manager import CacheManager, Committed
from forebay.cache.records import tenant_id
from forebay.cache.replay import kept_boundaries
from forebay.cache.restore import Restorer
from forebay.cache.snapshot import Snapshot
from forebay.cache.ssd import SsdStore, StoredBlock
from forebay.cache.swa import SwaPool
from forebay.engine.metrics import Metrics
from forebay.engine.sequence import Sequence

REMEMBERED = 65_536  # blocks used lately, so that one the store turns out to lack can be stored again
REPAIRED_AT_ONCE = 64  # blocks copied for that in one step
SINGLE_COPIES, LARGE_COPIES = 32, 4  # of a block or a window, and of many blocks, for which pinned memory is had from the start


log = logging.getLogger("forebay.engine")


def _harmless(work: Callable[..., None]) -> Callable[..., None]:
    """A tier that breaks costs what it would have kept, never a step: what it raises is logged."""

    @functools.wraps(work)
    def guarded(self: Reservoir, *args: Any, **named: Any) -> None:
        try:
            work(self, *args, **named)
        except Exception:
            log.exception("a tier failed in %s", work.__name__)

    return guarded


class Reservoir:
    """Owns the SSD store and the snapshot pool of one engine; either may be missing.

    Attributes:
        live: windows of running sequences, by the key of the block before the boundary (the scheduler reads it).
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        store: SsdStore | None = None,
        pool: SwaPool | None = None,
        embedded: EmbeddedRedis | None = None,
    ) -> None:
        self.manager, self.store, self.pool, self._embedded = manager, store, pool, embedded
        self.wake: Callable[[], None] = lambda: None
        self.restorer = Restorer(manager.geometry, store, pool, lambda: self.wake())
        self.live: dict[bytes, Snapshot] = {}
        self._used: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()
        self._reserve()

    @_harmless
    def _reserve(self) -> None:
        """Pinned memory for what a busy engine has on its way to the host at once; asking the system for it takes milliseconds."""
        layout, sizes = self.manager.layout, list[int]()
        if self.store is not None:
            sizes += [layout.block_bytes] * SINGLE_COPIES + [layout.block_bytes * REPAIRED_AT_ONCE] * LARGE_COPIES
        if self.pool is not None:
            sizes += [layout.window_bytes] * SINGLE_COPIES
        self.manager.pool.copies.reserve(sizes)

    @_harmless
    def store_blocks(self, sequence: Sequence, committed: SequenceOf[Committed]) -> None:
        """Hand newly cached blocks to the SSD store."""
        if self.store is None or not committed:
            return
        data, ready = _host_copy(self.manager.pool, [c.block for c in committed])
        blocks = [StoredBlock(c.key, c.depth, c.lineage) for c in committed]
        self.store.put(blocks, data.numpy(), tenant_id(sequence.request.salt), ready)

    @_harmless
    def used(self, sequence: Sequence) -> None:
        """The sequence resumes: its blocks were used just now, in the store too."""
        plan = sequence.cache.plan
        if self.store is None or plan is None or not plan.resume:
            return
        keys = sequence.cache.chain.keys[: plan.resume // self.manager.layout.block_tokens]
        tenant = tenant_id(sequence.request.salt)
        for depth, key in enumerate(keys):
            self._used[key] = (depth, tenant)
            self._used.move_to_end(key)
        while len(self._used) > REMEMBERED:
            self._used.popitem(last=False)
        self.store.touch([key for key in keys if key not in sequence.cache.from_ssd])

    @_harmless
    def repair(self) -> None:
        """Store again what was used on the device and turned out not to be in the store (a write was dropped, a record was damaged)."""
        if self.store is None:
            return
        by_tenant: dict[bytes, list[Committed]] = {}
        for key in self.store.take_missing(REPAIRED_AT_ONCE):
            block, known = self.manager.index.find(key), self._used.get(key)
            if block is not None and known is not None:
                depth, tenant = known
                by_tenant.setdefault(tenant, []).append(Committed(block, key, depth, self.manager.index.lineage(block)))
        if by_tenant:
            self.manager.pool.copies.fence()  # a block that has just been loaded may still be on its way in
        for tenant, found in by_tenant.items():
            data, ready = _host_copy(self.manager.pool, [c.block for c in found])
            self.store.put([StoredBlock(c.key, c.depth, c.lineage) for c in found], data.numpy(), tenant, ready)

    @_harmless
    def keep_window(self, sequence: Sequence, computed: int) -> None:
        """After a step: take what was copied on the way, copy the window of a generating sequence that stands on a block boundary, and
        lend both to others for as long as the sequence runs. Only the last two boundaries are kept once the prompt's are stored."""
        if self.pool is None or not self.manager.prefix_reuse:
            return
        size = self.manager.layout.block_tokens
        if computed not in sequence.copies and self.wants_window(sequence, computed):
            sequence.copies[computed] = self.manager.windows.copy(sequence.cache.slot)
        for boundary, data in sequence.copies.items():
            window = sequence.windows[boundary] = self._snapshot(sequence, boundary, data)
            lent = self.live.get(key := self._key(sequence, boundary))
            if lent is None or window.lineage < lent.lineage:
                self.live[key] = window
        sequence.copies.clear()
        for boundary in [b for b in sequence.windows if b < computed - 2 * size]:
            if boundary in sequence.stored or boundary > sequence.prompt_tokens:
                self._take_back(sequence, boundary)

    def wants_window(self, sequence: Sequence, computed: int) -> bool:
        """Whether the window of a generating sequence is to be copied, as it is when `computed` positions are."""
        if self.pool is None or not self.manager.prefix_reuse:
            return False
        boundary = computed > sequence.prompt_tokens and computed % self.manager.layout.block_tokens == 0
        return boundary and computed not in sequence.windows

    @_harmless
    def prompt_done(self, sequence: Sequence) -> None:
        """A prompt has its first token: its windows are worth a snapshot."""
        self._store_windows(sequence, kept_boundaries(sequence.prompt_tokens, self.manager.geometry), decoder_at=None)

    @_harmless
    def ended(self, sequence: Sequence, *, trusted: bool) -> None:
        """The sequence ends; call before its cache is released. What cannot be trusted is not stored, and taken back."""
        if trusted and sequence.cache.plan is not None:
            size = self.manager.layout.block_tokens
            if self.store is not None:
                # A chain is written in parts; its head must not look older than its tail, or it would be evicted first.
                self.store.touch(sequence.cache.chain.keys[: sequence.cache.committed])
            last = sequence.computed // size * size
            self._store_windows(sequence, [last - size, last], decoder_at=last)
        elif not trusted:
            if self.store is not None and sequence.cache.own_from is not None:
                self.store.drop(sequence.cache.chain.keys[sequence.cache.own_from :])
            if self.pool is not None:
                for boundary in sequence.stored:
                    self.pool.drop(self._key(sequence, boundary))
        for boundary in list(sequence.windows):
            self._take_back(sequence, boundary)

    def refresh(self, metrics: Metrics) -> None:
        """Bring the metrics of both tiers up to date."""
        if self.store is not None:
            metrics.ssd(self.store.stats(), *self.store.take_ages())
        if self.pool is not None:
            metrics.swa(self.pool.stats(), *self.pool.take_latencies())

    def close(self) -> None:
        """Write what is queued, for a few seconds at most, and stop."""
        self.restorer.close()
        self.manager.pool.copies.wait()
        if self.pool is not None:
            self.pool.close()
        if self._embedded is not None:
            self._embedded.stop()
        if self.store is not None:
            self.store.close()

    def _store_windows(self, sequence: Sequence, boundaries: SequenceOf[int], *, decoder_at: int | None) -> None:
        """`decoder_at`: the boundary whose decoder rows are stored too; an exact prefill needs those of every boundary."""
        if self.pool is None:
            return
        for boundary in boundaries:
            window = sequence.windows.get(boundary)
            if window is None:
                continue
            if boundary != decoder_at and sequence.mode != "exact":
                window = replace(window, decoder=None, decoder_floor=None)
            if boundary not in sequence.stored or window.decoder is not None:
                self.pool.put(self._key(sequence, boundary), window)
                sequence.stored.add(boundary)

    def _snapshot(self, sequence: Sequence, boundary: int, data: Tensor) -> Snapshot:
        """data [layers, window, row_bytes] u8: a sequence's window as it was at `boundary`."""
        plan, layout = sequence.cache.plan, self.manager.layout
        assert plan is not None
        host, ready = self.manager.pool.copies.download(data)
        rows = host.numpy()
        low = max(0, boundary - layout.window)
        whole = plan.decoder_window_from <= low
        # Every row of an exact prefill is exact, wherever its replay began.
        floor = 0 if sequence.mode == "exact" else plan.decoder_window_from
        return Snapshot(
            boundary=boundary,
            encoder_floor=low,
            decoder_floor=floor if whole else None,
            lineage=plan.lineage,
            encoder=rows[: layout.encoder_layers],
            decoder=rows[layout.encoder_layers :] if whole else None,
            ready=ready,
        )

    def _key(self, sequence: Sequence, boundary: int) -> bytes:
        return sequence.cache.chain.keys[boundary // self.manager.layout.block_tokens - 1]

    def _take_back(self, sequence: Sequence, boundary: int) -> None:
        """Lend a window no longer, and forget it."""
        window, key = sequence.windows.pop(boundary), self._key(sequence, boundary)
        if self.live.get(key) is window:
            del self.live[key]


def _host_copy(pool: BlockPool, blocks: SequenceOf[int]) -> tuple[Tensor, Callable[[], None] | None]:
    """Copies of blocks as they are now, [n, block_bytes] u8 on the host, and what to wait for before they are read (CUDA)."""
    places = torch.tensor(blocks)
    if not pool.data.is_cuda:
        return pool.data[places], None
    # Taken together on the steps' stream, before a later step can change them; ids that are not pinned would make the host wait for it.
    ids = torch.empty(places.shape, dtype=places.dtype, pin_memory=True).copy_(places)
    return pool.copies.download(pool.data.index_select(0, ids.to(pool.data.device, non_blocking=True)))
