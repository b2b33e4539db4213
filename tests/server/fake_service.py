"""`forebay serve` with a stand-in engine and application, run as a program by test_serve.py.

The engine takes FAKE_LOAD_S to load (or fails with FAKE_ERROR) and dies after FAKE_DEATH_S; POST /slow answers after FAKE_SLOW_S.
With FAKE_LAST_S it hangs when it is to end, and the process has so long to end all the same.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from forebay.model.errors import CheckpointError
from forebay.server import cli
from forebay.server.commands import serve


class FakeClient:
    model_name = "fake"
    max_context = 4096
    engine = SimpleNamespace(manager=SimpleNamespace(capacity_tokens=8192))
    reason = "it was told to"

    def __init__(self) -> None:
        self.running = 0
        self.draining = False
        self.dies = time.monotonic() + float(os.environ.get("FAKE_DEATH_S", "1e9"))

    @property
    def state(self) -> str:
        return "dead" if time.monotonic() > self.dies else "draining" if self.draining else "ready"

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        if "FAKE_LAST_S" in os.environ:
            print("engine hangs", flush=True)
            threading.Event().wait()  # on the loop
        print("engine stopped", flush=True)

    async def drain(self, grace_s: float) -> bool:
        self.draining = True
        end = time.monotonic() + grace_s
        while self.running and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return not self.running


def fake_app(client: FakeClient, options: Any) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            print("application ended", flush=True)
            await send({"type": "lifespan.shutdown.complete"})
            return
        status = 503 if client.draining else 200
        if scope["path"] == "/slow":
            client.running += 1
            print("slow request runs", flush=True)
            await asyncio.sleep(float(os.environ["FAKE_SLOW_S"]))
            client.running -= 1
            status = 200
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    return app


def fake_build(config: Any, threads: int, progress: Callable[[int, int, str], None]) -> FakeClient:
    if error := os.environ.get("FAKE_ERROR"):
        raise CheckpointError(error)
    progress(25, 100, "layers.3.attn.wkv.weight")
    time.sleep(float(os.environ.get("FAKE_LOAD_S", "0")))
    return FakeClient()


if __name__ == "__main__":
    serve.build = fake_build  # type: ignore[assignment]
    serve.create_app = fake_app
    serve.LAST_S = float(os.environ.get("FAKE_LAST_S", serve.LAST_S))
    sys.exit(cli.main(["serve", *sys.argv[1:]]))
