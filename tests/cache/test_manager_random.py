"""Random sessions, with a store behind them, against a model of what every block holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.cache.blocks import BlockPool
from forebay.cache.layout import KVLayout
from forebay.cache.manager import BOUNDED, NOTHING, CacheManager, Offer, Policy, SequenceCache
from forebay.cache.replay import ResumePlan
from forebay.cache.windows import WindowPool

WINDOW = BLOCK = 4
BLOCKS = 20
WINDOWS = 4
LAYOUT = KVLayout(
    block_tokens=BLOCK, window=WINDOW, layers=3, encoder_layers=2, head_dim=32, index_head_dim=32, sources=(), block_bytes=1, entry_bytes=1,
    window_row_bytes=33, gated=(), open_rows=0,
)  # fmt: skip

# What a token's entry depends on: the salt and every token up to it.
History = tuple[str, tuple[int, ...]]


class Windows(WindowPool):
    """Slots without memory: the model configuration of the layout above does not exist."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots - 1, 0, -1))
        self._owned = bytearray(slots)


@dataclass
class Session:
    salt: str
    tokens: list[int]
    cache: SequenceCache
    computed: int = 0  # tokens whose entries are written
    adopted: set[int] = field(default_factory=set)
    policy: Policy = BOUNDED
    saved: tuple[tuple[int, ...], ResumePlan, list[int], int] | None = None  # contents, plan, blocks, computed

    def history(self, position: int) -> History:
        return self.salt, tuple(self.tokens[: position + 1])


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.manager = CacheManager(LAYOUT, BlockPool(LAYOUT, BLOCKS + 1), Windows(WINDOWS + 1), "model")
        self.sessions: list[Session] = []
        self.stored: dict[int, dict[int, History]] = {}  # block -> offset -> what was written there last
        self.frozen: dict[int, dict[int, History]] = {}  # serial of cached bytes -> what they are
        self.behind: dict[int, int] = {}  # serial -> most replays that can be behind them
        self.store: dict[bytes, tuple[int, dict[int, History]]] = {}  # key -> replays behind it, what it holds
        self.evictions = 0

    def running(self) -> list[Session]:
        return [s for s in self.sessions if s.cache.is_open]

    def computing(self) -> list[Session]:
        return [s for s in self.running() if not s.cache.loading]

    def restoring(self) -> list[Session]:
        return [s for s in self.running() if s.cache.loading]

    def waiting(self) -> list[Session]:
        return [s for s in self.sessions if not s.cache.is_open]

    def offer(self, session: Session, upto: int) -> Offer:
        """What the store has after what the device has."""
        keys, most = self.keys(session), session.policy.max_lineage
        held = len(self.manager.index.match(keys, most))
        found = list(takewhile(lambda k: k in self.store and (most is None or self.store[k][0] <= most), keys[held:]))[:upto]
        return Offer(held, [self.store[k][0] for k in found])

    def admit(self, session: Session, offer: Offer = NOTHING) -> None:
        manager = self.manager
        keys, most = self.keys(session), session.policy.max_lineage
        known = manager.index.match(keys, most)
        before = (manager.stats(), list(manager.pool._references), list(manager.index._idle))
        plan = manager.open(session.cache, session.tokens, policy=session.policy, offer=offer)
        session.saved = None
        if plan is None:
            assert (manager.stats(), list(manager.pool._references), list(manager.index._idle)) == before
            assert not session.cache.table
            # Alone in the machine, whatever fits is admitted.
            assert self.running() or manager.never_fits(len(session.tokens))
            return
        assert not manager.never_fits(len(session.tokens))
        here, resumed = session.cache.table, plan.resume // BLOCK
        adopted = here[: session.cache.loading.start if session.cache.loading else resumed]
        assert adopted == known[: len(adopted)]
        assert len(adopted) == min(len(known), resumed)
        session.adopted = set(adopted)
        behind = [manager.index.lineage(block) for block in adopted] + [self.store[keys[n]][0] for n in session.cache.loading]
        assert all(most is None or lineage <= most for lineage in behind)
        assert plan.lineage == max(behind, default=0) + plan.approximates
        assert plan.faithful or session.policy.replay == "bounded"
        assert plan.resume < len(session.tokens)
        assert plan.resume == 0 or plan.resume > WINDOW
        assert len(here) * BLOCK >= len(session.tokens)
        self.holds(session, len(adopted) * BLOCK)
        session.computed = plan.resume

    def holds(self, session: Session, upto: int) -> None:
        for position in range(upto):
            block = session.cache.table[position // BLOCK]
            assert self.stored[block][position % BLOCK] == session.history(position), "a hit returned another history's entries"

    def keys(self, session: Session) -> list[bytes]:
        other = self.manager.sequence(session.salt)
        other.chain.extend(session.tokens)
        return other.chain.keys

    policies = st.builds(Policy, replay=st.sampled_from(["bounded", "bounded", "exact"]), max_lineage=st.sampled_from([None, None, 0, 1]))

    # Few histories, so that they meet: a token says whether its block or one before it is of the second kind.
    histories = st.builds(
        lambda length, turn: [int(i // BLOCK >= turn) for i in range(length)],
        st.integers(1, BLOCK * 8) | st.integers(1, BLOCK * (BLOCKS + 1)),
        st.sampled_from([1, 3, 99]),
    )

    @rule(salt=st.sampled_from(["", "", "b"]), tokens=histories, policy=policies, times=st.integers(1, 2))
    def arrive(self, salt: str, tokens: list[int], policy: Policy, times: int) -> None:
        for _ in range(times):
            session = Session(salt, list(tokens), self.manager.sequence(salt), policy=policy)
            self.sessions.append(session)
            self.admit(session, self.offer(session, BLOCKS))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), suffix=st.lists(st.integers(0, 1), max_size=BLOCK * 3), policy=policies, upto=st.integers(0, BLOCKS))
    def continue_like(self, data: st.DataObject, suffix: list[int], policy: Policy, upto: int) -> None:
        """A request that shares a prefix with an earlier one, and is offered what the store has of it."""
        source = data.draw(st.sampled_from(self.sessions))
        cut = data.draw(st.integers(0, len(source.tokens)))
        tokens = [*source.tokens[:cut], *suffix]
        if tokens:
            session = Session(source.salt, tokens, self.manager.sequence(source.salt), policy=policy)
            self.sessions.append(session)
            self.admit(session, self.offer(session, upto))

    @rule(tokens=histories, policy=policies, reuse=st.booleans())
    def serve(self, tokens: list[int], policy: Policy, reuse: bool) -> None:
        """A whole request, with nobody else in between."""
        session = Session("", tokens, self.manager.sequence(), policy=policy)
        if reuse:
            self.admit(session)
        else:
            self.manager.open(session.cache, tokens, reuse=False)
        if session.cache.is_open:
            self.write(session, len(tokens), commit=True)
            self.manager.release(session.cache)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data(), upto=st.integers(0, BLOCKS))
    def retry(self, data: st.DataObject, upto: int) -> None:
        session = data.draw(st.sampled_from(self.waiting()))
        self.admit(session, self.offer(session, upto))

    @precondition(lambda self: self.restoring())
    @rule(data=st.data(), n=st.integers(1, 9))
    def load(self, data: st.DataObject, n: int) -> None:
        session = data.draw(st.sampled_from(self.restoring()))
        cache, keys, index = session.cache, self.keys(session), self.manager.index
        numbers = list(cache.loading)[:n]
        for number in numbers:
            lineage, entries = self.store[keys[number]]
            known, own = index.find(keys[number]), cache.table[number]
            shared = known is not None and index.lineage(known) <= lineage
            self.manager.load(cache, [(number, torch.tensor([number + 1], dtype=torch.uint8), lineage)])
            block = cache.table[number]
            assert block == (known if shared else own)
            if not shared:
                assert int(self.manager.pool.data[block, 0]) == number + 1
                self.stored[block] = dict(entries)
                if index.holds(block):
                    self.freeze(block, lineage)
            session.adopted.add(block)
        self.holds(session, (cache.loading.start if cache.loading else numbers[-1] + 1) * BLOCK)

    def freeze(self, block: int, lineage: int) -> None:
        serial = self.manager.index.serial(block)
        assert serial not in self.frozen
        self.frozen[serial], self.behind[serial] = dict(self.stored[block]), lineage

    @precondition(lambda self: self.computing())
    @rule(data=st.data(), n=st.integers(1, 6 * BLOCK + 1), commit=st.sampled_from([True, True, False]))
    def compute(self, data: st.DataObject, n: int, commit: bool) -> None:
        session = data.draw(st.sampled_from(self.computing()))
        self.write(session, min(session.computed + n, len(session.tokens)), commit=commit)

    def write(self, session: Session, stop: int, *, commit: bool) -> None:
        cache = session.cache
        assert self.manager.writable_from(cache) <= session.computed
        for position in range(session.computed, stop):
            block = cache.table[position // BLOCK]
            assert block not in session.adopted
            self.stored.setdefault(block, {})[position % BLOCK] = session.history(position)
        session.computed = stop
        if commit:
            for new in self.manager.commit(cache, session.tokens, stop):
                assert new.block == cache.table[new.depth]
                assert new.key == cache.chain.keys[new.depth]
                assert (new.depth + 1) * BLOCK <= stop
                assert cache.plan is not None
                assert new.lineage == cache.plan.lineage
                self.freeze(new.block, new.lineage)
                kept = self.store.get(new.key)
                if kept is None or new.lineage < kept[0]:
                    self.store[new.key] = new.lineage, dict(self.stored[new.block])
            assert self.manager.writable_from(cache) == stop // BLOCK * BLOCK

    @precondition(lambda self: self.computing())
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.computing()))
        cache = session.cache
        assert cache.plan is not None
        whole = session.computed >= self.manager.writable_from(cache)
        contents = self.manager.contents(cache)
        saved = contents, cache.plan, cache.table[: len(contents)], self.manager.writable_from(cache)
        self.manager.release(cache)
        session.computed, session.adopted = 0, set()
        session.saved = saved if whole and all(contents) else None

    @precondition(lambda self: any(s.saved for s in self.waiting()))
    @rule(data=st.data())
    def reopen(self, data: st.DataObject) -> None:
        """Back to the very bytes it had, or not at all."""
        session = data.draw(st.sampled_from([s for s in self.waiting() if s.saved]))
        assert session.saved is not None
        contents, plan, blocks, computed = session.saved
        manager, index = self.manager, self.manager.index
        before = (manager.stats(), list(manager.pool._references), list(index._idle))
        there = [index.serial(block) for block in index.match(self.keys(session)[: len(contents)])] == list(contents)
        opened = manager.reopen(session.cache, session.tokens, contents, plan)
        if opened:
            assert there
            assert session.cache.table[: len(contents)] == blocks
            assert session.cache.plan == plan
            self.holds(session, computed)
            session.computed, session.saved, session.adopted = computed, None, set(blocks)
            return
        assert opened is (None if there else False)
        assert (manager.stats(), list(manager.pool._references), list(index._idle)) == before
        if opened is False:
            session.saved = None

    @rule(data=st.data())
    def lose_stored(self, data: st.DataObject) -> None:
        restoring = {key for s in self.restoring() for key in self.keys(s)}
        keys = sorted(self.store.keys() - restoring)
        if keys:
            del self.store[data.draw(st.sampled_from(keys))]

    @precondition(lambda self: self.computing())
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=BLOCK * 4))
    def generate(self, data: st.DataObject, tokens: list[int]) -> None:
        session = data.draw(st.sampled_from(self.computing()))
        available, table = self.manager.available_blocks(), list(session.cache.table)
        need = max(0, LAYOUT.blocks_for(len(session.tokens) + len(tokens)) - len(table))
        if self.manager.ensure(session.cache, len(session.tokens) + len(tokens)):
            assert need <= available
            assert self.manager.available_blocks() == available - need
            session.tokens += tokens
        else:
            assert need > available
            assert (self.manager.available_blocks(), session.cache.table) == (available, table)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), keep=st.sampled_from([True, True, True, False]), again=st.booleans())
    def release(self, data: st.DataObject, keep: bool, again: bool) -> None:
        session = data.draw(st.sampled_from(self.running()))
        self.manager.release(session.cache, keep)
        session.computed = 0
        session.adopted = set()
        if not again:
            self.sessions.remove(session)

    @rule(n=st.integers(1, BLOCKS))
    def evict(self, n: int) -> None:
        self.manager.index.evict(n)

    @rule(chance=st.integers(0, 4))
    def clear(self, chance: int) -> None:
        if not chance:
            self.manager.clear()

    @invariant()
    def books_balance(self) -> None:
        manager = self.manager
        manager.check([s.cache for s in self.running()])
        stats = manager.stats()
        assert stats.free + stats.used + stats.cached == stats.total == BLOCKS
        assert min(stats.free, stats.used, stats.cached) >= 0
        assert manager.available_blocks() == stats.free + stats.cached
        assert stats.windows_used == len(self.running())
        assert stats.evictions >= self.evictions
        self.evictions = stats.evictions

    @invariant()
    def nobody_shares_what_may_be_written(self) -> None:
        seen: set[int] = set()
        for session in self.running():
            writable = session.cache.table[self.manager.writable_from(session.cache) // BLOCK :]
            assert not seen & set(writable)
            seen |= set(writable)
        for session in self.running():
            assert not seen & set(session.cache.table[: self.manager.writable_from(session.cache) // BLOCK])
        assert not any(self.manager.index.holds(block) for block in seen)

    @invariant()
    def cached_bytes_never_change(self) -> None:
        for node in self.manager.index._by_key.values():
            assert self.stored[node.block] == self.frozen[node.serial]
            assert node.lineage == self.behind[node.serial]


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
