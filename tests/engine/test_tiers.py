"""What may be said about the tiers, and what it comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.engine.tiers import TierOptions
from forebay.model.errors import ConfigError


def test_folder_given_as_text_is_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    given: list[Any] = ["~/kv", Path("~/kv"), str(tmp_path / "kv")]
    assert {TierOptions(dir=folder) for folder in given} == {TierOptions(dir=tmp_path / "kv")}


@pytest.mark.parametrize("word", ["", "none"])
def test_words_for_nothing(word: Any) -> None:
    assert TierOptions(dir=word, redis_url=word) == TierOptions()


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("dir", 5, "a path or None, got 5"),
        ("dir", b"/kv", "a path or None"),
        ("redis_url", True, "a URL or None, got True"),
        ("redis_cluster", "yes", "True or False"),
        ("ssd_bytes", "1GiB", "an integer or None, got '1GiB'"),
        ("ssd_bytes", 1.5, "an integer or None"),
        ("ssd_free_bytes", None, "an integer, got None"),
        ("staging_bytes", True, "an integer"),
        ("ssd_ttl_s", "72h", "a number"),
        ("redis_timeout_s", None, "a number"),
        ("swa_ttl_s", float("nan"), "positive, got nan"),
        ("swa_bytes", 0, "positive, got 0"),
        ("ssd_free_bytes", -1, "0 or positive, got -1"),
    ],
)
def test_value_that_cannot_be_is_refused_by_name(field: str, value: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field} must be {rule}") as caught:
        TierOptions(**{field: value})
    assert caught.value.param == field


def test_home_of_nobody_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="there is no home folder for '~nobody-of-this-name/kv'"):
        TierOptions(dir="~nobody-of-this-name/kv")  # type: ignore[arg-type]
