"""What an engine may use and how it schedules."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forebay.engine.types import ReplayMode
from forebay.model.errors import ConfigError

DEFAULT_WEIGHT_CACHE = 512 << 20
ROWS = 512, 512  # encoder_tokens and decoder_tokens unless given
# The same with GPU kernels. On an H200 a step of 2,048 prompt rows ran at 51 % of the bf16 peak and kept generated tokens waiting for a
# tenth of a second; one of 8,192 ran at 59 % and took three tenths. As many prompts as 128 rows of each fill may end in a step.
KERNEL_ROWS = 2048, 1024


@dataclass(frozen=True)
class EngineOptions:
    """Limits and budgets of one engine.

    Attributes:
        max_context: prompt plus output of one sequence, tokens; None for the model's own limit.
        max_sequences: sequences running at once (each owns a window).
        encoder_tokens, decoder_tokens: rows of a step that may run the encoder half and the decoder half; decode rows go first, and
            however many there are, one prompt token goes on. None for 512 each, with GPU kernels 2,048 and 1,024, the latter at least
            `max_sequences`.
        max_queued_requests: waiting requests beyond which new ones are refused.
        max_queue_wait_s: seconds a request may wait for its start before it ends with an error; 0 for no limit.
        aging_s: seconds of waiting that outweigh one unit of priority; 0 switches aging off.
        kv_tokens: tokens of global KV in the block pool; None for what a GPU's memory leaves, on a CPU for twice the longest sequence as
            far as memory goes.
        kv_memory_fraction: with `kv_tokens` None, share that blocks get of the GPU memory which weights, windows and the estimated working
            memory of steps leave.
        prefix_reuse: reuse cached blocks of earlier requests.
        replay: how a window that nobody has is rebuilt: `bounded` computes one window before the resume point again, an approximation;
            `exact` as many windows as there are layers, so that the result equals a cold run's.
        max_lineage: cached blocks with more bounded replays behind them are not used; None for no limit, or 0 with an exact replay.
        weight_cache_bytes: bytes of widened weights kept for the CPU reference.
        batch_invariant: on CPU, compute a row by the same code whatever shares its step, so that greedy text does not depend on the batch.
        default_effort: reasoning effort of chat requests that name none.
        poison: fill windows and blocks with huge values when they are handed out, so that reading what was never written shows (debugging).
        image_cache_bytes, image_cache_ttl_s: embeddings of images that are kept for requests that show them again, and for how long after
            their last use.
        overlap: launch a step of generated tokens before the last one's are settled on the host; None does so where the GPU kernels run,
            whose steps need nothing from the host.
    """

    max_context: int | None = None
    max_sequences: int = 64
    encoder_tokens: int | None = None
    decoder_tokens: int | None = None
    max_queued_requests: int = 1024
    max_queue_wait_s: float = 600.0
    aging_s: float = 10.0
    kv_tokens: int | None = None
    kv_memory_fraction: float = 0.9
    prefix_reuse: bool = True
    replay: ReplayMode = "bounded"
    max_lineage: int | None = None
    weight_cache_bytes: int = DEFAULT_WEIGHT_CACHE
    batch_invariant: bool = True
    default_effort: int | str = "high"
    poison: bool = False
    image_cache_bytes: int = 256 << 20
    image_cache_ttl_s: float = 600.0
    overlap: bool | None = None

    def __post_init__(self) -> None:
        for name, spec in self.__dataclass_fields__.items():
            value, kind = getattr(self, name), str(spec.type)
            if name in ("default_effort", "replay") or (value is None and "None" in kind):
                continue
            flag = kind.startswith("bool")
            allowed: tuple[type, ...] = (bool,) if flag else (int, float) if kind == "float" else (int,)
            if not isinstance(value, allowed) or (isinstance(value, bool) and not flag):
                raise ConfigError(f"{name} must be {kind.replace(' | None', ' or None')}, got {value!r}", param=name)
        for name in ("max_sequences", "max_queued_requests", "max_context", "encoder_tokens", "decoder_tokens", "kv_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", param=name)
        if self.replay not in ("bounded", "exact"):
            raise ConfigError(f"replay must be 'bounded' or 'exact', got {self.replay!r}", param="replay")
        if self.max_lineage is not None and self.max_lineage < 0:
            raise ConfigError(f"max_lineage must not be negative, got {self.max_lineage}", param="max_lineage")
        for name in ("max_queue_wait_s", "aging_s", "weight_cache_bytes", "image_cache_bytes", "image_cache_ttl_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}", param=name)
        if not 0 < self.kv_memory_fraction <= 1:
            found = self.kv_memory_fraction
            raise ConfigError(f"kv_memory_fraction must be above 0 and at most 1, got {found}", param="kv_memory_fraction")
        if self.decoder_tokens is not None and self.decoder_tokens < self.max_sequences:
            raise ConfigError(
                f"decoder_tokens ({self.decoder_tokens}) must be at least max_sequences ({self.max_sequences}): "
                "each running sequence decodes one row a step",
                param="decoder_tokens",
            )

    @property
    def budgets(self) -> tuple[int, int]:
        """`encoder_tokens` and `decoder_tokens`, without kernels where they are None."""
        encoder, decoder = ROWS
        return self.encoder_tokens or encoder, self.decoder_tokens or max(decoder, self.max_sequences)

    def settled(self, kernels: bool) -> EngineOptions:
        """With everything filled in that depends on whether the GPU kernels run."""
        encoder, decoder = KERNEL_ROWS if kernels else ROWS
        return replace(
            self,
            encoder_tokens=self.encoder_tokens or encoder,
            decoder_tokens=self.decoder_tokens or max(decoder, self.max_sequences),
            overlap=kernels if self.overlap is None else self.overlap,
        )
