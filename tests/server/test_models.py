"""GET /v1/models as OpenAI's, Anthropic's and Codex's clients read it, and /version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from forebay.server.limits import ServerOptions
from script_engine import ScriptEngine, Served, serve

NAME = "deepseek-ai/DeepSeek-V4.1-Flash"
NAMES = [NAME, "deepseek-flash", "claude-deepseek-flash"]
ANTHROPIC = {"anthropic-version": "2023-06-01"}

# What the decoder of Codex asks for (openai/codex, codex-rs/protocol, ModelInfo), by type; None stands for a key that may be null.
CODEX: dict[str, type | tuple[type, ...]] = {
    "slug": str, "display_name": str, "description": str, "default_reasoning_level": str, "supported_reasoning_levels": list,
    "shell_type": str, "visibility": str, "supported_in_api": bool, "priority": int, "availability_nux": type(None), "upgrade": type(None),
    "base_instructions": str, "supports_reasoning_summaries": bool, "default_reasoning_summary": str, "support_verbosity": bool,
    "default_verbosity": type(None), "apply_patch_tool_type": (str, type(None)), "truncation_policy": dict,
    "supports_parallel_tool_calls": bool, "supports_image_detail_original": bool, "context_window": int, "max_context_window": int,
    "effective_context_window_percent": int, "experimental_supported_tools": list, "input_modalities": list, "supports_search_tool": bool,
    "additional_speed_tiers": list, "web_search_tool_type": str,
}  # fmt: skip


@pytest.fixture(scope="module")
def named() -> Iterator[Served]:
    with serve(ScriptEngine(max_context=1 << 20), ServerOptions(model_name=NAME, aliases=tuple(NAMES[1:]))) as served:
        yield served


def get(named: Served, path: str, **options: Any) -> httpx.Response:
    return httpx.get(named.url + path, **options)


def test_the_official_client_lists_and_finds_them(named: Served) -> None:
    with named.client() as client:
        listed = client.models.list()
        assert [model.id for model in listed.data] == NAMES
        for name in NAMES:
            assert client.models.retrieve(name).to_dict() == next(m for m in listed.data if m.id == name).to_dict()
        with pytest.raises(openai.NotFoundError) as error:
            client.models.retrieve("other")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    assert "Available: deepseek-ai/DeepSeek-V4.1-Flash, deepseek-flash" in error.value.message


def test_an_entry_tells_sizes_and_abilities(named: Served) -> None:
    entry = get(named, "/v1/models").json()["data"][1]
    assert (entry["id"], entry["root"], entry["parent"], entry["object"]) == ("deepseek-flash", NAME, None, "model")
    assert entry["max_model_len"] == entry["context_length"] == 1 << 20
    assert entry["max_output_tokens"] == 393_216
    assert entry["capabilities"] == {"vision": False, "tools": True, "reasoning": True}
    assert isinstance(entry["created"], int)


@pytest.mark.parametrize("prefix", ["/v1/models", "/models", "/anthropic/v1/models"])
def test_ids_with_slashes(named: Served, prefix: str) -> None:
    for spelling in (NAME, NAME.replace("/", "%2F"), NAME.replace("/", "%2f") + "/"):
        assert get(named, f"{prefix}/{spelling}").json()["id"] == NAME
    assert get(named, f"{prefix}/").json()["data"][0]["id"] == NAME
    assert get(named, f"{prefix}/deepseek-ai").status_code == 404
    assert get(named, f"{prefix}/{NAME}/x").status_code == 404


@pytest.mark.parametrize(
    ("path", "headers"), [("/v1/models", ANTHROPIC), ("/anthropic/v1/models", {}), ("/anthropic/v1/models", ANTHROPIC)]
)
def test_anthropics_form(named: Served, path: str, headers: dict[str, str]) -> None:
    response = get(named, f"{path}?limit=1000", headers=headers)
    answer = response.json()
    assert set(answer) == {"data", "has_more", "first_id", "last_id"}
    assert [entry["id"] for entry in answer["data"]] == NAMES
    assert (answer["has_more"], answer["first_id"], answer["last_id"]) == (False, NAMES[0], NAMES[-1])
    entry = answer["data"][0]
    assert set(entry) == {"type", "id", "display_name", "created_at", "lifecycle", "max_input_tokens", "max_tokens"}
    assert (entry["type"], entry["lifecycle"], entry["max_input_tokens"], entry["max_tokens"]) == ("model", "active", 1 << 20, 393_216)
    assert entry["created_at"].endswith("Z")
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert get(named, f"{path}/deepseek-flash", headers=headers).json() == answer["data"][1]
    missing = get(named, f"{path}/other", headers=headers)
    assert (missing.status_code, missing.json()["type"], missing.json()["error"]["type"]) == (404, "error", "not_found_error")


def test_pages_of_anthropics_form(named: Served) -> None:
    def page(query: str) -> tuple[list[str], bool]:
        answer = get(named, f"/v1/models?{query}", headers=ANTHROPIC).json()
        ids = [entry["id"] for entry in answer["data"]]
        assert (answer["first_id"], answer["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
        return ids, answer["has_more"]

    assert page("limit=2") == (NAMES[:2], True)
    assert page("limit=2&after_id=deepseek-flash") == (NAMES[2:], False)
    assert page("limit=1&before_id=claude-deepseek-flash") == (NAMES[1:2], True)
    assert page("after_id=claude-deepseek-flash") == ([], False)
    for query, field in [
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("limit=1001", "limit"),
        ("limit=", "limit"),
        ("after_id=x", "after_id"),
    ]:
        response = get(named, f"/v1/models?{query}", headers=ANTHROPIC)
        assert response.status_code == 400
        assert field in response.json()["error"]["message"]
    assert get(named, "/v1/models?limit=x").status_code == 200  # OpenAI's form has no pages


def test_the_catalog_of_codex(named: Served) -> None:
    answer = get(named, "/v1/models?client_version=0.130.0").json()
    assert [entry["id"] for entry in answer["data"]] == NAMES
    assert [entry["slug"] for entry in answer["models"]] == NAMES
    assert "models" not in get(named, "/v1/models").json()
    for place, entry in enumerate(answer["models"]):
        assert set(entry) == set(CODEX)
        assert {name for name, kind in CODEX.items() if not isinstance(entry[name], kind)} == set()
        assert entry["priority"] == place
        assert entry["default_reasoning_level"] in [level["effort"] for level in entry["supported_reasoning_levels"]]
        assert all(set(level) == {"effort", "description"} for level in entry["supported_reasoning_levels"])
        assert (entry["shell_type"], entry["visibility"], entry["truncation_policy"]) == (
            "shell_command", "list", {"mode": "tokens", "limit": 10_000},
        )  # fmt: skip
        assert entry["context_window"] == 1 << 20
        assert entry["base_instructions"]  # an agent without any would not know that it is one


@pytest.mark.parametrize("state", ["loading", "draining", "dead"])
def test_listed_in_every_state(served: Served, state: Any) -> None:
    served.engine.state = state
    assert get(served, "/v1/models").json()["data"][0]["id"] == "script"
    assert get(served, "/v1/models/script").status_code == 200
    assert get(served, "/version").status_code == 200


def test_version(served: Served, named: Served) -> None:
    one, other = get(served, "/version").json(), get(named, "/version").json()
    assert set(one) == {"version", "model", "revision", "api"}
    assert (one["model"], other["model"]) == ("script", NAME)
    assert one["revision"] != other["revision"]  # another context
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert httpx.post(served.url + "/v1/chat/completions", json=body).json()["system_fingerprint"] == one["revision"]
    assert (one["api"]["completions"], one["api"]["fill_in_the_middle"], one["api"]["vision"]) == (True, True, False)
