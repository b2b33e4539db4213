"""Composes a step: decode rows first, then prefill rows within two budgets (architecture §4)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forebay.engine.sequence import Sequence


@dataclass(frozen=True)
class Row:
    """Positions [start, stop) of one sequence in a step.

    Positions below `write_from` are replay. Window attention of the encoder half reads keys from `window_from` on. Positions from
    `decoder_from` on run the decoder half, whose own floor is `decoder_window_from`. With `wants_logits` the last position is sampled.
    """

    sequence: Sequence
    start: int
    stop: int
    write_from: int
    window_from: int
    decoder_from: int
    decoder_window_from: int
    wants_logits: bool

    @property
    def decoder_rows(self) -> int:
        return max(0, self.stop - max(self.start, self.decoder_from))


class Batcher:
    """Turns running sequences into rows.

    `encoder_tokens` bounds the rows of a step, `decoder_tokens` those of them that run the decoder half: a prompt token costs half a
    network, a generated one all of it.
    """

    def __init__(self, encoder_tokens: int, decoder_tokens: int) -> None:
        self.encoder_tokens, self.decoder_tokens = encoder_tokens, decoder_tokens

    def compose(self, decoding: Iterable[Sequence], prefilling: Iterable[Sequence]) -> list[Row]:
        """Rows of one step. `prefilling` is in order of urgency; all but the most urgent one are served shortest first.

        A quarter of what decoding leaves is held for the most urgent one, so a long prompt goes on while short ones pass it, and short
        ones need not wait for it. Prefill never stands still: at least one prompt token runs, however many rows decode.
        """
        rows = [self.row(s, len(s.tokens)) for s in decoding]
        queue = list(prefilling)
        if not queue:
            return rows
        encoder, decoder = max(1, self.encoder_tokens - len(rows)), max(1, self.decoder_tokens - len(rows))
        first = queue[0]
        held = self._chunk(first, max(1, encoder // 4), max(1, decoder // 4))
        held_encoder, held_decoder = (held.stop - held.start, held.decoder_rows) if held is not None else (0, 0)
        for sequence in sorted(queue, key=lambda s: s.remaining):
            if sequence is first:
                held_encoder = held_decoder = 0
            row = self._chunk(sequence, encoder - held_encoder, decoder - held_decoder)
            if row is not None:
                rows.append(row)
                encoder -= row.stop - row.start
                decoder -= row.decoder_rows
        return rows

    def row(self, sequence: Sequence, stop: int) -> Row:
        """Positions [computed, stop)."""
        plan, start = sequence.cache.plan, sequence.computed
        assert plan is not None
        return Row(
            sequence=sequence,
            start=start,
            stop=stop,
            write_from=max(plan.write_from, start),
            window_from=plan.window_from,
            decoder_from=plan.decoder_from,
            decoder_window_from=plan.decoder_window_from,
            wants_logits=stop == len(sequence.tokens),
        )

    def _chunk(self, sequence: Sequence, encoder: int, decoder: int) -> Row | None:
        """The longest next piece of a prompt that both budgets allow, and that has no image which is not embedded."""
        start = sequence.computed
        stop = min(len(sequence.tokens), start + max(0, encoder))
        if (seen := sequence.seen_upto) is not None:
            stop = min(stop, seen)
        row = self.row(sequence, stop)
        if row.decoder_rows > decoder:
            stop = max(start, row.decoder_from) + max(0, decoder)
            row = self.row(sequence, stop)
        return row if row.stop > row.start else None
