"""The configuration tree: precedence, ranges, unknown names, and where each value came from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from forebay.model.errors import ConfigError
from forebay.server.config import Config, Origins, fields, load, to_yaml
from forebay.server.limits import ServerOptions


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the folder that the other tests of this room are given."""
    monkeypatch.delenv("FOREBAY_CACHE__DIR")


def loaded(text: str | None, tmp_path: Path, flags: dict[str, tuple[str, Any]] | None = None) -> tuple[Config, Origins]:
    if text is None:
        return load(None, flags)
    file = tmp_path / "forebay.yaml"
    file.write_text(text)
    return load(file, flags)


def refusal(text: str | None, tmp_path: Path, flags: dict[str, tuple[str, Any]] | None = None) -> str:
    with pytest.raises(ConfigError) as info:
        loaded(text, tmp_path, flags)
    assert "\n" not in info.value.message
    return info.value.message


def test_defaults_of_the_plan() -> None:
    config, origins = load()
    assert (config.server.host, config.server.port, config.server.body_limit_bytes) == ("127.0.0.1", 8000, 64 * 1024 * 1024)
    assert (config.engine.encoder_tokens, config.engine.decoder_tokens, config.engine.max_sequences) == (None, None, 64)
    assert config.engine.max_output_tokens.model_dump() == {"thinking": 65_536, "max_effort": 131_072, "plain": 8_192}
    assert config.engine.default_effort == "high"
    cache = config.cache
    assert (cache.replay, cache.max_lineage, cache.redis_url, cache.redis_timeout_s) == ("bounded", None, "embedded", 0.05)
    assert (cache.ssd_ttl_s, cache.swa_ttl_s) == (72 * 3600, 600)
    assert set(origins.values()) == {"default"}


def test_flags_beat_environment_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_ENGINE__AGING_S", "2.5")
    monkeypatch.setenv("FOREBAY_SERVER__PORT", "9002")
    text = "server: {port: 9001, host: 0.0.0.0}\nengine: {aging_s: 1.5, threads: 3}"
    config, origins = loaded(text, tmp_path, {"server.port": ("--port", "9003")})
    assert (config.server.port, config.engine.aging_s, config.engine.threads, config.engine.max_sequences) == (9003, 2.5, 3, 64)
    assert origins["server.port"] == "flag --port"
    assert origins["engine.aging_s"] == "environment FOREBAY_ENGINE__AGING_S"
    assert origins["engine.threads"] == f"file {tmp_path / 'forebay.yaml'}"
    assert origins["engine.max_sequences"] == "default"


def test_environment_reaches_nested_settings_and_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_ENGINE__MAX_OUTPUT_TOKENS__PLAIN", "77")
    monkeypatch.setenv("FOREBAY_MODEL__ALIASES", "deepseek-chat, deepseek-flash")
    monkeypatch.setenv("FOREBAY_CACHE__PREFIX_REUSE", "false")
    config, _ = load()
    assert config.engine.max_output_tokens.plain == 77
    assert config.model.aliases == ("deepseek-chat", "deepseek-flash")
    assert config.cache.prefix_reuse is False


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("engine.default_effort", "42", 42),
        ("engine.default_effort", "max", "max"),
        ("engine.max_context", "none", None),
        ("server.body_limit_bytes", "10MiB", 10 * 1024 * 1024),
        ("cache.dir", "/var/cache/forebay", Path("/var/cache/forebay")),
        ("cache.dir", "~/kv", Path.home() / "kv"),
        ("cache.dir", "none", None),
        ("cache.redis_url", "none", None),
        ("cache.redis_url", "rediss://user:p@ss@host:6380/2", "rediss://user:p@ss@host:6380/2"),
        ("cache.redis_url", "unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
        ("cache.ssd_bytes", "25GiB", 25 << 30),
        ("cache.max_lineage", "0", 0),
        ("model.aliases", "", ()),
    ],
)
def test_values_as_text(key: str, text: str, value: object) -> None:
    config, _ = load(None, {key: ("--set", text)})
    section, _, name = key.partition(".")
    assert getattr(getattr(config, section), name) == value


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("server.port", "65536", "server.port (flag --set): must be less than or equal to 65535, got '65536'"),
        ("server.port", "eighty", "server.port (flag --set): must be a valid integer"),
        ("server.header_timeout_s", "0", "must be greater than 0 seconds"),
        ("server.write_timeout_s", "0", "must be greater than 0 seconds"),
        ("server.write_floor", "0", "must be greater than or equal to 1 bytes per second"),
        ("server.max_bodies_bytes", "1000", "must be greater than or equal to 1024 bytes"),
        ("engine.aging_s", "nan", "must be a finite number"),
        ("engine.device", "tpu", "must be 'cpu' or 'cuda'"),
        ("engine.default_effort", "medium", "must be none, low, high, max or a number from 1 to 100, got 'medium'"),
        ("engine.default_effort", "101", "must be none, low, high, max or a number from 1 to 100"),
        ("engine.default_effort", True, "must be none, low, high, max or a number from 1 to 100"),
        ("server.body_limit_bytes", "ten", "server.body_limit_bytes"),
        ("engine.max_sequences", "0", "greater than or equal to 1 sequences"),
        ("cache.replay", "never", "must be 'bounded' or 'exact'"),
        ("cache.max_lineage", "-1", "greater than or equal to 0 replays"),
        ("cache.ssd_ttl_s", "0", "must be greater than 0 seconds"),
        ("cache.redis_url", "localhost:6379", "must be embedded, none, or a URL that begins with redis://, rediss://, unix://"),
        ("cache.redis_url", "redis://", "must be embedded, none, or a URL"),
    ],
)
def test_bad_value_is_named_with_its_origin_and_limit(tmp_path: Path, key: str, value: object, part: str) -> None:
    assert part in refusal(None, tmp_path, {key: ("--set", value)})


