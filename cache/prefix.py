"""The prefix index: which block holds the KV of which token history, and which cached block goes first when room is needed.

A block is named by a chained key over everything its bytes depend on: the model, layout and salt at the root, then block after block
the tokens and the images among them. Equal keys therefore mean equal histories, and one lookup per block finds the longest cached prefix.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from forebay.cache.blocks import BlockPool, CacheBookkeepingError

DIGEST_BYTES = 32


@dataclass(frozen=True)
class ImageSpan:
    """Placeholder tokens [start, stop) of one image, and the 32-byte digest of its pixels and of every option they were decoded with."""

    start: int
    stop: int
    digest: bytes

    def __post_init__(self) -> None:
        if len(self.digest) != DIGEST_BYTES:
            raise ValueError(f"an image digest has {DIGEST_BYTES} bytes, got {len(self.digest)}")


def root_key(fingerprint: str, layout_identity: str, salt: str) -> bytes:
    """Key before the first block: model fingerprint, `KVLayout.identity` and the tenant's salt, each length-prefixed."""
    digest = blake3(b"forebay prefix root")
    for part in (fingerprint, layout_identity, salt):
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<Q", len(raw)))
        digest.update(raw)
    return digest.digest()


def block_key(parent: bytes, tokens: Sequence[int], images: Iterable[bytes] = ()) -> bytes:
    """Key of a full block: blake3(parent key, tokens as little-endian u32, and of each image in order its digest and where it is).

    The number of tokens is fixed by the layout in the root and what an image adds has a fixed length, so the fields cannot run into each
    other. Where it is counts, since the placeholder's id alone may be text.
    """
    return blake3(b"".join((parent, struct.pack(f"<{len(tokens)}I", *tokens), *images))).digest()


