"""The installable peer of `forebay bench frontend`: LiteLLM's proxy, an OpenAI-compatible server, over a backend that only emits words.

Run as a program by a Python of its own that has `litellm[proxy]`, whose dependencies exclude ours; nothing of forebay is imported. What is
measured is the proxy as it is installed: its HTTP server, validation, router and stream. The backend is a handler in the same process that
gives every running request the same word in each step, as text: unlike our server it neither encodes a prompt nor detokenises an answer.

Control is that of frontend_server.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

WORD = " the"
MODEL = "scripted"
BACKLOG = 4096


class Steps:
    """The clock of the backend: all running requests get a word at the same moments, `interval` seconds apart."""

    def __init__(self, interval: float) -> None:
        self.times: list[float] = []
        self.first: dict[str, int] = {}
        self._interval, self._gather, self._due = interval, 0, 0.0
        self._running = 0
        self._next: asyncio.Future[None] | None = None

    def restart(self, gather: int) -> None:
        """Forget what was emitted; no step before `gather` requests run at once."""
        self._gather = gather
        self.times, self.first = [], {}

    async def words(self, name: str, count: int) -> AsyncIterator[str]:
        """One word per step."""
        self._running += 1
        try:
            for number in range(count):
                await self._step()
                if not number:
                    self.first[name] = len(self.times) - 1
                yield WORD
        finally:
            self._running -= 1

    async def _step(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().create_task(self._emit(self._next))
        await asyncio.shield(self._next)

    async def _emit(self, step: asyncio.Future[None]) -> None:
        while self._running < self._gather:
            await asyncio.sleep(0.002)
        self._gather = 0
        await asyncio.sleep(max(0.0, self._due - time.monotonic()))
        now = time.monotonic()
        self._due = max(self._due, now - self._interval) + self._interval
        self.times.append(now)
        self._next = None
        step.set_result(None)


def serve(interval: float, port_out: Any) -> None:
    """Serve until standard input ends."""
    import litellm
    import uvicorn
    from litellm.proxy.proxy_server import app
    from litellm.utils import custom_llm_setup

    steps = Steps(interval)

    class Words(litellm.CustomLLM):  # type: ignore[misc, name-defined, unused-ignore]
        async def astreaming(self, *args: Any, **given: Any) -> AsyncIterator[dict[str, Any]]:
            headers = given["litellm_params"]["proxy_server_request"]["headers"]
            chunk: dict[str, Any] = {"is_finished": False, "finish_reason": "", "usage": None, "index": 0, "tool_use": None}
            async for word in steps.words(headers["x-request-id"], given["optional_params"]["max_tokens"]):
                yield {**chunk, "text": word}
            yield {**chunk, "text": "", "is_finished": True, "finish_reason": "length"}

    litellm.custom_provider_map = [{"provider": MODEL, "custom_handler": Words()}]
    custom_llm_setup()  # type: ignore[no-untyped-call, unused-ignore]
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    server = uvicorn.Server(uvicorn.Config(app, loop="uvloop", log_level="error", access_log=False))

    async def run() -> None:
        loop = asyncio.get_running_loop()

        async def answer(line: str) -> dict[str, Any]:
            if line.startswith("gather"):
                steps.restart(int(line.split()[1]))
                return {}
            return {"steps": steps.times, "first": steps.first, "word": WORD}

        def control() -> None:
            for line in sys.stdin:
                print(json.dumps(asyncio.run_coroutine_threadsafe(answer(line), loop).result()), file=port_out, flush=True)
            loop.call_soon_threadsafe(setattr, server, "should_exit", True)

        async def announce() -> None:
            while not server.started:
                await asyncio.sleep(0.05)
            print(listener.getsockname()[1], file=port_out, flush=True)
            threading.Thread(target=control, daemon=True).start()

        task = loop.create_task(announce())
        await server.serve([listener])
        task.cancel()

    import uvloop

    uvloop.run(run())


def main() -> None:
    """Read the arguments, write the proxy's configuration and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--interval", type=float, required=True)
    args = parser.parse_args()
    port_out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the proxy prints to standard output
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        models = [{"model_name": MODEL, "litellm_params": {"model": f"{MODEL}/words"}}]
        json.dump({"model_list": models, "litellm_settings": {"drop_params": True}}, file)
        file.flush()
        # It is reachable from this machine only, and asks nobody: neither for keys nor, on the network, for prices.
        os.environ |= {
            "CONFIG_FILE_PATH": file.name,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
            "LITELLM_LOG": "ERROR",
        }
        serve(args.interval, port_out)


if __name__ == "__main__":
    main()
