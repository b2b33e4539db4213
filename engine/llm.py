"""The engine without HTTP: generate, score and trace in the calling thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forebay.engine.batcher import Row
from forebay.engine.grammar_compiler import GrammarCompiler
from forebay.engine.launch import build_engine, check_device
from forebay.engine.options import EngineOptions
from forebay.engine.output import OutputProcessor
from forebay.engine.prompt_images import prompt_with_images
from forebay.engine.sampler import SamplingState
from forebay.engine.sequence import Sequence
from forebay.engine.tiers import TierOptions
from forebay.engine.types import EngineError, Output, OutputEvent, PrefillMode, Request, SamplingParams, TokenLogprob
from forebay.engine.worker import Engine
from forebay.model.errors import ConfigError, RequestError
from forebay.model.ops import formats
from forebay.model.ops.hyper_connections import collapse
from forebay.model.source import resolve

LOGIT_ROWS = 512  # whose logits are on the device at once; of the released vocabulary they take 265 MB


class LLM:
    """A model to call directly.

    On a GPU, KV takes most of the memory that is free when the model is opened. Where a second engine is to use the same GPU, give the
    first one `kv_tokens` or a smaller `kv_memory_fraction`.

    Args:
        path: a checkpoint folder, `demo` or `synthetic:...`.
        device: `cpu` or `cuda`.
        prefill: `bounded` runs the decoder half over the last window of a prompt, `exact` over all of it.
        tiers: the SSD store and the snapshot pool; none of either by default. `close` writes what is queued for them.
        chat: the tokenizer must have the tokens of the chat encoding; the method `chat` needs them.
        clock: seconds since the epoch, by which these keep things.
        kernels: on a CUDA device, run the GPU kernels if they can take the model, otherwise torch operations.
        engine_options: fields of `EngineOptions`, for example `kv_tokens=65536`, `encoder_tokens=64`, `prefix_reuse=False`.
    """

    def __init__(
        self,
        path: str,
        device: str = "cpu",
        prefill: PrefillMode = "bounded",
        *,
        tiers: TierOptions | None = None,
        chat: bool = False,
        clock: Callable[[], float] = time.time,
        kernels: bool = True,
        **engine_options: Any,
    ) -> None:
        known = EngineOptions.__dataclass_fields__
        if unknown := sorted(set(engine_options) - set(known)):
            raise ConfigError(f"unknown engine option {unknown[0]!r}; known are {', '.join(known)}", param=unknown[0])
        source = resolve(str(path))
        options = EngineOptions(**engine_options)
        check_device(device)
        self.engine: Engine = build_engine(
            source.open(device=device), model_name=source.name, device=device, prefill=prefill, options=options, chat=chat, tiers=tiers,
            clock=clock, kernels=kernels,
        )  # fmt: skip
        self.tokenizer = self.engine.tokenizer
        self.grammars = GrammarCompiler(self.tokenizer)  # of requests with a `grammar`
        self.config = self.engine.runner.backbone.config

    def close(self) -> None:
        """Write what is queued for the tiers and stop them; the LLM is of no more use then."""
        self.grammars.close()
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def generate(
        self,
        prompts: str | SequenceOf[str] | SequenceOf[int] | SequenceOf[SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[Output]:
        """Generate for every prompt, all in one continuous batch.

        Args:
            prompts: one prompt or a list of them; text (spelled control tokens become control ids) or token ids.
            params: one for all or one per prompt. With `n` above 1, a prompt gives `n` outputs in a row, with seeds seed, seed + 1, ...
        Returns:
            Outputs in the order of the prompts.

        Raises:
            RequestError: a prompt or parameter that cannot be used; nothing is generated.
            EngineError: the engine failed at one of them.
        """
        token_lists = self._token_lists(prompts)
        many = list(params) if isinstance(params, SequenceOf) else [params or SamplingParams()] * len(token_lists)
        if not all(isinstance(chosen, SamplingParams) for chosen in many):
            raise RequestError(f"params must be SamplingParams or a list of them, got {params!r:.200}", param="params")
        if len(many) != len(token_lists):
            raise RequestError(f"{len(many)} sampling parameters for {len(token_lists)} prompts", param="params")
        requests = [_choices(ids, chosen, f"generate.{i}") for i, (ids, chosen) in enumerate(zip(token_lists, many, strict=True))]
        return self.run([choice for choices in requests for choice in choices])

    def chat(
        self, body: Mapping[str, Any], params: SamplingParams | None = None, images: SequenceOf[NDArray[np.uint8]] = ()
    ) -> list[Output]:
        """Answer a chat request; `n` of the parameters is the number of answers. For models opened with `chat`.

        Args:
            body: messages, tools and the other fields that `ChatCodec.encode` reads. An image is a part of type `image`, which may have
                a `detail`.
            images: pixels [height, width, 3] uint8 RGB of the image parts, in the order of the body.
        Returns:
            The answers as the model wrote them: reasoning, content and calls in one text.

        Raises:
            RequestError, EngineError: as `generate`.
        """
        codec, params = self.engine.codec, params or SamplingParams()
        if codec is None:
            raise ConfigError("the LLM was opened without chat=True", param="chat")
        prompt, shown = prompt_with_images(codec, body, images, self.engine.max_context)
        return self.run(_choices(prompt.token_ids, params, "chat", images=shown, prompt=prompt))

    def run(self, requests: SequenceOf[Request]) -> list[Output]:
        """Run requests, all in one continuous batch. Their `n` is not looked at: a request is one choice.

        Returns:
            Outputs in the order of the requests.

        Raises:
            RequestError, EngineError: as `generate`.
        """
        engine = self.engine
        sequences = [engine.prepare(request) for request in requests]  # all of them are checked before the first one runs
        results = {sequence.id: _Collected(sequence) for sequence in sequences}
        engine.sink = lambda events: _collect(events, results)
        try:
            for sequence in sequences:
                # A list of prompts may be longer than the queue.
                while engine.queued >= engine.options.max_queued_requests:
                    self._step()
                engine.enqueue(sequence)
            while engine.busy:
                self._step()
        except BaseException:
            for sequence in sequences:
                engine.abort(sequence.id)
            engine.settle()
            raise
        finally:
            engine.sink = lambda events: None
        return [found.output() for found in results.values()]

    def _step(self) -> None:
        """One step; when nothing can run yet, wait for what a tier is about to bring."""
        self.engine.wake.clear()
        if not self.engine.step().rows and self.engine.busy:
            self.engine.wake.wait(0.005)

    def score(self, token_ids: SequenceOf[int]) -> Tensor:
        """Exact logits at every position: [tokens, vocab] fp32. Nothing is taken from or left in the prefix cache.

        Ties of index scores are settled as the reference settles them, over the whole prompt; `generate`, whose prefixes are cached, takes
        the lower entry, and GPU kernels always do.
        """
        return torch.cat(self._exact(_ids(token_ids, "token_ids"), None))

    def trace(self, token_ids: SequenceOf[int]) -> dict[str, Tensor]:
        """An exact forward pass with its intermediate results, for comparison with other implementations.

        Returns (T tokens, S streams, D hidden, N = T // ratio entries of a source):
            logits [T, vocab] fp32;
            encoder.out_h [T, S, D] bf16, encoder.out_pre_mix [T, S] fp32: the streams that enter the decoder half, their collapse weights;
            encoder.collapsed [T, D] bf16, encoder.decoder_attn_in [T, D] bf16: the collapse, and the first decoder layer's input;
            layerL.topk [T, index_topk] int64, ascending, -1 filled: selected entries of each index source;
            layerL.router_indices [T, k] int64, best first, layerL.router_weights [T, k] fp32;
            layerL.attn_in, attn_out, ffn_in, ffn_out [T, D] bf16; layerL.engram_rows [T, columns] int64;
            per source: layerL.kv_bytes [N, entry bytes] uint8 as stored (main codes, main scales, index codes, index scales), and decoded
            layerL.main_kv_code [N, head_dim] uint8, main_kv_scale [N, head_dim/16] fp32, main_kv [N, head_dim] bf16,
            layerL.index_k [N, index_dim] bf16.
        """
        record: dict[str, list[Tensor]] = {}
        kept: dict[str, Tensor] = {}
        logits = self._exact(_ids(token_ids, "token_ids"), record, kept)
        out = {name: torch.cat(parts) for name, parts in record.items()}
        out["logits"] = torch.cat(logits)
        layer = self.engine.runner.backbone.layers[self.engine.runner.backbone.topology.cut]
        out["encoder.collapsed"] = collapse(out["encoder.out_h"], out["encoder.out_pre_mix"])
        out["encoder.decoder_attn_in"] = out[f"layer{layer.plan.index}.attn_in"]
        return out | kept

    def _exact(self, ids: list[int], record: dict[str, list[Tensor]] | None, kept: dict[str, Tensor] | None = None) -> list[Tensor]:
        """Run one sequence through both halves in chunks; the engine must be idle. Fills `kept` with the stored entries."""
        engine = self.engine
        if engine.busy:
            raise EngineError("score and trace need an idle engine")
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        request = Request(ids, params, prefill="exact")
        if len(ids) > engine.max_context:
            text = f"{len(ids)} tokens exceed the context of {engine.max_context}"
            raise RequestError(text, param="token_ids", code="context_length_exceeded")
        engine.check_ids(ids, "token_ids")
        output = OutputProcessor(self.tokenizer, (), frozenset(), parser=None)
        sequence = Sequence(request, engine.manager.sequence(), SamplingState(params, ids, 0), output, "exact", 1, 0)
        sequence.tie_tokens = len(ids)
        plan = engine.manager.open(sequence.cache, ids, reuse=False)
        if plan is None:
            raise EngineError("no room in the block pool for this sequence")
        logits = []
        try:
            most = engine.options.budgets[0]
            for start in range(0, len(ids), most):
                stop = min(start + most, len(ids))
                row = Row(sequence, start, stop, start, 0, 0, 0, wants_logits=False)
                _, scored = engine.runner.run([row], record)
                assert scored[0] is not None
                logits += [engine.runner.logits(rows).cpu() for rows in scored[0].split(LOGIT_ROWS)]
            if kept is not None:
                kept.update(self._entries(sequence))
        finally:
            engine.manager.release(sequence.cache, keep=False)
        return logits

    def _entries(self, sequence: Sequence) -> dict[str, Tensor]:
        """The stored entries of a sequence, raw and decoded."""
        pool, found = self.engine.runner.blocks, {}
        table = torch.tensor(sequence.cache.table)
        for source in pool.layout.sources:
            views, count = pool.views[source.layer], len(sequence.tokens) // source.ratio
            planes = [views.main_codes, views.main_scales, views.index_codes, views.index_scales]
            codes, scales, index_codes, index_scales = (p[table].flatten(0, 1)[:count].cpu() for p in planes)
            name = f"layer{source.layer}"
            found[f"{name}.kv_bytes"] = torch.cat((codes, scales, index_codes, index_scales), 1)
            found[f"{name}.main_kv_code"] = formats.unpack_nibbles(codes)
            found[f"{name}.main_kv_scale"] = formats.e4m3_decode(scales)
            found[f"{name}.main_kv"] = formats.main_decode(codes, scales).to(torch.bfloat16)
            found[f"{name}.index_k"] = formats.index_decode(index_codes, index_scales).to(torch.bfloat16)
        return found

    def _token_lists(self, prompts: Any) -> list[list[int]]:
        if isinstance(prompts, str):
            prompts = [prompts]
        if hasattr(prompts, "tolist"):
            prompts = prompts.tolist()
        if not isinstance(prompts, list | tuple):
            raise RequestError(f"prompts must be text, token ids or a list of either, got {prompts!r:.80}", param="prompts")
        if not prompts:
            raise RequestError("no prompts were given", param="prompts")
        if isinstance(prompts[0], Integral):
            prompts = [prompts]
        return [self._encode(p, i) if isinstance(p, str) else _ids(p, f"prompts[{i}]") for i, p in enumerate(prompts)]

    def _encode(self, text: str, number: int) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"prompts[{number}] is not valid Unicode: {error.reason}", param="prompts") from None
        return self.tokenizer.encode_special(text)


def _choices(ids: SequenceOf[int], params: SamplingParams, share: str, **fields: Any) -> list[Request]:
    """One request for each of the `n` choices of a prompt, which share its prefill."""
    requests = []
    for i in range(params.n):
        seed = None if params.seed is None else (params.seed + i + 2**63) % 2**64 - 2**63
        requests.append(Request(ids, replace(params, n=1, seed=seed), share=share if params.n > 1 else None, **fields))
    return requests


def _ids(value: Any, name: str) -> list[int]:
    """Token ids from a list, array or tensor of integers."""
    ids = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(ids, list | tuple) or not all(isinstance(i, Integral) and not isinstance(i, bool) for i in ids):
        raise RequestError(f"{name} must be text or a list of integer token ids, got {value!r:.80}", param=name.partition("[")[0])
    return [int(i) for i in ids]


class _Collected:
    """Events of one sequence, gathered."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.last: OutputEvent | None = None

    def add(self, event: OutputEvent) -> None:
        self.tokens += event.token_ids
        self.logprobs += event.logprobs or []
        if event.finish_reason is not None:
            self.last = event

    def output(self) -> Output:
        event, sequence = self.last, self.sequence
        if event is None:
            raise EngineError("the engine stopped before the request finished")
        if event.error is not None:
            raise event.error
        assert event.finish_reason and event.usage and event.tiers and event.times
        return Output(
            request_id=sequence.id,
            prompt_ids=list(sequence.request.prompt_ids),
            token_ids=self.tokens,
            text=sequence.output.text,
            finish_reason=event.finish_reason,
            usage=event.usage,
            tiers=event.tiers,
            times=event.times,
            logprobs=self.logprobs if sequence.request.params.logprobs is not None else None,
            prompt_logprobs=sequence.prompt_logprobs if sequence.scores_prompt else None,
            matched_stop=event.matched_stop,
            preemptions=event.preemptions,
        )


def _collect(events: list[OutputEvent], results: dict[str, _Collected]) -> None:
    for event in events:
        if event.request_id in results:
            results[event.request_id].add(event)