class KeyChain:
    """Keys of the full blocks of one growing token list, computed once per block.

    Attributes:
        keys: one 32-byte key per full block seen so far.
    """

    def __init__(self, root: bytes, block_tokens: int, images: Sequence[ImageSpan] = ()) -> None:
        self.root = root
        self.block_tokens = block_tokens
        self.images = tuple(images)
        self.keys: list[bytes] = []

    def extend(self, tokens: Sequence[int], upto: int | None = None) -> None:
        """Add the keys of the full blocks within the first `upto` tokens; `tokens` is the whole history and only ever grows."""
        size = self.block_tokens
        for i in range(len(self.keys), (len(tokens) if upto is None else upto) // size):
            start, stop = i * size, (i + 1) * size
            shown = [image for image in self.images if image.start < stop and image.stop > start]
            parts = (part for image in shown for part in (image.digest, struct.pack("<2q", image.start - start, image.stop - start)))
            self.keys.append(block_key(self.keys[-1] if self.keys else self.root, tokens[start:stop], parts))


class _Node:
    """A cached block. `active` counts why it must stay: sequences use it (counted once), and children that must stay.

    `serial` is never given twice: it names these bytes, where `key` only names what they stand for. `lineage` counts the bounded replays
    behind them.
    """

    __slots__ = ("active", "block", "children", "key", "lineage", "parent", "serial")

    def __init__(self, key: bytes, block: int, parent: _Node | None, serial: int, lineage: int) -> None:
        self.key = key
        self.serial = serial
        self.lineage = lineage
        self.block = block
        self.parent = parent
        self.children = 0
        self.active = 0


class PrefixIndex:
    """Map from key to block, with one reference of its own on each, and an LRU over the blocks nobody needs.

    A block is evictable when no sequence references it or any block after it. The LRU keeps every block before its parent, so the
    oldest tail always leaves first and a chain never loses its head. References on blocks that may be cached are taken and dropped
    through `acquire` and `release`, never on the pool itself, so that the index sees them. All operations are O(1) per block.

    Attributes:
        hits, misses: blocks of admitted prompts found and not found (see `count`).
        evictions: blocks evicted for room.
        gains: changes so far by which a sequence may need less room although no block was added to its cached prefix: keys that name
            better bytes, and idle blocks taken into use.
    """

    def __init__(self, pool: BlockPool, least_hit: int = 1) -> None:
        """`least_hit` is the shortest chain worth adopting; a lone block that cannot be part of one is evicted before any other."""
        self.pool = pool
        self.least_hit = least_hit
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.gains = 0
        self._by_key: dict[bytes, _Node] = {}
        self._by_block: dict[int, _Node] = {}
        self._idle: OrderedDict[int, _Node] = OrderedDict()  # by block id, first to leave first
        self._serials = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    @property
    def evictable(self) -> int:
        """Blocks that `evict` can free right now, all of them."""
        return len(self._idle)

    def holds(self, block: int) -> bool:
        """Whether the block is cached, so that one of its references is the index's."""
        return block in self._by_block

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def serial(self, block: int) -> int:
        """Number of the cached content of `block`, 0 if it is not cached. The same number later means the same bytes."""
        node = self._by_block.get(block)
        return node.serial if node is not None else 0

    def serial_of(self, key: bytes) -> int:
        """`serial` of the block cached under `key`, 0 if there is none."""
        node = self._by_key.get(key)
        return node.serial if node is not None else 0

    def lineage(self, block: int) -> int:
        """Bounded replays behind a cached block; 0 if it is not cached."""
        node = self._by_block.get(block)
        return node.lineage if node is not None else 0

    def find(self, key: bytes) -> int | None:
        """The block cached under `key`."""
        node = self._by_key.get(key)
        return node.block if node is not None else None

    def match(self, keys: Sequence[bytes], max_lineage: int | None = None) -> list[int]:
        """Blocks of the longest cached chain that `keys` starts with, up to the first with more than `max_lineage` replays behind it.

        Changes nothing; `acquire` what is used.
        """
        blocks = []
        for key in keys:
            node = self._by_key.get(key)
            if node is None or (max_lineage is not None and node.lineage > max_lineage):
                break
            blocks.append(node.block)
        return blocks

    def count(self, hits: int, misses: int) -> None:
        """Count the outcome of one admission, in blocks. Apart from `match`, because a waiting request matches many times."""
        self.hits += hits
        self.misses += misses

    def acquire(self, blocks: Sequence[int]) -> None:
        """Reference blocks for a sequence, heads first; they cannot be evicted until released."""
        self.pool.retain(blocks)
        for block in blocks:
            node = self._by_block.get(block)
            if node is not None and self.pool.references(block) == 2:
                self.gains += 1
                self._activate(node)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a sequence's references on its table (heads first); cached blocks become evictable, others free."""
        for block in reversed(blocks):
            self.pool.release((block,))
            node = self._by_block.get(block)
            if node is not None and self.pool.references(block) == 1:
                self._deactivate(node)

    def insert(self, key: bytes, parent: bytes | None, block: int, lineage: int = 0) -> int:
        """Cache `block`, which the caller references, under `key`; `parent` is the previous block's key, None for the first block.

        Returns:
            The block that `key` names from now on: `block`, or the one cached under this key already. That one stays unless it has more
            replays behind it than `block`; then it leaves the cache, and whoever uses it keeps it as a private block.

        Raises:
            CacheBookkeepingError: the parent is not cached, or the block is free or cached under another key.
        """
        known = self._by_key.get(key)
        if known is not None:
            if lineage < known.lineage and block not in self._by_block:
                self._replace(known, block, lineage)
            return known.block
        above = None
        if parent is not None:
            above = self._by_key.get(parent)
            if above is None:
                raise CacheBookkeepingError("the parent of a block must be cached before the block")
        if block in self._by_block:
            raise CacheBookkeepingError(f"block {block} is already cached under another key")
        self.pool.retain((block,))
        self._serials += 1
        node = self._by_key[key] = self._by_block[block] = _Node(key, block, above, self._serials, lineage)
        if above is not None:
            above.children += 1
        self._activate(node)
        return block

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make the longest cached chain of `keys` the last to be evicted."""
        for block in reversed(self.match(keys)):
            if block in self._idle:
                self._idle.move_to_end(block)
                self._demote_if_useless(self._by_block[block])

    def evict(self, n: int) -> int:
        """Free the `n` least recently used evictable blocks, tails before heads; returns how many were freed (all there are, if fewer)."""
        freed = max(0, min(n, len(self._idle)))
        for _ in range(freed):
            self._remove(next(iter(self._idle.values())))
        self.evictions += freed
        return freed

    def forget(self, blocks: Sequence[int]) -> int:
        """Drop released blocks of one table (heads first) from its end, as long as nothing uses or follows them; returns how many."""
        dropped = 0
        for block in reversed(blocks):
            node = self._by_block.get(block)
            if node is None:
                continue
            if node.active or node.children:
                break
            self._remove(node)
            dropped += 1
        return dropped

    def clear(self) -> None:
        """Forget every key. Blocks in use stay with their sequences, the rest is free."""
        blocks = list(self._by_block)
        self._by_key.clear()
        self._by_block.clear()
        self._idle.clear()
        self.pool.release(blocks)

    def check(self) -> None:
        """Raise CacheBookkeepingError unless all links, counts and the eviction order agree. O(cached blocks), for tests."""

        def need(condition: bool, message: str) -> None:
            if not condition:
                raise CacheBookkeepingError(message)

        children: dict[bytes, int] = {}
        active: dict[bytes, int] = {}
        for key, node in self._by_key.items():
            need(node.key == key and self._by_block.get(node.block) is node, f"block {node.block} is not linked both ways")
            need(self.pool.references(node.block) >= 1, f"cached block {node.block} has no reference")
            if node.parent is not None:
                need(self._by_key.get(node.parent.key) is node.parent, f"block {node.block} lost its parent")
                children[node.parent.key] = children.get(node.parent.key, 0) + 1
                active[node.parent.key] = active.get(node.parent.key, 0) + (node.active > 0)
        need(len(self._by_key) == len(self._by_block), "a block is cached under two keys")
        places = {block: place for place, block in enumerate(self._idle)}
        for key, node in self._by_key.items():
            used = self.pool.references(node.block) > 1
            need(node.children == children.get(key, 0), f"block {node.block} counts {node.children} children")
            need(node.active == active.get(key, 0) + used, f"block {node.block} counts {node.active} uses")
            need((node.block in places) == (node.active == 0), f"block {node.block} is evictable with {node.active} uses, or not without")
            if node.block in places and node.parent is not None and node.parent.block in places:
                need(places[node.block] < places[node.parent.block], f"block {node.parent.block} would leave before its tail {node.block}")

    def _replace(self, node: _Node, block: int, lineage: int) -> None:
        """Let a cached key name better bytes."""
        used = self.pool.references(node.block) > 1
        self.pool.retain((block,))
        if not used:
            self._activate(node)  # by the caller, who uses the new block; the old one's users hand their count over to it
        del self._by_block[node.block]
        self.pool.release((node.block,))
        self._serials += 1
        self.gains += 1
        node.block, node.serial, node.lineage = block, self._serials, lineage
        self._by_block[block] = node

    def _activate(self, node: _Node | None) -> None:
        while node is not None:
            node.active += 1
            if node.active > 1:
                return
            self._idle.pop(node.block, None)
            node = node.parent

    def _deactivate(self, node: _Node | None) -> None:
        while node is not None:
            node.active -= 1
            if node.active:
                return
            self._idle[node.block] = node
            self._demote_if_useless(node)
            node = node.parent

    def _remove(self, node: _Node) -> None:
        if node.children or node.active:
            raise CacheBookkeepingError(f"block {node.block} is needed and cannot be evicted")
        del self._idle[node.block]
        del self._by_key[node.key]
        del self._by_block[node.block]
        if node.parent is not None:
            node.parent.children -= 1
            if node.parent.block in self._idle:
                self._demote_if_useless(node.parent)
        self.pool.release((node.block,))

    def _demote_if_useless(self, node: _Node) -> None:
        """A first block with nothing behind it can never be adopted when hits need two, so it should not cost anyone a useful block."""
        if self.least_hit > 1 and node.parent is None and not node.children:
            self._idle.move_to_end(node.block, last=False)
