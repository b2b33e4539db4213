"""Requests that no client means: good bodies of every route with something wrong, in the tree, in the bytes or around them."""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"enum": ["a", "b"]}}, "required": ["x"]}
TOOL = {"type": "function", "function": {"name": "f", "description": "does it", "parameters": PARAMETERS}}
PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
HI = {"role": "user", "content": "Hi"}

CHAT: Sequence[dict[str, Any]] = (
    {"messages": [HI]},
    {"messages": [{"role": "system", "content": "Be brief."}, HI], "stream": True, "stream_options": {"include_usage": True}},
    {
        "messages": [
            HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_1", "content": "2"}
        ],
        "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True, "temperature": 0.5, "top_p": 0.9, "seed": 7,
    },
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]}], "n": 2,
     "logprobs": True, "top_logprobs": 3, "stop": ["x", "yy"], "logit_bias": {"5": -100, "6": 1.5}, "max_tokens": 5},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}}]}]},
    {"messages": [HI], "response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": PARAMETERS}}},
    {"messages": [HI], "response_format": {"type": "json_object"}, "reasoning_effort": "high", "thinking": {"type": "enabled"}, "top_k": 5},
    {"messages": [HI, {"role": "assistant", "content": "And", "reasoning_content": "h", "prefix": True}], "cache_salt": "s", "priority": 3},
    {"messages": [HI], "forebay": {"explain": True, "prefill": "exact"}, "return_token_ids": True, "user": "u", "metadata": {"a": "b"}},
)  # fmt: skip
PLAIN: Sequence[dict[str, Any]] = (
    {"prompt": "Once", "max_tokens": 4},
    {"prompt": ["Once", "Twice"], "stream": True, "echo": True, "logprobs": 2, "n": 2, "best_of": 2},
    {"prompt": [[1, 2, 3], [4]], "suffix": None, "stop": "x", "temperature": 0},
    {"prompt": [5, 6], "stream": True, "stream_options": {"include_usage": True}, "seed": 1},
)
BLOCKS = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
MESSAGES: Sequence[dict[str, Any]] = (
    {"model": None, "max_tokens": 5, "messages": [HI]},
    {"max_tokens": 5, "messages": [{"role": "user", "content": BLOCKS}], "system": BLOCKS, "stream": True, "stop_sequences": ["x"]},
    {
        "max_tokens": 2048, "thinking": {"type": "enabled", "budget_tokens": 1024}, "tool_choice": {"type": "auto"},
        "tools": [{"name": "f", "description": "does it", "input_schema": PARAMETERS}],
        "messages": [
            HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": BLOCKS, "is_error": False}]},
        ],
    },
    {"max_tokens": 9, "messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL[22:]}}]}], "temperature": 1, "top_k": 3},
)  # fmt: skip
RESPONSES: Sequence[dict[str, Any]] = (
    {"input": "Hi"},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}], "instructions": "Be brief.", "stream": True},
    {
        "input": [
            {"type": "message", **HI}, {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "2"}, {"type": "reasoning", "summary": []},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS, "strict": False}], "tool_choice": "auto",
        "reasoning": {"effort": "high", "summary": "auto"}, "include": ["reasoning.encrypted_content"], "store": False,
    },
    {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "s", "schema": PARAMETERS, "strict": True}}, "max_output_tokens": 9},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PIXEL}]}], "previous_response_id": "resp_1"},
)  # fmt: skip
BODIES: dict[str, Sequence[dict[str, Any]]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": PLAIN,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": [{k: v for k, v in body.items() if k not in ("max_tokens", "stream")} for body in MESSAGES],
    "/v1/responses": RESPONSES,
    "/v1/responses/input_tokens": [{k: v for k, v in body.items() if k != "stream"} for body in RESPONSES],
    "/tokenize": ({"prompt": "Hi"}, {"messages": [HI], "tools": [TOOL]}),
    "/detokenize": ({"tokens": [1, 2, 3]},),
}