def test_all_bad_values_are_told_at_once(tmp_path: Path) -> None:
    message = refusal("server: {port: -1}\nengine: {max_sequences: 0}", tmp_path)
    assert "server.port" in message
    assert "engine.max_sequences" in message
    assert str(tmp_path / "forebay.yaml") in message


@pytest.mark.parametrize(
    ("text", "wrong", "nearest"),
    [
        ("server: {prot: 1}", "server.prot", "server.port"),
        ("port: 1", "port", "server.port"),
        ("engin: {threads: 1}", "engin", "engine"),
        ("engine: {max_output_tokens: {plian: 1}}", "engine.max_output_tokens.plian", "engine.max_output_tokens.plain"),
    ],
)
def test_unknown_key_in_the_file_names_the_nearest(tmp_path: Path, text: str, wrong: str, nearest: str) -> None:
    message = refusal(text, tmp_path)
    assert f"there is no setting {wrong!r}" in message
    assert message.endswith(f"the nearest is {nearest!r}")


def test_unknown_environment_variable_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_SERVER__PROT", "1")
    assert refusal(None, tmp_path) == "environment: FOREBAY_SERVER__PROT is no setting; the nearest is FOREBAY_SERVER__PORT"


def test_unknown_flag_setting_names_the_nearest(tmp_path: Path) -> None:
    message = refusal(None, tmp_path, {"engine.max_seqs": ("--set", "1")})
    assert message == "--set: there is no setting 'engine.max_seqs'; the nearest is 'engine.max_sequences'"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("server:\n  port: [1\n", "is not valid YAML at line 3"),
        ("- a\n- b\n", "holds a list, expected sections"),
        ("server: 4\n", "server is a section of settings, got 4"),
        ("!!python/object/apply:os.system ['true']", "is not valid YAML"),
    ],
)
def test_broken_file_is_one_sentence(tmp_path: Path, text: str, part: str) -> None:
    assert part in refusal(text, tmp_path)


def test_empty_file_and_empty_section_change_nothing(tmp_path: Path) -> None:
    assert loaded("", tmp_path)[0] == loaded("server:\n", tmp_path)[0] == load()[0]


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.yaml does not exist"):
        load(tmp_path / "nope.yaml")


def test_two_sizes_of_the_kv_cache_exclude_each_other(tmp_path: Path) -> None:
    message = refusal("cache: {kv_tokens: 1000}", tmp_path, {"cache.kv_bytes": ("--set", "1GiB")})
    assert "are both set" in message


