from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Sequence

import pytest
from blake3 import blake3
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.cache.blocks import BlockPool, CacheBookkeepingError
from forebay.cache.layout import KVLayout
from forebay.cache.prefix import ImageSpan, KeyChain, PrefixIndex, block_key, root_key
from forebay.cache.records import tenant_id

LAYOUT = KVLayout(
    block_tokens=1, window=1, layers=1, encoder_layers=1, head_dim=32, index_head_dim=32, sources=(), block_bytes=4, entry_bytes=4,
    window_row_bytes=33, gated=(), open_rows=0,
)  # fmt: skip


def chain(root: bytes, tokens: list[int], block: int = 4, images: tuple[ImageSpan, ...] = ()) -> list[bytes]:
    keys = KeyChain(root, block, images)
    keys.extend(tokens)
    return keys.keys


def cached(index: PrefixIndex, names: list[bytes], lineages: Sequence[int] | None = None) -> list[int]:
    """Cache a chain computed by a sequence that is gone by now."""
    blocks = index.pool.allocate(len(names))
    for i, (name, block) in enumerate(zip(names, blocks, strict=True)):
        assert index.insert(name, names[i - 1] if i else None, block, lineages[i] if lineages else 0) == block
    index.release(blocks)
    index.check()
    return blocks


def test_key_is_the_documented_digest() -> None:
    root = root_key("model", "layout", "salt")
    image = bytes(range(32))
    assert len(root) == 32
    assert block_key(root, [1, 70000, 2], [image]) == blake3(root + struct.pack("<3I", 1, 70000, 2) + image).digest()
    assert chain(root, [1, 2, 3, 4, 5]) == [block_key(root, [1, 2, 3, 4])]


