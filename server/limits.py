"""What one request may ask for and how long it may take to arrive: every limit of the HTTP front, in one place."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from forebay.server.config import Config

T = TypeVar("T")

ENVIRONMENT = "FOREBAY_API_KEYS"  # keys are secrets, so they are no setting, which `forebay config` would print
OWN_KEY = "FOREBAY_API_KEY"  # the one that our own clients send; in the environment, since others see command lines
OverflowPolicy = Literal["clamp", "error"]
ReasoningField = Literal["reasoning_content", "reasoning", "both"]

MIB = 1024 * 1024


@dataclass(frozen=True)
class ImageOptions:
    """Images of requests (server/images.py). Sizes are bytes, times are seconds, counts are items, sides are pixels."""

    fetch: bool = False  # http(s) URLs
    hosts: tuple[str, ...] = ()  # that images may be fetched from: NAME, NAME:PORT, *.DOMAIN or *
    allow_private: bool = False  # loopback and private addresses among them
    redirects: int = 3
    connect_timeout_s: float = 10.0  # also of a look-up, and the longest silence of a host
    fetch_timeout_s: float = 60.0
    fetch_floor: int = 4096  # bytes per second, on average of `fetch_window_s`
    fetch_window_s: float = 5.0
    parallel: int = 16  # fetches of one request
    parallel_all: int = 64  # of all requests

    max_images: int = 600
    max_bytes: int = 32 * MIB  # of one file
    max_request_bytes: int = 64 * MIB  # of all files of a request
    max_side: int = 8192
    many: int = 15  # images from which on `many_side` counts
    many_side: int = 4096
    max_request_pixels: int = 512_000_000  # of all images of a request, as their files declare them
    max_canvases: int = 2048 * MIB  # what the model sees of the images of all requests that wait or run

    workers: int = 2  # decoding programs
    decode_timeout_s: float = 20.0
    decode_memory: int = 2048 * MIB  # address space of one of them; the largest image takes about 0.7 GiB
    cache_bytes: int = 256 * MIB  # of canvases that are kept: agents send their images again with every turn


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

    # who may call; see server/access.py
    api_keys: str | None = field(default=None, repr=False)  # as in the environment: `KEY,NAME:KEY,…`; None is none
    api_keys_file: Path | None = None
    share_cache: bool = False  # tenants share cached blocks of requests with the same cache_salt, or without one
    metrics_apart: bool = False  # the operator's routes are served by `App.admin` only
    metrics_key: bool = False  # they need a key with `admin`

    # the wire
    max_body: int = 64 * MIB
    max_bodies: int = 512 * MIB  # of all bodies that are read or wait to be encoded; never less than `max_body`
    discard_body: int = MIB  # of a refused body, read and dropped so that the client gets to read the answer
    max_head: int = 64 * 1024
    head_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    body_floor: int = 64 * 1024  # bytes per second below which a body counts as trickling once `body_timeout_s` is over
    keep_alive_s: float = 75.0
    write_timeout_s: float = 30.0  # a client that takes in less than `write_floor` bytes a second for so long is cut off
    write_floor: int = 256
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
    max_prompts: int = 256  # of one completions request, each choice of each counted
    max_scored: int = 1_000_000  # log-probabilities of prompt tokens in one answer, alternatives counted

    # tokens
    output_thinking: int = 65_536
    output_max_effort: int = 131_072
    output_plain: int = 8_192
    max_output: int = 393_216  # a larger limit asked for is lowered to this
    overflow_policy: OverflowPolicy = "clamp"  # of an output limit that does not fit behind the prompt

    # the Messages protocol
    messages_thinking: bool = False  # whether a request without `thinking` thinks; in that protocol it does not
    map_claude_models: bool = True  # model names that begin with `claude` mean the main model

    images: ImageOptions = field(default_factory=ImageOptions)

    # the answer
    reasoning_field: ReasoningField = "reasoning_content"  # its name in chat answers
    strict_tool_messages: bool = False  # refuse calls without results and results without calls instead of mending them
    nonstream_keepalive: bool = False  # break the silence before a whole answer with line feeds
    nonstream_wait_s: float = 30.0  # the silence before the first of them

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
            api_keys=os.environ.get(ENVIRONMENT),
            api_keys_file=server.api_keys_file,
            share_cache=server.share_cache,
            metrics_apart=server.metrics_bind is not None,
            metrics_key=server.metrics_key,
            max_body=server.body_limit_bytes,
            max_bodies=server.max_bodies_bytes,
            max_head=server.max_header_bytes,
            head_timeout_s=server.header_timeout_s,
            body_timeout_s=server.body_timeout_s,
            write_timeout_s=server.write_timeout_s,
            write_floor=server.write_floor,
            keep_alive_s=server.keep_alive_s,
            keepalive_comment_s=server.keepalive_comment_s,
            liveness_timeout_s=server.liveness_timeout_s,
            output_thinking=outputs.thinking,
            output_max_effort=outputs.max_effort,
            output_plain=outputs.plain,
            overflow_policy=server.overflow_policy,
            messages_thinking=server.messages_thinking,
            map_claude_models=server.map_claude_models,
            images=ImageOptions(
                fetch=server.images.fetch,
                hosts=server.images.hosts,
                allow_private=server.images.allow_private,
                connect_timeout_s=server.images.connect_timeout_s,
                fetch_timeout_s=server.images.fetch_timeout_s,
                fetch_floor=server.images.fetch_floor,
                max_bytes=server.images.max_bytes,
                max_request_bytes=server.images.max_request_bytes,
                workers=server.images.workers,
                decode_timeout_s=server.images.decode_timeout_s,
                decode_memory=server.images.decode_memory_bytes,
                cache_bytes=server.images.cache_bytes,
            ),
            reasoning_field=server.reasoning_field,
            strict_tool_messages=server.strict_tool_messages,
            nonstream_keepalive=server.nonstream_keepalive,
        )

    def default_output(self, *, thinking: bool, effort: int | None) -> int:
        """Output limit in tokens of a request that states none."""
        if not thinking:
            return self.output_plain
        return self.output_max_effort if effort == 100 else self.output_thinking


class Bodies:
    """Bytes of all request bodies in memory, from the first that arrives until the prompt is made; or of their canvases, to the end.

    The last eighth is for small bodies, so that a few large ones do not keep everybody else out.

    Attributes:
        used: bytes now.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    def change(self, before: int, after: int, small: int) -> bool:
        """Let one body take `after` bytes in place of `before`; False, and nothing is changed, if there is no room for more."""
        used = self.used + after - before
        room = self.limit if after <= small or self.used == before else self.limit - self.limit // 8  # one alone may have all
        if after > before and used > room:
            return False
        self.used = used
        return True


