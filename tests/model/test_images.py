"""Image positions in the text backbone: their own router bias, no Engram read, and a barrier for the n-grams after them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from engines import tiny
from forebay.model.engram_map import class_history
from forwards import Hand

IMAGE = (5, 14)  # positions of the span


def forward(hand: Hand, tokens: list[int], *cuts: int, decoder_from: int = 0) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Logits of the rows that run the decoder half, and what was recorded; positions of IMAGE carry an image."""
    record: dict[str, list[Tensor]] = {}
    places = torch.arange(len(tokens))
    image = (places >= IMAGE[0]) & (places < IMAGE[1])
    parts = []
    for start, stop in pairwise(cuts):
        batch = hand.runner.batch([hand.row(start, stop, decoder_from=decoder_from, decoder_window_from=decoder_from)], record)
        batch.image_mask = image[start:stop]
        before = torch.arange(start, stop).unsqueeze(1) - 1 - torch.arange(batch.lookback.shape[1])
        batch.lookback = torch.where((before >= 0) & ~image[before.clamp(min=0)], batch.lookback, -1)
        streams = hand.runner.backbone.encode(batch)
        if (chosen := batch.decoder_rows()) is not None:
            parts.append(hand.runner.backbone.logits(hand.runner.backbone.decode(streams, chosen)))
    return torch.cat(parts), record


def tokens_of(length: int) -> list[int]:
    return [100 + (i * 37) % 3000 for i in range(length)]


def test_engram_rows_stop_at_the_span() -> None:
    llm, tokens = tiny("exact"), tokens_of(30)
    net, config = llm.engine.runner.backbone, llm.config
    assert net.token_map is not None
    mask = torch.tensor([not IMAGE[0] <= i < IMAGE[1] for i in range(30)])
    pad = int(net.token_map[config.engram_pad_token_id])
    wanted = class_history(tokens, [], net.token_map, pad, mask, max_ngram=config.engram_max_ngram_size)
    engram = net.layers[1].engram
    assert engram is not None
    with Hand(llm, tokens) as hand:
        _, record = forward(hand, tokens, 0, 30)
    assert torch.equal(record["layer1.engram_rows"][0], engram.rows(wanted))


def test_image_rows_are_routed_by_their_own_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """In both halves, also where only some rows run the second one."""
    llm, tokens = tiny("exact"), tokens_of(30)
    net = llm.engine.runner.backbone
    bias = torch.zeros(llm.config.n_routed_experts)
    bias[3] = 100.0
    for layer in net.layers:
        monkeypatch.setattr(layer.moe, "bias_image", bias)
        monkeypatch.setattr(layer.moe, "bias", -bias)
    with Hand(llm, tokens) as hand:
        _, record = forward(hand, tokens, 0, 30, decoder_from=10)
    for layer in range(llm.config.num_hidden_layers):
        chosen = record[f"layer{layer}.router_indices"][0]
        first = 30 - len(chosen)
        assert first == (0 if layer < net.topology.cut else 10)
        image = torch.tensor([IMAGE[0] <= i < IMAGE[1] for i in range(first, 30)])
        assert torch.equal((chosen == 3).any(1), image)


def test_the_span_changes_what_follows_and_chunks_change_nothing() -> None:
    llm, tokens = tiny("exact"), tokens_of(30)
    with Hand(llm, tokens) as hand:
        whole, _ = forward(hand, tokens, 0, 30)
    with Hand(llm, tokens) as hand:
        text = hand.feed(0, 30)
    assert torch.equal(whole[: IMAGE[0]], text[: IMAGE[0]])
    assert not torch.equal(whole[IMAGE[1] :], text[IMAGE[1] :])
    for cuts in ((0, 3, 9, 15, 16, 30), tuple(range(31))):
        with Hand(llm, tokens) as hand:
            assert torch.equal(forward(hand, tokens, *cuts)[0], whole)