def test_keys_do_not_depend_on_the_process() -> None:
    code = (
        "from forebay.cache.prefix import KeyChain, root_key\n"
        "c = KeyChain(root_key('model', 'layout', 'tenant'), 4); c.extend(list(range(8))); print(c.keys[-1].hex())"
    )
    seen = set()
    for seed in ("0", "12345"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        seen.add(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout.strip())
    assert seen == {chain(root_key("model", "layout", "tenant"), list(range(8)))[-1].hex()}


def test_chains_are_separated_by_everything_bytes_depend_on() -> None:
    tokens = list(range(12))
    base = ("model", "layout", "salt")
    names = [chain(root_key(*base), tokens)]
    for changed in (("model2", "layout", "salt"), ("model", "layout2", "salt"), ("model", "layout", "salt2"), ("model", "layout", "")):
        names.append(chain(root_key(*changed), tokens))
    names.append(chain(root_key("modell", "ayout", "salt"), tokens))  # parts must not run into each other
    names.append(chain(root_key("model", "layoutsalt", ""), tokens))
    names.append(chain(root_key(*base), [99, *tokens[1:]]))  # another first token changes all later keys
    flat = [key for keys in names for key in keys]
    assert len(set(flat)) == len(flat) == 3 * len(names)


def test_keys_grow_incrementally() -> None:
    root = root_key("m", "l", "s")
    tokens = list(range(30))
    keys = KeyChain(root, 4)
    for upto in (3, 4, 5, 17, 17, 30):
        keys.extend(tokens, upto)
        assert keys.keys == chain(root, tokens)[: upto // 4]


@pytest.mark.case("B036")
def test_image_identity_is_the_full_digest() -> None:
    root, tokens = root_key("m", "l", "s"), [7] * 16
    one, other = bytes(30) + b"zz", bytes(29) + b"1zz"  # equal in the last 16 bits
    plain = chain(root, tokens)
    with_one = chain(root, tokens, images=(ImageSpan(5, 11, one),))
    with_other = chain(root, tokens, images=(ImageSpan(5, 11, other),))
    assert plain[0] == with_one[0] == with_other[0]  # before the image, the prefix is shared
    assert len({plain[1], with_one[1], with_other[1]}) == 3
    assert len({plain[3], with_one[3], with_other[3]}) == 3
    assert with_one[1] == block_key(with_one[0], tokens[4:8], [one, struct.pack("<2q", 1, 7)])
    # An image is named in every block it reaches into.
    assert with_one[2] == block_key(with_one[1], tokens[8:12], [one, struct.pack("<2q", -3, 3)])
    assert with_one[3] == block_key(with_one[2], tokens[12:16])
    swapped = [chain(root, tokens, images=(ImageSpan(0, 2, a), ImageSpan(2, 4, b)))[0] for a, b in ((one, other), (other, one))]
    assert swapped[0] != swapped[1]
    moved = chain(root, tokens, images=(ImageSpan(6, 12, one),))
    assert moved[1] != with_one[1]  # the same tokens and picture, but elsewhere
    with pytest.raises(ValueError, match="32 bytes"):
        ImageSpan(0, 2, b"ab")


def test_match_finds_the_longest_chain_and_changes_nothing() -> None:
    index = PrefixIndex(BlockPool(LAYOUT, 10))
    root = root_key("m", "l", "s")
    names = chain(root, list(range(16)))
    blocks = cached(index, names)
    for n in range(5):
        assert index.match(chain(root, [*range(4 * n), 50, 51, 52, 53])) == blocks[:n]
    assert index.match(names[1:]) == blocks[1:]  # callers pass chains from the root; keys alone decide
    assert (index.hits, index.misses) == (0, 0)
    assert index.evict(1) == 1
    assert index.match(names) == blocks[:3]


def test_first_block_under_a_key_stays() -> None:
    pool = BlockPool(LAYOUT, 10)
    index = PrefixIndex(pool)
    (first,) = cached(index, [b"a"])
    (second,) = pool.allocate(1)
    assert index.insert(b"a", None, second) == first
    assert pool.references(second) == 1
    index.release([second])
    assert (pool.references(second), index.match([b"a"])) == (0, [first])
    index.check()


def test_wrong_inserts_are_refused() -> None:
    pool = BlockPool(LAYOUT, 10)
    index = PrefixIndex(pool)
    (one,) = pool.allocate(1)
    with pytest.raises(CacheBookkeepingError, match="parent"):
        index.insert(b"b", b"a", one)
    index.insert(b"a", None, one)
    with pytest.raises(CacheBookkeepingError, match="another key"):
        index.insert(b"c", None, one)
    index.release([one])
    with pytest.raises(CacheBookkeepingError):
        index.insert(b"d", None, 5)  # a free block
    index.check()


@pytest.mark.case("B020")
def test_tails_leave_before_heads_and_old_before_new() -> None:
    index = PrefixIndex(BlockPool(LAYOUT, 20))
    long = [b"l%d" % i for i in range(6)]
    young = [b"y%d" % i for i in range(3)]
    branch = [*long[:2], b"b2", b"b3"]
    cached(index, long)
    cached(index, young)
    shared = index.match(long[:2])
    index.acquire(shared)
    blocks = index.pool.allocate(2)
    index.insert(b"b2", b"l1", blocks[0])
    index.insert(b"b3", b"b2", blocks[1])
    index.release(shared + blocks)
    index.check()
    order = []
    while index.evictable:
        before = {key for key in (*long, *young, *branch) if key in index}
        assert index.evict(1) == 1
        index.check()
        order += [key for key in before if key not in index]
    assert order == [b"l5", b"l4", b"l3", b"l2", b"y2", b"y1", b"y0", b"b3", b"b2", b"l1", b"l0"]
    assert index.evictions == 11
    assert index.evict(5) == 0
    assert index.pool.free == index.pool.total


def test_blocks_in_use_and_what_leads_to_them_cannot_be_evicted() -> None:
    index = PrefixIndex(BlockPool(LAYOUT, 20))
    names = [b"%d" % i for i in range(5)]
    blocks = cached(index, names)
    index.acquire(blocks[2:3])  # a user of a middle block alone: 0 and 1 lead to it
    index.check()
    assert index.evictable == 2
    assert index.evict(99) == 2
    assert index.match(names) == blocks[:3]
    index.release(blocks[2:3])
    index.check()
    assert index.evictable == 3


def test_touch_renews_a_whole_chain() -> None:
    index = PrefixIndex(BlockPool(LAYOUT, 20))
    old, new = [b"o0", b"o1"], [b"n0", b"n1"]
    cached(index, old)
    cached(index, new)
    index.touch(old)
    index.check()
    index.evict(2)
    assert [key in index for key in (*old, *new)] == [True, True, False, False]


def test_a_lone_block_that_no_request_could_adopt_leaves_first() -> None:
    index = PrefixIndex(BlockPool(LAYOUT, 20), least_hit=2)
    cached(index, [b"a0", b"a1"])
    cached(index, [b"lone"])
    index.evict(1)
    assert b"lone" not in index
    index.evict(1)  # a1; now a0 is alone, and goes before a younger chain's tail
    cached(index, [b"b0", b"b1"])
    index.touch([b"a0"])
    index.check()
    index.evict(1)
    assert b"a0" not in index
    assert len(index) == 2


def test_forget_and_clear() -> None:
    pool = BlockPool(LAYOUT, 20)
    index = PrefixIndex(pool)
    names = [b"%d" % i for i in range(4)]
    blocks = cached(index, names)
    index.acquire(blocks[:2])
    assert index.forget(blocks[1:]) == 2  # stops at the block in use
    index.check()
    assert index.match(names) == blocks[:2]
    index.clear()
    index.check()
    assert (len(index), index.evictable, pool.free) == (0, 0, pool.total - 2)
    index.release(blocks[:2])
    assert pool.free == pool.total


def test_tenants_have_names_that_do_not_tell_their_salts() -> None:
    names = [tenant_id(salt) for salt in ("", "a", "b", "a ", "\ud800")]
    assert len(set(names)) == 5
    assert {len(name) for name in names} == {16}
    assert tenant_id("a") == blake3(b"forebay tenant" + b"a").digest()[:16]


# Lineage


def test_a_chain_ends_for_those_who_want_fewer_replays_behind_it() -> None:
    index = PrefixIndex(BlockPool(LAYOUT, 10))
    names = [b"%d" % i for i in range(5)]
    blocks = cached(index, names, [0, 1, 1, 3, 0])
    assert [index.lineage(block) for block in blocks] == [0, 1, 1, 3, 0]
    assert index.match(names) == blocks
    for most, count in ((0, 1), (1, 3), (2, 3), (3, 5), (9, 5)):
        assert index.match(names, most) == blocks[:count]
    assert [index.find(name) for name in (*names, b"other")] == [*blocks, None]
    (free,) = index.pool.allocate(1)
    assert (index.lineage(free), index.serial(free)) == (0, 0)


@pytest.mark.parametrize(("old", "new", "replaced"), [(2, 0, True), (2, 1, True), (2, 2, False), (1, 2, False), (0, 0, False)])
def test_only_bytes_with_fewer_replays_behind_them_replace_cached_ones(old: int, new: int, replaced: bool) -> None:
    pool = BlockPool(LAYOUT, 10)
    index = PrefixIndex(pool)
    names = [b"a", b"b", b"c"]
    blocks = cached(index, names, [old] * 3)
    serials = [index.serial(block) for block in blocks]
    (better,) = pool.allocate(1)
    kept = better if replaced else blocks[1]
    assert index.insert(b"b", b"a", better, new) == kept
    index.check()
    assert index.match(names) == [blocks[0], kept, blocks[2]]
    assert index.lineage(kept) == min(old, new)
    assert (index.serial(kept) == serials[1]) == (not replaced)
    assert index.serial(blocks[1]) == (0 if replaced else serials[1])
    assert pool.references(blocks[1]) == (0 if replaced else 1)
    assert index.evictable == (1 if replaced else 3)  # the new one's user holds what leads to it
    index.release([better])
    index.check()
    assert index.evictable == 3
    assert index.evict(9) == 3
    assert pool.free == pool.total


def test_users_of_a_replaced_block_keep_it_and_what_follows() -> None:
    pool = BlockPool(LAYOUT, 10)
    index = PrefixIndex(pool)
    names = [b"a", b"b", b"c"]
    old = cached(index, names, [1, 1, 1])
    index.acquire(old)  # one that reads all three
    new = pool.allocate(2)
    assert [index.insert(names[i], names[i - 1] if i else None, new[i], 0) for i in (0, 1)] == new
    index.check()
    assert [pool.references(block) for block in (*old, *new)] == [1, 1, 2, 2, 2]
    assert [index.holds(block) for block in old] == [False, False, True]
    assert index.evict(9) == 0
    index.release(new)  # the one that computed better ones leaves; the reader's last block still needs them
    index.check()
    assert (index.evictable, index.match(names)) == (0, [*new, old[2]])
    assert [pool.references(block) for block in old] == [1, 1, 2]
    index.release(old)
    index.check()
    assert [pool.references(block) for block in (*old, *new)] == [0, 0, 1, 1, 1]
    assert index.evictable == 3
    order = []
    while index.evictable:
        index.evict(1)
        index.check()
        order.append(len(index))
    assert order == [2, 1, 0]
    assert pool.free == pool.total


def test_a_reader_of_the_old_block_leaves_before_the_new_ones_user() -> None:
    pool = BlockPool(LAYOUT, 10)
    index = PrefixIndex(pool)
    (old,) = cached(index, [b"a"], [1])
    index.acquire([old])
    (new,) = pool.allocate(1)
    assert index.insert(b"a", None, new, 0) == new
    index.acquire([new])  # a second one adopts it
    index.release([old])
    index.check()
    assert (pool.references(old), pool.references(new), index.evictable) == (0, 3, 0)
    index.release([new])
    index.check()
    assert index.evictable == 0
    index.release([new])
    index.check()
    assert index.evictable == 1


def test_a_block_that_is_cached_already_replaces_none() -> None:
    pool = BlockPool(LAYOUT, 10)
    index = PrefixIndex(pool)
    blocks = cached(index, [b"a", b"b"], [1, 0])
    index.acquire(blocks[1:])
    assert index.insert(b"a", None, blocks[1], 0) == blocks[0]
    index.check()
    assert index.match([b"a", b"b"]) == blocks


class IndexMachine(RuleBasedStateMachine):
    """Readers and writers of chains over two letters, with replays behind them, against a list of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(BlockPool(LAYOUT, 15), least_hit=2)
        self.tables: list[list[int]] = []
        self.lineages: dict[int, int] = {}  # serial -> replays behind these bytes
        self.best: dict[bytes, int] = {}

    @staticmethod
    def names(word: str) -> list[bytes]:
        return [word[: i + 1].encode() for i in range(len(word))]

    words = st.text("ab", min_size=1, max_size=5)

    @rule(word=words, lineage=st.integers(0, 2), most=st.sampled_from([None, 0, 1]))
    def run(self, word: str, lineage: int, most: int | None) -> None:
        """A sequence adopts what it can and computes the rest."""
        names, index = self.names(word), self.index
        hit = index.match(names, most)
        assert all(most is None or index.lineage(block) <= most for block in hit)
        index.acquire(hit)
        fresh = len(names) - len(hit)
        if fresh > index.pool.free + index.evictable:
            index.release(hit)
            return
        index.evict(fresh - index.pool.free)
        table = hit + index.pool.allocate(fresh)
        for i in range(len(hit), len(names)):
            if i and names[i - 1] not in index:
                break
            before = index.find(names[i])
            behind = index.lineage(before) if before is not None else None
            named = index.insert(names[i], names[i - 1] if i else None, table[i], lineage)
            assert named == (table[i] if behind is None or lineage < behind else before)
            if named == table[i]:
                self.lineages[index.serial(named)] = lineage
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), forget=st.booleans())
    def end(self, data: st.DataObject, forget: bool) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.index.release(table)
        if forget:
            self.index.forget(table)

    @rule(n=st.integers(1, 3))
    def evict(self, n: int) -> None:
        self.index.evict(n)

    @rule(word=words)
    def touch(self, word: str) -> None:
        self.index.touch(self.names(word))

    @rule()
    def clear(self) -> None:
        self.index.clear()

    @invariant()
    def books_balance(self) -> None:
        index, pool = self.index, self.index.pool
        index.check()
        pool.check()
        owners = [0] * (pool.total + 1)
        for table in self.tables:
            for block in table:
                owners[block] += 1
        for block in range(1, pool.total + 1):
            assert pool.references(block) == owners[block] + index.holds(block)
            if index.holds(block):
                assert index.lineage(block) == self.lineages[index.serial(block)]
                if owners[block]:
                    assert not index.is_idle(block)

    @invariant()
    def all_that_is_not_needed_can_be_had(self) -> None:
        needed = {block for table in self.tables for block in table}
        free = self.index.pool.free + self.index.evictable
        led = {node.block for node in self.index._by_key.values() if node.active and node.block not in needed}
        assert free == self.index.pool.total - len(needed) - len(led)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
