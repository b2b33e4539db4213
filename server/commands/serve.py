"""`forebay serve`: listen, load, answer, drain.

The socket is bound before anything else, so a port in use is told at once, and requests are answered (503, with progress) while
weights load. The first SIGTERM or Ctrl-C drains, the second stops at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import errno
import functools
import importlib
import ipaddress
import json
import logging
import os
import re
import resource
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import uvicorn
import uvloop

from forebay import __version__
from forebay.engine.tiers import EMBEDDED, TierOptions, ssd_budget
from forebay.model.errors import ConfigError, ForebayError
from forebay.server.access import KeyRing
from forebay.server.app import App, create_app
from forebay.server.cli import read_settings
from forebay.server.config import Config, hide_passwords, split_bind, tier_options
from forebay.server.limits import OWN_KEY, ServerOptions
from forebay.server.loading import Gate, LoadingEngine
from forebay.server.terminal import LoadProgress, consoles, size
from forebay.server.wire import steady_process, uvicorn_config

if TYPE_CHECKING:
    from forebay.engine.client import EngineClient
    from forebay.engine.tier_check import RedisCheck

T = TypeVar("T")

POLL_S = 0.25
REDIS_ANSWER_S = 1.0  # for a note at the start
FLUSH_S = 5  # after draining, for sockets to take their last bytes
LAST_S = 30.0  # after that, for the engine and the application to end; what hangs then is left behind
SPARE_FILES = 256  # descriptors beside one per connection: shards, logs, the event loop
MAX_FILES = 65_536
ADMIN_BACKLOG = 64
# Longer than a window and a block of the demo, so that sent again it shows the cache; and the demo knows the answer.
TRY_TEXT = (
    "The harbour was closed for the winter and the boats lay on the quay. The secret number of Bergen is 7421. Nobody knew when the ferry "
    "would come back, so the people of the town took the road over the hills. In spring the ice broke and the first ship brought letters, "
    "coffee and a piano for the school. The children learned three songs before the summer came and sang them on the market place every "
    "Sunday. In the evening the lamps were lit and the town was quiet again until the next ship came. What is the secret number of Bergen?"
)
_NO_MEMORY = re.compile("allocate memory|out of memory|Storage size calculation overflowed")  # what torch says, on CPU and CUDA


class EngineStoppedError(ForebayError):
    """The engine died while the server ran."""


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises ConfigError, CheckpointError and the like before it is ready; returns 0 after a drain."""
    config, _ = read_settings(args)
    threads = config.engine.threads or max(1, len(os.sched_getaffinity(0)) - 1)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # read when torch is first imported, below
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("forebay").setLevel(logging.INFO)
    logging.getLogger("forebay.access").setLevel(logging.INFO if config.server.access_log else logging.WARNING)
    files = raise_file_limit(config)
    # Whoever waits to be accepted is accepted at once, before anybody can be turned away: where files are few, few may wait.
    backlog = min(config.server.backlog, max(16, files // 4))
    listener = listen(config.server.host, config.server.port, backlog)
    with contextlib.ExitStack() as open_sockets:
        open_sockets.enter_context(listener)
        admin = None
        if config.server.metrics_bind is not None:
            host, port = split_bind(config.server.metrics_bind)
            admin = open_sockets.enter_context(listen(host, int(port), ADMIN_BACKLOG, "server.metrics_bind"))
        return uvloop.run(
            Service(config, threads, listener, backlog=backlog, max_connections=max(files - SPARE_FILES, files // 2), admin=admin).run()
        )


def listen(host: str, port: int, backlog: int, setting: str = "") -> socket.socket:
    """A listening TCP socket; `setting` is where its address comes from, server.host and server.port if it is empty.

    Raises:
        ConfigError: port in use, not allowed, or no such address; says what to change.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: a label of the name is empty or too long
        reason = error.strerror if isinstance(error, OSError) else "no valid host name"
        another = f"set {setting} to another" if setting else "choose another --host"
        raise ConfigError(f"cannot listen on {host!r}: {reason}; {another}", param=setting or "server.host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        way = setting or "--port"
        reasons = {
            errno.EADDRINUSE: f"port {port} on {host} is in use; stop the program that has it or choose another with {way}",
            errno.EACCES: f"port {port} needs more rights than this user has; choose one above 1023 with {way}",
            errno.EADDRNOTAVAIL: f"{host} is no address of this machine; set {setting or '--host'} to one that is",
        }
        text = reasons.get(error.errno or 0, f"cannot listen on {host}:{port}: {error.strerror}")
        raise ConfigError(text, param=setting or "server.port") from None
    listener.setblocking(False)
    return listener


def raise_file_limit(config: Config) -> int:
    """Raise the soft limit of open files as far as allowed; warn if that is still too few for the streams that may come. Returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    needed = config.engine.max_sequences + config.engine.max_queued_requests + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        print(f"forebay: only {soft} open files are allowed, {needed} may be needed; raise the hard limit (ulimit -Hn)", file=sys.stderr)
    return MAX_FILES if soft == resource.RLIM_INFINITY else soft


def build(config: Config, threads: int, progress: Callable[[int, int, str], None]) -> EngineClient:
    """Load the model and build its engine (blocks; minutes for a large checkpoint)."""
    # Imported here: this brings torch, which must come after the thread settings and need not be there for a usage error.
    progress(0, 0, "importing torch")
    importlib.import_module("numpy.ma")  # numpy would do it in the first request that needs it, when files may have run out
    from forebay.engine.launch import build_client
    from forebay.engine.options import EngineOptions
    from forebay.engine.plan import kv_tokens_in

    progress(0, 0, "looking at the model")
    engine, cache = config.engine, config.cache
    kv_tokens = cache.kv_tokens if cache.kv_bytes is None else kv_tokens_in(config.model.path, cache.kv_bytes)
    options = EngineOptions(
        max_context=engine.max_context,
        max_sequences=engine.max_sequences,
        encoder_tokens=engine.encoder_tokens,
        decoder_tokens=engine.decoder_tokens,
        max_queued_requests=engine.max_queued_requests,
        max_queue_wait_s=engine.max_queue_wait_s,
        aging_s=engine.aging_s,
        kv_tokens=kv_tokens,
        kv_memory_fraction=cache.kv_memory_fraction,
        prefix_reuse=cache.prefix_reuse,
        replay=cache.replay,
        max_lineage=cache.max_lineage,
        weight_cache_bytes=engine.weight_cache_bytes,
        image_cache_bytes=engine.image_cache_bytes,
        image_cache_ttl_s=engine.image_cache_ttl_s,
        batch_invariant=engine.batch_invariant,
        default_effort=engine.default_effort,
        poison=engine.poison,
    )
    try:
        return build_client(
            model=config.model.path,
            model_name=config.model.name,
            device=engine.device,
            threads=threads,
            prefill=engine.prefill,
            options=options,
            progress=progress,
            tiers=tier_options(config),
            kernels=engine.kernels,
        )
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _NO_MEMORY.search(str(error)):
            raise
        kv = "cache.kv_memory_fraction" if kv_tokens is None and engine.device.startswith("cuda") else "cache.kv_tokens"
        text = f"there is not enough memory for the model and its KV; lower {kv} or engine.max_sequences, see `forebay check`"
        raise ConfigError(text) from None


def describe_tiers(options: TierOptions, redis: RedisCheck | None = None) -> str:
    """Where KV goes beyond the device, in a line; `redis` is what was found out about a Redis that is not ours."""
    if options.dir is None:
        ssd = "no SSD store"
    else:
        ssd = f"SSD {options.dir} (budget {size(ssd_budget(options.dir, options.ssd_bytes))}, {options.ssd_ttl_s / 3600:g} h)"
    if options.redis_url is None:
        return f"{ssd}, no Redis"
    if options.redis_url == EMBEDDED:
        return f"{ssd}, Redis embedded"
    if redis is None:
        found = "not known yet whether it answers"
    else:
        found = redis.server or f"{redis.silence or redis.fault}; windows are replayed meanwhile"
    return f"{ssd}, Redis {hide_passwords(options.redis_url)} ({found})"


def in_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run `work` in a thread that nobody has to wait for: neither a signal nor the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            tell: Callable[[], None] = functools.partial(done.set_exception, error)
        else:
            tell = functools.partial(done.set_result, result)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def own_command() -> str:
    """How the reader can call us: by name if the shell finds it, else by the path of the environment we run in."""
    beside = Path(sys.executable).with_name("forebay")
    return "forebay" if shutil.which("forebay") or not beside.exists() else os.path.relpath(beside)


def _say(text: str) -> None:
    """One line on standard error, if somebody still reads it: a log pipe whose reader died must not keep the server from stopping."""
    with contextlib.suppress(OSError, ValueError):
        print(f"forebay: {text}", file=sys.stderr, flush=True)


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: it would stop streams that a drain lets finish."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Service:
    """One run of the server, from the bound socket to the exit status."""

    def __init__(
        self, config: Config, threads: int, listener: socket.socket, *, backlog: int, max_connections: int, admin: socket.socket | None
    ) -> None:
        self._config = config
        self._threads = threads
        self._listener = listener
        self._admin_listener = admin
        self._backlog = backlog
        self._out, err = consoles()
        self._progress = LoadProgress(err)
        self._options = dataclasses.replace(ServerOptions.from_config(config), max_connections=max_connections)
        self._keys = KeyRing(self._options)  # read now, so that a mistake in them is told before minutes of loading
        self._gate = Gate(lambda: str(self._progress), self._options)
        self._admin_gate = Gate(lambda: str(self._progress), self._options)
        self._stop = asyncio.Event()
        self._client: EngineClient | None = None

    async def run(self) -> int:
        """Serve until a signal or the death of the engine. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        http = HttpServer(uvicorn_config(self._gate, self._options, backlog=self._backlog, timeout_graceful_shutdown=FLUSH_S))
        servers = [http]
        serving = [asyncio.create_task(http.serve(sockets=[self._listener]))]
        if self._admin_listener is not None:
            admin = HttpServer(uvicorn_config(self._admin_gate, self._options, backlog=ADMIN_BACKLOG, timeout_graceful_shutdown=FLUSH_S))
            servers.append(admin)
            serving.append(asyncio.create_task(admin.serve(sockets=[self._admin_listener])))
        try:
            self._client = client = await self._load()
            await client.start()
            app = create_app(client, self._options)
            if self._admin_listener is not None and app.admin is not None:
                self._admin_gate.open(app.admin)
            steady_process()
            self._gate.open(app)
            self._announce(client, await self._ask_redis())
            await self._until_stopped(client)
            await self._drain(client)
        finally:
            if self._client is not None:
                await self._client.stop()
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*serving)
        return 0

    async def _load(self) -> EngineClient:
        """Build the engine; a signal need not wait for it."""
        with self._progress:
            looked = in_thread(lambda: LoadingEngine.of(self._config, lambda: str(self._progress)), "forebay-look")
            built = in_thread(lambda: build(self._config, self._threads, self._progress.report), "forebay-load")
            while not built.done():
                await asyncio.wait([built], timeout=POLL_S)
                self._progress.tick()
                if looked.done() and not self._gate.opened and looked.exception() is None:  # what is wrong with the model, the load tells
                    self._gate.open(App(looked.result(), self._options))
        return built.result()

    async def _ask_redis(self) -> RedisCheck | None:
        """What a Redis of the operator's says; None if there is none or it takes too long. Requests are served meanwhile."""
        tiers = tier_options(self._config)
        if tiers.redis_url in (None, EMBEDDED):
            return None
        from forebay.engine.tier_check import check_redis

        asked = in_thread(lambda: check_redis(tiers, REDIS_ANSWER_S), "forebay-ask-redis")
        await asyncio.wait([asked], timeout=2 * REDIS_ANSWER_S)  # a name server may need longer than any Redis
        return asked.result() if asked.done() else None

    def _on_signal(self, number: int) -> None:
        if self._client is None:
            self._stop_at_once(number)
        loop = asyncio.get_running_loop()
        for other in (signal.SIGTERM, signal.SIGINT):  # the next one must not need the loop, which may hang by then
            loop.remove_signal_handler(other)
            signal.signal(other, lambda number, _: self._stop_at_once(number))
        threading.Thread(target=self._end_for_sure, name="forebay-end", daemon=True).start()
        grace = f"{self._config.server.drain_timeout_s:g} s"
        name = signal.Signals(number).name
        self._stop.set()
        _say(f"{name}: running requests have {grace} to finish; once more stops at once")

    def _stop_at_once(self, number: int) -> NoReturn:
        """Nothing runs yet, or the operator insists: a step in flight or a load cannot be interrupted in any gentler way."""
        self._progress.close()
        _say("stopped at once" if self._client else "stopped while loading")
        os._exit(128 + number if self._client else 0)

    def _end_for_sure(self) -> None:
        """In a thread: end the process if it has not ended by itself in the time that it has for that."""
        time.sleep(self._config.server.drain_timeout_s + FLUSH_S + LAST_S)
        _say("stopped, though not everything has ended")
        os._exit(1)

    async def _until_stopped(self, client: EngineClient) -> None:
        while not self._stop.is_set():
            if client.state == "dead":
                raise EngineStoppedError(f"the engine stopped: {client.reason}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), POLL_S)

    async def _drain(self, client: EngineClient) -> None:
        finished = await client.drain(self._config.server.drain_timeout_s)
        if not finished:
            _say("the time to finish is over; the requests that still run end with an error")

    def _announce(self, client: EngineClient, redis: RedisCheck | None) -> None:
        url = f"http://{_reachable(self._listener)}"
        asked = {"messages": [{"role": "user", "content": TRY_TEXT}], "max_tokens": 128, "forebay": {"explain": True}}
        body = json.dumps({"model": client.model_name, **asked})
        key = "" if self._keys.open else " -H 'Authorization: Bearer YOUR_KEY'"
        lines = [
            f"Forebay {__version__} serves {client.model_name} at {url}",
            f"  context {client.max_context:,} tokens, device {self._config.engine.device}, torch threads {self._threads}",
            f"  kv {client.engine.manager.capacity_tokens:,} tokens in memory, {describe_tiers(tier_options(self._config), redis)}",
            *(f"  note: Redis: {note}" for note in (redis.notes if redis and redis.server else ())),
            *self._access_lines(),
            "Try it twice:",
            f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'",
            f"  {'' if self._keys.open else f'{OWN_KEY}=YOUR_KEY '}{own_command()} chat --url {url}",
        ]
        with contextlib.suppress(OSError, ValueError):  # nobody may be reading
            print("\n".join(lines), flush=True)

    def _access_lines(self) -> list[str]:
        """Who may call, where that is worth a word."""
        lines = []
        if self._admin_listener is not None:
            lines.append(f"  metrics http://{_reachable(self._admin_listener)}/metrics")
        if not self._keys.open:
            lines.append(f"  {len(self._keys.callers())} API keys")
        elif not ipaddress.ip_address(self._listener.getsockname()[0].partition("%")[0]).is_loopback:
            lines.append("  note: no API keys: whoever reaches this address may use it; see `forebay keys --help`")
        return lines


def _reachable(listener: socket.socket) -> str:
    """HOST:PORT as a client on this machine can use it."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{shown}:{port}"
