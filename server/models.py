"""GET /v1/models in the forms that its clients read, and /version: what is served, in any state of the engine (spec/http-api.md §6)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl

from forebay import __version__
from forebay.server.errors import HttpError
from forebay.server.exchange import Exchange
from forebay.server.field_errors import invalid
from forebay.server.prompts import FIM
from forebay.server.turns import Turns

STARTED = int(time.time())  # Unix seconds; a model has been there since the server has
MAX_PAGE = 1000

# What Codex shows next to each effort; the efforts between them mean the same as their neighbours.
EFFORTS = {"low": "Short reasoning", "high": "The usual depth of reasoning"}

# Codex tells a model that it knows nothing about how to work; this stands in for what it would say.
CODEX_INSTRUCTIONS = (
    "You are a coding agent that works in the user's terminal and files through the tools of this session. Read the code that a change "
    "touches before you change it, keep to the conventions you find there, and change no more than the task needs. Prefer the patch tool "
    "for edits and the shell for everything else. Run the tests or the program after a change where that is possible, and say so when it "
    "is not. Never undo work of the user that you were not asked to undo. When you are done, say briefly what you changed and what is left."
)


class ModelRoutes:
    """The handlers of both routes. They answer in every state of the engine."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def models(self, exchange: Exchange) -> None:
        """The list, or with an id below the path its entry.

        Anthropic's form if the request has `anthropic-version` or came under /anthropic; for Codex, which sends `client_version`, a
        `models` array of its own form beside the list.
        """
        anthropic = exchange.family == "anthropic" or b"anthropic-version" in exchange.headers
        if anthropic:
            exchange.family = "anthropic"
        # An id may hold slashes, and "models" too: what counts is the first one of the path.
        wanted = exchange.path.partition("models")[2].removeprefix("/").removesuffix("/")
        if wanted:
            exchange.route = "/v1/models/{id}"
            if wanted not in self._turns.names:
                text = f"The model `{wanted[:128]}` does not exist. Available: {', '.join(self._turns.names)}"
                raise HttpError(404, text, code="model_not_found", param="model")
            await exchange.reply_json(200, self._anthropic_entry(wanted) if anthropic else self._entry(wanted))
            return
        query = dict(parse_qsl(exchange.query.decode("latin-1"), keep_blank_values=True))
        if anthropic:
            await exchange.reply_json(200, self._page(query))
            return
        answer: dict[str, Any] = {"object": "list", "data": [self._entry(name) for name in self._turns.names]}
        if "client_version" in query:
            answer["models"] = [self._codex_entry(name, place) for place, name in enumerate(self._turns.names)]
        await exchange.reply_json(200, answer)

    async def version(self, exchange: Exchange) -> None:
        """Version of the server, the model and what the API offers. `revision` changes with version, model, tokenizer and context."""
        api = {
            "chat_completions": True,
            "completions": True,
            "echo": True,
            "fill_in_the_middle": self._fills(),
            "tokenize": True,
            "models": ["openai", "anthropic", "codex"],
            "vision": self._vision,
            "logprobs": "of the model's distribution, before temperature, penalties and filters",
        }
        turns = self._turns
        await exchange.reply_json(200, {"version": __version__, "model": turns.names[0], "revision": turns.fingerprint, "api": api})

    @property
    def _vision(self) -> bool:
        return self._turns.engine.codec.vision is not None

    def _fills(self) -> bool:
        return all(self._turns.engine.tokenizer.special_id(spelling) is not None for spelling in FIM)

    def _entry(self, name: str) -> dict[str, Any]:
        context = self._turns.engine.max_context
        return {
            "id": name,
            "object": "model",
            "created": STARTED,
            "owned_by": "forebay",
            "root": self._turns.names[0],
            "parent": None,
            "max_model_len": context,
            "context_length": context,
            "max_output_tokens": self._most_output,
            "capabilities": {"vision": self._vision, "tools": True, "reasoning": True},
        }

    @property
    def _most_output(self) -> int:
        return min(self._turns.options.max_output, self._turns.engine.max_context)

    def _anthropic_entry(self, name: str) -> dict[str, Any]:
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": datetime.fromtimestamp(STARTED, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lifecycle": "active",
            "max_input_tokens": self._turns.engine.max_context,
            "max_tokens": self._most_output,
        }

    def _page(self, query: dict[str, str]) -> dict[str, Any]:
        """Anthropic's list: `limit` entries after the id `after_id`, or the last ones before `before_id`."""
        names: Sequence[str] = self._turns.names
        limit = query.get("limit", str(MAX_PAGE))
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 1 <= int(limit) <= MAX_PAGE):
            raise invalid("limit", f"expected an integer from 1 to {MAX_PAGE}, got {limit[:40]!r}")
        for field in ("after_id", "before_id"):
            if query.get(field) and query[field] not in names:
                raise invalid(field, f"no model of the list has this id, got {query[field][:128]!r}")
        if after := query.get("after_id"):
            names = names[names.index(after) + 1 :]
        before = query.get("before_id")
        if before and before in names:
            names = names[: names.index(before)]
        shown = names[-int(limit) :] if before else names[: int(limit)]
        return {
            "data": [self._anthropic_entry(name) for name in shown],
            "has_more": len(shown) < len(names),
            "first_id": shown[0] if shown else None,
            "last_id": shown[-1] if shown else None,
        }

    def _codex_entry(self, name: str, place: int) -> dict[str, Any]:
        """What Codex decodes; a key that it misses costs it the whole list."""
        context = self._turns.engine.max_context
        return {
            "slug": name,
            "display_name": name,
            "description": f"{self._turns.names[0]}, served by Forebay",
            "default_reasoning_level": "high",
            "supported_reasoning_levels": [{"effort": effort, "description": text} for effort, text in EFFORTS.items()],
            "shell_type": "shell_command",
            "visibility": "list",
            "supported_in_api": True,
            "priority": place,
            "availability_nux": None,
            "upgrade": None,
            "base_instructions": CODEX_INSTRUCTIONS,
            "supports_reasoning_summaries": True,
            "default_reasoning_summary": "none",
            "support_verbosity": False,
            "default_verbosity": None,
            "apply_patch_tool_type": "freeform",
            "truncation_policy": {"mode": "tokens", "limit": 10_000},
            "supports_parallel_tool_calls": True,
            "supports_image_detail_original": self._vision,
            "context_window": context,
            "max_context_window": context,
            "effective_context_window_percent": 95,
            "experimental_supported_tools": [],
            "input_modalities": ["text", "image"] if self._vision else ["text"],
            "supports_search_tool": False,
            "additional_speed_tiers": [],
            "web_search_tool_type": "text",
        }
