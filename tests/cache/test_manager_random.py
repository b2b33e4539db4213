"""Random sessions against a model of what every block holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.cache.blocks import BlockPool
from forebay.cache.layout import KVLayout
from forebay.cache.manager import CacheManager, SequenceCache
from forebay.cache.windows import WindowPool

WINDOW = BLOCK = 4
BLOCKS = 14
WINDOWS = 3
LAYOUT = KVLayout(
    block_tokens=BLOCK, window=WINDOW, layers=1, head_dim=32, index_head_dim=32, sources=(), block_bytes=1, entry_bytes=1,
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

    def history(self, position: int) -> History:
        return self.salt, tuple(self.tokens[: position + 1])


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.manager = CacheManager(LAYOUT, BlockPool(LAYOUT, BLOCKS + 1), Windows(WINDOWS + 1), "model")
        self.sessions: list[Session] = []
        self.stored: dict[int, dict[int, History]] = {}  # block -> offset -> what was written there last
        self.frozen: dict[bytes, dict[int, History]] = {}  # cached key -> what its block held when it was cached
        self.evictions = 0

    def running(self) -> list[Session]:
        return [s for s in self.sessions if s.cache.is_open]

    def waiting(self) -> list[Session]:
        return [s for s in self.sessions if not s.cache.is_open]

    def admit(self, session: Session) -> None:
        manager = self.manager
        known = manager.index.match(self.keys(session))
        before = (manager.stats(), list(manager.pool._references), list(manager.index._idle))
        plan = manager.open(session.cache, session.tokens)
        if plan is None:
            assert (manager.stats(), list(manager.pool._references), list(manager.index._idle)) == before
            assert not session.cache.table
            # Alone in the machine, whatever fits is admitted.
            assert self.running() or manager.never_fits(len(session.tokens))
            return
        assert not manager.never_fits(len(session.tokens))
        session.adopted = set(session.cache.table[: plan.resume // BLOCK])
        assert session.cache.table[: plan.resume // BLOCK] == known[: plan.resume // BLOCK]
        assert plan.resume < len(session.tokens)
        assert plan.resume == 0 or (plan.resume > WINDOW and plan.replayed == WINDOW)
        assert len(session.cache.table) * BLOCK >= len(session.tokens)
        for position in range(plan.resume):
            block = session.cache.table[position // BLOCK]
            assert self.stored[block][position % BLOCK] == session.history(position), "a hit returned another history's entries"
        session.computed = plan.resume

    def keys(self, session: Session) -> list[bytes]:
        other = self.manager.sequence(session.salt)
        other.chain.extend(session.tokens)
        return other.chain.keys

    @rule(salt=st.sampled_from(["", "b"]), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=BLOCK * (BLOCKS + 1)))
    def arrive(self, salt: str, tokens: list[int]) -> None:
        session = Session(salt, tokens, self.manager.sequence(salt))
        self.sessions.append(session)
        self.admit(session)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), suffix=st.lists(st.integers(0, 1), max_size=BLOCK * 3))
    def continue_like(self, data: st.DataObject, suffix: list[int]) -> None:
        """A request that shares a prefix with an earlier one."""
        source = data.draw(st.sampled_from(self.sessions))
        cut = data.draw(st.integers(0, len(source.tokens)))
        tokens = [*source.tokens[:cut], *suffix]
        if tokens:
            session = Session(source.salt, tokens, self.manager.sequence(source.salt))
            self.sessions.append(session)
            self.admit(session)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        self.admit(data.draw(st.sampled_from(self.waiting())))

    @precondition(lambda self: self.running())
    @rule(data=st.data(), n=st.integers(1, 2 * BLOCK + 1), commit=st.booleans())
    def compute(self, data: st.DataObject, n: int, commit: bool) -> None:
        session = data.draw(st.sampled_from(self.running()))
        cache = session.cache
        stop = min(session.computed + n, len(session.tokens))
        assert self.manager.writable_from(cache) <= session.computed
        for position in range(session.computed, stop):
            block = cache.table[position // BLOCK]
            assert block not in session.adopted
            self.stored.setdefault(block, {})[position % BLOCK] = session.history(position)
        session.computed = stop
        if commit:
            new = self.manager.commit(cache, session.tokens, stop)
            for block in new:
                place = cache.table.index(block)
                assert (place + 1) * BLOCK <= stop
                self.frozen[cache.chain.keys[place]] = dict(self.stored[block])
            assert self.manager.writable_from(cache) == stop // BLOCK * BLOCK

    @precondition(lambda self: self.running())
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=BLOCK * 4))
    def generate(self, data: st.DataObject, tokens: list[int]) -> None:
        session = data.draw(st.sampled_from(self.running()))
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

    @rule()
    def clear(self) -> None:
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
        for key, node in self.manager.index._by_key.items():
            assert self.stored[node.block] == self.frozen[key]


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
