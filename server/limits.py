"""What one request may ask for and how long it may take to arrive: every limit of the HTTP front, in one place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from forebay.server.config import Config

T = TypeVar("T")

MIB = 1024 * 1024


@dataclass(frozen=True)
class ServerOptions:
    """Settings of the HTTP front. Sizes are bytes, times are seconds, counts are items.

    `model_name` "" takes the engine's name. `alias_thinking` fixes the default mode of requests that use that name.
    """

    model_name: str = ""
    aliases: tuple[str, ...] = ()
    alias_thinking: Mapping[str, bool] = field(default_factory=lambda: {"deepseek-chat": False, "deepseek-reasoner": True})
    default_effort: int | str = "high"
    thinking_default: bool = True
    cors_origins: tuple[str, ...] = ()

    # the wire
    max_body: int = 64 * MIB
    discard_body: int = MIB  # of a refused body, read and dropped so that the client gets to read the answer
    max_head: int = 64 * 1024
    head_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    body_floor: int = 64 * 1024  # bytes per second below which a body counts as trickling once `body_timeout_s` is over
    keep_alive_s: float = 75.0
    max_connections: int = 65_536  # a connection beyond it is answered 503
    keepalive_comment_s: float = 15.0
    liveness_timeout_s: float = 60.0

    # the body
    off_loop: int = 64 * 1024  # larger bodies are parsed in a thread
    large: int = MIB  # larger bodies and prompts have threads of their own
    max_depth: int = 200
    max_messages: int = 10_000
    max_tools: int = 512
    max_stops: int = 16
    max_stop_length: int = 4096
    max_bias: int = 1024
    max_token_ids: int = 1024
    max_choices: int = 8

    # tokens
    output_thinking: int = 65_536
    output_max_effort: int = 131_072
    output_plain: int = 8_192
    max_output: int = 393_216  # a larger limit asked for is lowered to this

    @classmethod
    def from_config(cls, config: Config) -> ServerOptions:
        """The options of an effective configuration (server/config.py)."""
        server, outputs, effort = config.server, config.engine.max_output_tokens, config.engine.default_effort
        return cls(
            model_name=config.model.name or "",
            aliases=config.model.aliases,
            default_effort="high" if effort == "none" else effort,
            thinking_default=effort != "none",
            cors_origins=server.cors_origins,
            max_body=server.body_limit_bytes,
            max_head=server.max_header_bytes,
            head_timeout_s=server.header_timeout_s,
            body_timeout_s=server.body_timeout_s,
            keep_alive_s=server.keep_alive_s,
            keepalive_comment_s=server.keepalive_comment_s,
            liveness_timeout_s=server.liveness_timeout_s,
            output_thinking=outputs.thinking,
            output_max_effort=outputs.max_effort,
            output_plain=outputs.plain,
        )

    def default_output(self, *, thinking: bool, effort: int | None) -> int:
        """Output limit in tokens of a request that states none."""
        if not thinking:
            return self.output_plain
        return self.output_max_effort if effort == 100 else self.output_thinking


class Lanes:
    """Threads for the CPU work of requests (parsing, rendering, tokenising), so that the event loop stays free.

    Work on more than `large` bytes has a lane of its own: a 30 MB prompt makes other large ones wait, never the small ones.
    """

    def __init__(self, large: int) -> None:
        self._large_size = large
        self._small = ThreadPoolExecutor(max_workers=2, thread_name_prefix="forebay-encode")
        self._large = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forebay-encode-large")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` in the lane for a body of `size` bytes. Cancelling drops work that has not begun."""
        lane = self._large if size > self._large_size else self._small
        return await asyncio.get_running_loop().run_in_executor(lane, work)

    def close(self) -> None:
        for lane in (self._small, self._large):
            lane.shutdown(wait=False, cancel_futures=True)