ODD: Sequence[Any] = (
    None, True, False, 0, 1, -1, 5, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, 1e-320, 5.0, "", " ", "0", "5", "true", "null",
    "none", "auto", "required", "user", "system", "tool", "text", "image_url", "\x00", "\ufeff", "\U0001f600" * 3, "é" * 50, "<｜User｜>",
    "</think>", "<｜DSML｜function_calls>", "x" * 5000, "a/b", "../../etc/passwd", "http://127.0.0.1/", "file:///etc/passwd", "data:,",
    "$ref", "%s%n{}", [], {}, [[]], [{}], [None], {"": None}, {"type": None}, {"type": "text"}, {"type": "function"}, [0] * 300,
    ["x"] * 300, {"$ref": "#"},
    {"type": ["object", "null"], "anyOf": [{}]}, {"a": {"b": {"c": {"d": [{"e": {}}]}}}}, [1, "a", None, [2, {"b": 3}]],
)  # fmt: skip
NESTED: Sequence[str] = (  # JSON inside of strings, which passes the limits of the body as one value
    '{"a": [1, 2]}', '{"n": 123456789012345678901234567890}', '"{\\"a\\": 1}"', "[" * 3000, "{" + '"a":{' * 300 + "}" * 301,
    '{"n":1234567890123456789012,"a":[' + ",".join(["[]"] * 5000) + "]}", "[" + ",".join(["{}"] * 5000) + "]", '{"type": "object"',
    "1" * 5000,
    json.dumps(json.dumps({"x": 2**70})), '{"x": NaN}', "{\"x\": \"\\ud800\"}",
)  # fmt: skip
LONG: Sequence[str] = (  # texts of a megabyte, of many tokens or of none that can be cut
    "1 " * 500_000, "a" * 1_000_000, "\u3042" * 300_000, "!" * 700_000, "<think>" * 100_000, "word, " * 150_000, "[]," * 300_000,
)
BYTES = (
    b"\xff", b"\x00", b"\xed\xa0\x80", b"\\ud800", b"\\", b'"', b"{", b"}", b"[", b"]", b",", b":", b"NaN", b"1e999", b"-", b"\n",
    b"\xef\xbb\xbf",
)  # fmt: skip
HEADERS: Sequence[tuple[bytes, bytes]] = (
    (b"content-type", b"text/plain"), (b"content-type", b"multipart/form-data; boundary=x"), (b"content-encoding", b"gzip"),
    (b"content-encoding", b"zstd"), (b"content-encoding", b"gzip, deflate"), (b"content-encoding", b"deflate,deflate,deflate"),
    (b"content-encoding", b",".join([b"gzip"] * 3000)), (b"connection", b"Upgrade, HTTP2-Settings"),
    (b"content-encoding", b"deflate"), (b"content-encoding", b"br"), (b"x-request-id", b"\xff" * 9), (b"accept", b"nothing/at-all"),
    (b"anthropic-version", b"1900-01-01"), (b"anthropic-beta", b"x" * 900), (b"origin", b"null"), (b"expect", b"100-continue"),
    (b"authorization", b"Bearer "), (b"content-length", b"999999999999"), (b"content-length", b"-1"), (b"upgrade", b"websocket"),
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    path: str
    body: bytes
    headers: list[tuple[bytes, bytes]]


def mutants(count: int, seed: int, names: Sequence[str]) -> Iterator[Mutant]:
    """`count` requests, the same ones for the same seed. `names` are fields that servers know, put in where they were not."""
    rng = random.Random(seed)
    paths = list(BODIES)
    for _ in range(count):
        path = rng.choice(paths)
        # Sometimes the body of another protocol: clients with a wrong base URL do that.
        tree = copy.deepcopy(rng.choice(BODIES[path if rng.random() < 0.95 else rng.choice(paths)]))
        body = b"{}"
        with contextlib.suppress(RecursionError):  # of ours, over what was nested several times
            for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 6))):
                tree = _bend(tree, rng, names)
            body = json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode()
        for _ in range(rng.choice((0,) * 8 + (1, 2, 5))):
            body = _break(body, rng)
        headers = [(b"content-type", b"application/json")]
        if rng.random() < 0.1:
            name, value = rng.choice(HEADERS)
            headers = [header for header in headers if header[0] != name] + [(name, value)]
            if value.startswith(b"gzip") and rng.random() < 0.7:
                body = gzip.compress(body, 1)
                body = zlib.compress(body, 1) if value.endswith(b"deflate") else body
            if name == b"connection":
                headers.append((b"upgrade", b"h2c"))
        yield Mutant(path, body, headers)


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a tree."""
    stack = [node]
    while stack:
        top = stack.pop()
        if isinstance(top, (dict, list)):
            keys = list(top) if isinstance(top, dict) else list(range(len(top)))
            yield from ((top, key) for key in keys)
            stack += [top[key] for key in keys]


def _bend(tree: Any, rng: random.Random, names: Sequence[str]) -> Any:
    """One change of the tree."""
    places = list(_places(tree))
    if not places or rng.random() < 0.01:
        return copy.deepcopy(rng.choice(ODD))
    node, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind == 0:
        del node[key]
    elif kind <= 2:
        node[key] = copy.deepcopy(rng.choice(LONG if rng.random() < 0.003 else NESTED if rng.random() < 0.1 else ODD))
    elif kind == 3 and isinstance(tree, dict):
        tree[rng.choice(names)] = copy.deepcopy(rng.choice(NESTED if rng.random() < 0.1 else ODD))
    elif kind == 4:
        other, name = rng.choice(places)
        if name in other if isinstance(other, dict) else name < len(other):
            node[key] = copy.deepcopy(other[name])
    elif kind == 5 and isinstance(node, list):
        node += [copy.deepcopy(node[key]) for _ in range(rng.choice((1, 2, 40)))]
    elif kind == 6:
        for _ in range(rng.choice((1, 3, 250))):
            node[key] = [node[key]] if rng.random() < 0.5 else {"type": "object", "properties": {"x": node[key]}}
    elif isinstance(node, dict) and isinstance(key, str):
        node[rng.choice((key.upper(), f"{key}x", "", "__proto__", "é", key[:1]))] = node.pop(key)
    return tree


def _break(body: bytes, rng: random.Random) -> bytes:
    """One change of the bytes."""
    at = rng.randrange(len(body) + 1)
    kind = rng.randrange(4)
    if kind == 0:
        return body[:at]
    if kind == 1:
        return body[:at] + rng.choice(BYTES) + body[at:]
    if kind == 2:
        return body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :]
    return body[:at] + body[max(at - rng.randrange(40), 0) :]


def packets(mutant: Mutant, rng: random.Random) -> Iterator[bytes]:
    """A request as the bytes of a connection, in one or several packets: with the right length of its body or as chunks, perhaps with
    another request or nonsense behind it, perhaps broken off or broken."""
    headers = [header for header in mutant.headers if header[0] != b"content-length"]
    lengths = [header for header in mutant.headers if header[0] == b"content-length"]
    body = mutant.body
    if lengths:
        headers += lengths
    elif rng.random() < 0.2:
        size = rng.choice((1, 7, 1000, 1 << 20)) if len(body) < 5000 else 1 << 16
        parts = [body[i : i + size] for i in range(0, len(body), size)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        headers.append((b"transfer-encoding", b"chunked"))
    else:
        headers.append((b"content-length", b"%d" % len(body)))
    lines = [b"POST %b HTTP/1.1" % mutant.path.encode(), b"host: x", *(name + b": " + value for name, value in headers)]
    data = b"\r\n".join(lines) + b"\r\n\r\n" + body
    kind = rng.randrange(10)
    if kind == 0:
        data += b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * rng.choice((1, 3, 500))
    elif kind == 1:
        data += rng.randbytes(rng.choice((1, 50, 5000)))
    elif kind == 2:
        data = data[: rng.randrange(len(data))]
    elif kind == 3:
        data = _break(data, rng)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 1, 5))))
    yield from (data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True))