class Lanes:
    """Threads for the CPU work of requests (parsing, rendering, tokenising), so that the event loop stays free.

    Work on more than `large` bytes has a lane of its own: a 30 MB prompt makes other large ones wait, never the small ones.
    """

    def __init__(self, large: int) -> None:
        self._large_size = large
        self._small = Lane("forebay-encode", 2)
        self._large = Lane("forebay-encode-large", 1)

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` in the lane for a body of `size` bytes. Cancelling drops work that has not begun."""
        lane = self._large if size > self._large_size else self._small
        return await asyncio.wrap_future(lane.submit(work))

    def close(self) -> None:
        """Drop what has not begun. What has is not waited for, nor does the end of the process wait for it."""
        for lane in (self._small, self._large):
            lane.close()


class Lane:
    """A few threads, made when there is work. `ThreadPoolExecutor` would keep the process alive until the last of them is done."""

    def __init__(self, name: str, threads: int) -> None:
        self._name, self._most = name, threads
        self._threads = 0
        self._lock = threading.Lock()
        self._queue: SimpleQueue[_Task[Any] | None] = SimpleQueue()
        self._closed = False

    def submit(self, work: Callable[[], T]) -> Future[T]:
        task = _Task(work)
        with self._lock:
            if self._closed:
                raise RuntimeError("the lanes are closed")
            self._queue.put(task)
            if self._threads < self._most:
                threading.Thread(target=self._run, name=f"{self._name}_{self._threads}", daemon=True).start()
                self._threads += 1
        return task.future

    def close(self) -> None:
        with self._lock:
            self._closed = True
            with contextlib.suppress(Empty):
                while True:
                    if (task := self._queue.get_nowait()) is not None:
                        task.future.cancel()
            for _ in range(self._threads):
                self._queue.put(None)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task.run()
            del task


class _Task(Generic[T]):
    """Work and what comes of it. Cancelled work is let go of at once, with the megabytes it is about, not when its turn comes."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = held = [work]
        self.future: Future[T] = Future()
        # Not a method of this task: in a circle with its future it would keep the result until the garbage is collected.
        self.future.add_done_callback(lambda future: held.clear())

    def run(self) -> None:
        work = self._work[:]
        if not work or not self.future.set_running_or_notify_cancel():
            return
        try:
            result = work.pop()()
        except BaseException as error:
            self.future.set_exception(error)
            del self  # which the frames of the error hold, and with it the error
        else:
            self.future.set_result(result)