def test_default_folder_is_below_the_home(tmp_path: Path) -> None:
    code = "from forebay.server.config import load; print(load()[0].cache.dir)"
    env = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    env |= {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "HOME": str(tmp_path)}
    for extra, folder in (({}, tmp_path / ".cache"), ({"XDG_CACHE_HOME": str(tmp_path / "xdg")}, tmp_path / "xdg")):
        done = subprocess.run([sys.executable, "-c", code], env=env | extra, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(folder / "forebay" / "kv")


def test_user_without_a_home_keeps_nothing_on_disk() -> None:
    code = """
import os, pathlib, sys
def nowhere(self=None): raise RuntimeError("Could not determine home directory.")
pathlib.Path.home = classmethod(nowhere)
pathlib.Path.expanduser = nowhere
from forebay.model.errors import ConfigError
from forebay.server.config import load
print(load()[0].cache.dir)
try:
    load(None, {"cache.dir": ("--cache-dir", "~/kv")})
except ConfigError as error:
    print(error.message)
"""
    env = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    env |= {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    sentence = "cache.dir (flag --cache-dir): there is no home folder; give a full path, or none, got '~/kv'"
    assert done.stdout.splitlines() == ["None", sentence]


@pytest.mark.parametrize("url", ["embedded", "none"])
def test_cluster_needs_the_address_of_one(tmp_path: Path, url: str) -> None:
    text = f"cache: {{redis_cluster: true, redis_url: {url}}}"
    message = refusal(text, tmp_path)
    assert message == f"cache.redis_cluster (file {tmp_path / 'forebay.yaml'}): needs the URL of a node of the cluster in cache.redis_url"
    assert loaded(text, tmp_path, {"cache.redis_url": ("--redis-url", "redis://node:7000")})[0].cache.redis_cluster


def test_printed_settings_read_back_the_same(tmp_path: Path) -> None:
    flags = {"server.port": ("--port", "8123"), "model.aliases": ("--set", "a,b"), "engine.default_effort": ("--set", "42")}
    config, origins = load(None, flags)
    text = to_yaml(config, origins)
    assert loaded(text, tmp_path)[0] == config
    line = next(line for line in text.splitlines() if "8123" in line)
    assert line.split("#")[1].strip() == "flag --port"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:secret@host:6379/0", "redis://user:***@host:6379/0"),
        ("rediss://:secret@host", "rediss://:***@host"),
        ("redis://user:sec/ret@secret@host", "redis://user:***@host"),
        ("unix://:secret@/run/redis.sock?db=1", "unix://:***@/run/redis.sock?db=1"),
        ("unix:///run/redis.sock?password=secret&db=1", "unix:///run/redis.sock?password=***&db=1"),
        ("redis://host:6379/0", "redis://host:6379/0"),
    ],
)
def test_passwords_are_never_shown(tmp_path: Path, url: str, shown: str) -> None:
    config, origins = load(None, {"cache.redis_url": ("--redis-url", url)})
    assert yaml.safe_load(to_yaml(config, origins))["cache"]["redis_url"] == shown
    assert "secret" not in refusal(None, tmp_path, {"cache.redis_url": ("--redis-url", f"x{url}")})


def test_every_setting_is_described_and_measured() -> None:
    for key, info in fields():
        assert info.description, key
        name = key.rsplit(".", 1)[-1]
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        if name.endswith("_s"):
            assert extra.get("unit") == "seconds", key
        if name.endswith("_bytes"):
            assert extra.get("unit") == "bytes", key


def test_file_nested_without_end_is_one_sentence(tmp_path: Path) -> None:
    assert refusal("a: " + "[" * 5000 + "]" * 5000, tmp_path).endswith("forebay.yaml is nested too deep")


def test_variable_of_the_tests_is_no_setting_and_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_GOLDEN", "/somewhere")
    assert set(load()[1].values()) == {"default"}


def test_the_settings_of_the_wire_reach_the_server() -> None:
    values = {"max_bodies_bytes": "1GiB", "write_timeout_s": "7.5", "write_floor": "1000", "body_timeout_s": "8", "keep_alive_s": "9"}
    config, _ = load(None, {f"server.{name}": ("--set", value) for name, value in values.items()})
    options = ServerOptions.from_config(config)
    assert (options.max_bodies, options.write_timeout_s, options.write_floor) == (1 << 30, 7.5, 1000)
    assert (options.body_timeout_s, options.keep_alive_s) == (8, 9)
