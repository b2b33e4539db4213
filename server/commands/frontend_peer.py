"""What stands in for a peer in `forebay bench frontend` where none is installed: a FastAPI application of ours over the same backend.

It is no product that anybody runs; frontend_litellm.py drives one. It encodes, detokenises and waits for tokens with the same parts as
ours; HTTP, validation and the stream are FastAPI's own ways.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from forebay.engine.client import EngineClient
from forebay.engine.types import Request, SamplingParams


class Message(BaseModel):
    role: str
    content: str


class Body(BaseModel):
    messages: list[Message]
    max_tokens: int = 16
    stream: bool = False


def fastapi_app(client: EngineClient) -> FastAPI:
    """The application: streamed chat completions and nothing else."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(body: Body, request: HttpRequest) -> StreamingResponse:
        encoded = {"messages": [message.model_dump() for message in body.messages], "thinking": {"type": "disabled"}}
        prompt = await asyncio.to_thread(client.codec.encode, encoded)
        name = request.headers["x-request-id"]
        asked = Request(prompt.token_ids, SamplingParams(max_tokens=body.max_tokens), request_id=name, prompt=prompt)

        async def events() -> AsyncGenerator[str, None]:
            yield _chunk(client, name, {"role": "assistant", "content": ""})
            async for event in client.submit(asked):
                for delta in event.deltas:
                    yield _chunk(client, name, {"content": delta.text})
                if event.finish_reason is not None:
                    yield _chunk(client, name, {}, event.finish_reason)
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def _chunk(client: EngineClient, name: str, delta: dict[str, Any], finish: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    head = {"id": name, "object": "chat.completion.chunk", "created": int(time.time()), "model": client.model_name}
    return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
