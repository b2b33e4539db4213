"""A whole JSON answer that takes long: line feeds in front of it keep impatient clients and proxies on the line."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from forebay.server.body import to_json
from forebay.server.errors import Failure
from forebay.server.exchange import JSON, Exchange
from forebay.server.limits import ServerOptions


class PatientReply:
    """Async context manager around the work that ends in `send_json` or `send`.

    With `nonstream_keepalive`, after `nonstream_wait_s` the answer begins with status 200 and a line feed, which may stand before JSON;
    another one follows every `keepalive_comment_s`. An error after that comes as its envelope under status 200.
    """

    def __init__(self, exchange: Exchange, options: ServerOptions) -> None:
        self._exchange = exchange
        self._on = options.nonstream_keepalive
        self._wait_s, self._interval_s = options.nonstream_wait_s, options.keepalive_comment_s
        self._beat: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()  # the last line feed is whole before the answer begins

    async def __aenter__(self) -> PatientReply:
        if self._on:
            self._beat = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._beat is not None:
            self._beat.cancel()

    async def send_json(self, value: Any) -> None:
        """Send the answer and end it."""
        await self.send(to_json(value))

    async def send(self, data: bytes) -> None:
        """Send the answer, which is JSON already, and end it."""
        async with self._sending:
            if self._exchange.status:
                await self._finish(data)
            else:
                self._stop()
                await self._exchange.reply(200, data)

    async def _fail(self, failure: Failure) -> None:
        async with self._sending:
            await self._finish(failure.body(self._exchange.family, self._exchange.request_id))

    async def _finish(self, data: bytes) -> None:
        self._stop()
        await self._exchange.send({"type": "http.response.body", "body": data, "more_body": False})

    def _stop(self) -> None:
        if self._beat is not None:
            self._beat.cancel()

    async def _keep_alive(self) -> None:
        await asyncio.sleep(self._wait_s)
        while True:
            async with self._sending:
                if not self._exchange.status:
                    self._exchange.fail_stream = self._fail
                    await self._exchange.start(200, [JSON])
                await self._exchange.send({"type": "http.response.body", "body": b"\n", "more_body": True})
            await asyncio.sleep(self._interval_s or self._wait_s)
