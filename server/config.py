"""The one configuration tree: what can be set, its range and unit, and where each value came from.

Order of precedence, lowest first: defaults, YAML file, environment (`FOREBAY_SERVER__PORT=8001`), flags.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from forebay.engine.tiers import EMBEDDED, TierOptions
from forebay.model.errors import ConfigError
from forebay.server.image_address import split_entry
from forebay.server.limits import ENVIRONMENT, OWN_KEY

ENV_PREFIX = "FOREBAY_"
MIB = 1024 * 1024
EFFORT_WORDS = ("none", "low", "high", "max")

REDIS_SCHEMES = ("redis", "rediss", "unix")

_PASSWORD = re.compile(r"(://[^/@]*:).*@|([?&]password=)[^&]*")

Origins = dict[str, str]  # "server.port" -> "default" | "file forebay.yaml" | "environment FOREBAY_SERVER__PORT" | "flag --port"


def _split_commas(value: Any) -> Any:
    """`a,b` from the environment or a flag is the list [a, b]; YAML lists pass unchanged."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _none_word(value: Any) -> Any:
    """The environment and flags have no null: the words `none` and `null` (and an empty text) mean it."""
    return None if isinstance(value, str) and value.strip().lower() in ("", "none", "null") else value


def _effort(value: Any) -> int | str:
    """A word or a number from 1 to 100; `75` given as text is the number 75."""
    number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    if value in EFFORT_WORDS or (type(number) is int and 1 <= number <= 100):
        return cast(int | str, number)
    raise ValueError(f"must be {', '.join(EFFORT_WORDS)} or a number from 1 to 100")


def _expand(path: Path | None) -> Path | None:
    try:
        return path.expanduser() if path else None
    except RuntimeError:  # a user that the system does not know
        raise ValueError("there is no home folder; give a full path, or none") from None


def _kv_dir() -> Path | None:
    """Where KV goes unless told otherwise; nowhere for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forebay" / "kv"
    except RuntimeError:
        return None


def _redis_url(value: str | None) -> str | None:
    """Only the form is looked at; whether somebody answers there is found out, again and again, while serving."""
    if value is None or value == EMBEDDED:
        return value
    scheme, colon, rest = value.partition("://")
    if scheme not in REDIS_SCHEMES or not colon or not rest:
        raise ValueError(f"must be {EMBEDDED}, none, or a URL that begins with {', '.join(f'{s}://' for s in REDIS_SCHEMES)}")
    return value


def _bind(value: str | None) -> str | None:
    if value is not None:
        host, port = split_bind(value)
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError("must be HOST:PORT with a port from 0 to 65535, such as 127.0.0.1:9090 or [::1]:9090")
    return value


def split_bind(value: str) -> tuple[str, str]:
    """`[::1]:9090` -> (`::1`, `9090`)."""
    host, _, port = value.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


def hide_passwords(text: str) -> str:
    """`redis://user:***@host` for `redis://user:secret@host`."""
    return _PASSWORD.sub(lambda match: f"{match[1]}***@" if match[1] else f"{match[2]}***", text)


# Names in the environment that mean something else: where the tests find their golden data, see the README; API keys, which are secrets.
NOT_SETTINGS = frozenset({"FOREBAY_GOLDEN", ENVIRONMENT, OWN_KEY})

NameList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)]
OptionalPath = Annotated[Path | None, BeforeValidator(_none_word), AfterValidator(_expand)]
OptionalText = Annotated[str | None, BeforeValidator(_none_word)]
RedisUrl = Annotated[str | None, BeforeValidator(_none_word), AfterValidator(_redis_url)]
Bind = Annotated[str | None, BeforeValidator(_none_word), AfterValidator(_bind)]
OptionalCount = Annotated[int | None, BeforeValidator(_none_word)]
OptionalBytes = Annotated[ByteSize | None, BeforeValidator(_none_word)]
Effort = Annotated[int | str, BeforeValidator(_effort)]


def setting(default: Any, description: str, *, unit: str | None = None, **limits: Any) -> Any:
    """A field with its help text and, where it has one, the unit it is measured in."""
    return Field(default, description=description, json_schema_extra={"unit": unit} if unit else None, **limits)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)


class ModelSection(Section):
    path: str = setting("demo", "what to serve: demo, a checkpoint folder, or synthetic:v41-flash[,experts=N]", min_length=1)
    name: OptionalText = setting(None, "name in /v1/models and in answers; none takes the checkpoint's own name", max_length=256)
    aliases: NameList = setting((), "other names that requests may use for the model")


def _image_hosts(value: tuple[str, ...]) -> tuple[str, ...]:
    for entry in value:
        split_entry(entry)
    return value


ImageHosts = Annotated[NameList, AfterValidator(_image_hosts)]


class ImageSection(Section):
    fetch: bool = setting(False, "fetch images that requests give as http(s) URLs, from the hosts in server.images.hosts only")
    hosts: ImageHosts = setting((), "where images may be fetched from: NAME, NAME:PORT, *.DOMAIN, or * for every public host")
    allow_private: bool = setting(False, "among those hosts, let loopback and private addresses be fetched from as well")
    connect_timeout_s: float = setting(10.0, "time to resolve a host, to connect, and its longest silence", unit="seconds", gt=0, le=600)
    fetch_timeout_s: float = setting(60.0, "longest fetch of an image, redirects included", unit="seconds", gt=0, le=3600)
    fetch_floor: int = setting(4096, "a host that sends fewer is cut off", unit="bytes per second", ge=0, le=1 << 30)
    max_bytes: ByteSize = setting(32 * MIB, "largest image file", unit="bytes", ge=1024, le=1 << 30)
    max_request_bytes: ByteSize = setting(64 * MIB, "all image files of a request together", unit="bytes", ge=1024, le=1 << 34)
    workers: int = setting(2, "programs that decode images, each with one at a time", unit="processes", ge=1, le=256)
    decode_timeout_s: float = setting(20.0, "longest decoding of one image", unit="seconds", gt=0, le=3600)
    decode_memory_bytes: ByteSize = setting(2048 * MIB, "address space of such a program", unit="bytes", ge=256 * MIB, le=1 << 40)
    cache_bytes: ByteSize = setting(256 * MIB, "images as the model sees them, kept for requests that send them again", unit="bytes", ge=0)


class ServerSection(Section):
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 for every interface", min_length=1)
    port: int = setting(8000, "TCP port to listen on; 0 lets the system choose", ge=0, le=65535)
    backlog: int = setting(2048, "connections the system may hold before they are accepted", unit="connections", ge=1, le=65535)
    body_limit_bytes: ByteSize = setting(64 * MIB, "largest request body, decoded; beyond it the answer is 413", unit="bytes", ge=1024)
    max_bodies_bytes: ByteSize = setting(
        512 * MIB, "all request bodies in memory, or one of the largest; beyond it the answer is 503", unit="bytes", ge=1024, le=1 << 50
    )
    max_header_bytes: ByteSize = setting(64 * 1024, "largest request head; beyond it the answer is 431", unit="bytes", ge=1024, le=MIB)
    header_timeout_s: float = setting(10.0, "time a client has to send a request's head", unit="seconds", gt=0, le=3600)
    body_timeout_s: float = setting(60.0, "time a client may pause within a body; then the answer is 408", unit="seconds", gt=0, le=3600)
    write_timeout_s: float = setting(30.0, "a client that takes in too little for so long is cut off", unit="seconds", gt=0, le=3600)
    write_floor: int = setting(256, "fewer is too little for a client to take in", unit="bytes per second", ge=1, le=1 << 30)
    keep_alive_s: float = setting(75.0, "how long an idle connection is kept open", unit="seconds", gt=0, le=86400)
    keepalive_comment_s: float = setting(15.0, "silence after which a stream sends a comment line; 0 is off", unit="seconds", ge=0, le=3600)
    nonstream_keepalive: bool = setting(False, "send line feeds while a whole (not streamed) answer takes longer than 30 s")
    overflow_policy: Literal["clamp", "error"] = setting("clamp", "an output limit that does not fit: lower it to what fits, or answer 400")
    reasoning_field: Literal["reasoning_content", "reasoning", "both"] = setting(
        "reasoning_content", "name of reasoning in chat answers; `both` makes some clients show it twice"
    )
    messages_thinking: bool = setting(False, "think in answers on /v1/messages to requests that do not say")
    map_claude_models: bool = setting(True, "on /v1/messages, take model names that begin with `claude` for the served model")
    strict_tool_messages: bool = setting(False, "refuse histories whose tool results do not match their calls instead of mending them")
    drain_timeout_s: float = setting(30.0, "after SIGTERM, time that running requests have to finish", unit="seconds", ge=0, le=86400)
    liveness_timeout_s: float = setting(60.0, "without progress for this long, /health/live answers 503", unit="seconds", gt=0, le=86400)
    access_log: bool = setting(True, "log one JSON line per request to standard error")
    cors_origins: NameList = setting((), "origins that browsers may call from (* for any); empty sends no CORS headers")
    api_keys_file: OptionalPath = setting(
        None, f"file of API keys that `forebay keys` writes; without it and without {ENVIRONMENT} everybody may call"
    )
    share_cache: bool = setting(False, "let tenants share cached blocks; how long a prompt takes may then tell what others have sent")
    metrics_bind: Bind = setting(None, "HOST:PORT for /metrics and the health probes; /metrics is then not on the main port")
    metrics_key: bool = setting(False, "/metrics needs an API key with `admin`")
    images: ImageSection = setting(ImageSection(), "images in messages")


class OutputLimits(Section):
    thinking: int = setting(65_536, "output limit of a thinking request that states none", unit="tokens", ge=1)
    max_effort: int = setting(131_072, "the same at reasoning effort 100", unit="tokens", ge=1)
    plain: int = setting(8_192, "the same without thinking", unit="tokens", ge=1)


class EngineSection(Section):
    device: Literal["cpu", "cuda"] = setting("cpu", "where the network runs")
    threads: int = setting(0, "torch threads; 0 takes all usable cores but one, left to the event loop", unit="threads", ge=0, le=1024)
    prefill: Literal["bounded", "exact"] = setting("bounded", "rows of a prompt that run the decoder half: its last window, or all")
    max_context: OptionalCount = setting(None, "longest prompt plus output; none takes the checkpoint's own limit", unit="tokens", ge=2)
    max_sequences: int = setting(64, "sequences that run at once, each with its window KV", unit="sequences", ge=1, le=65536)
    encoder_tokens: OptionalCount = setting(
        None, "prompt tokens a step may run in the encoder half; none takes 512, with GPU kernels 2,048", unit="tokens", ge=1, le=1 << 20
    )
    decoder_tokens: OptionalCount = setting(
        None,
        "tokens a step may run in the decoder half, at least max_sequences; none takes 512, with GPU kernels 1,024, or max_sequences",
        unit="tokens",
        ge=1,
        le=1 << 20,
    )
    max_queued_requests: int = setting(1024, "waiting requests; beyond it the answer is 503", unit="requests", ge=1)
    max_queue_wait_s: float = setting(
        600.0, "longest wait before a request starts; then it is refused; 0 is no limit", unit="seconds", ge=0
    )
    aging_s: float = setting(10.0, "waiting this long is worth one step of priority; 0 is off", unit="seconds", ge=0)
    default_effort: Effort = setting("high", "reasoning effort of requests that state none: none, low, high, max or 1 to 100")
    max_output_tokens: OutputLimits = setting(OutputLimits(), "output limits of requests that state none")
    weight_cache_bytes: ByteSize = setting(512 * MIB, "memory for dequantised weights on CPU; more is faster", unit="bytes", ge=0)
    image_cache_bytes: ByteSize = setting(256 * MIB, "embeddings of images kept for requests that show them again", unit="bytes", ge=0)
    image_cache_ttl_s: float = setting(600.0, "how long these are kept after their last use", unit="seconds", ge=0)
    batch_invariant: bool = setting(True, "on CPU, text does not depend on what shares its batch; `bench invariance` tells the price")
    kernels: bool = setting(True, "on a GPU that can run them, the network runs as kernels and captured steps, else as torch operations")
    poison: bool = setting(False, "debugging: overwrite scratch buffers between steps so that stale reads show")


class CacheSection(Section):
    kv_tokens: OptionalCount = setting(
        None, "tokens of global KV on the device; none sizes it from the machine", unit="tokens", ge=1, le=1 << 40
    )
    kv_bytes: OptionalBytes = setting(None, "the same as a size; give one of the two", unit="bytes", ge=1, le=1 << 50)
    kv_memory_fraction: float = setting(
        0.9, "if neither is given, what global KV gets of the GPU memory that weights, windows and steps leave", gt=0, le=1
    )
    prefix_reuse: bool = setting(True, "reuse cached blocks of equal beginnings; the replay of a window that it needs may change text")
    replay: Literal["bounded", "exact"] = setting(
        "bounded", "how a lost window is rebuilt: from one window of tokens, or from enough of them to equal a cold run"
    )
    max_lineage: OptionalCount = setting(
        None, "cached blocks with more bounded replays behind them are computed anew; 0 keeps exact ones only", unit="replays", ge=0
    )
    dir: OptionalPath = setting(_kv_dir(), "folder of the SSD store, which servers of one host may share; none keeps nothing on disk")
    ssd_bytes: OptionalBytes = setting(
        None, "most that the store takes on disk; none takes a tenth of the file system, at most 256 GiB", unit="bytes", ge=1, le=1 << 50
    )
    ssd_free_bytes: ByteSize = setting(1024 * MIB, "free space of the file system that the store leaves", unit="bytes", ge=0, le=1 << 50)
    ssd_ttl_s: float = setting(259_200.0, "how long a block on SSD lives after its last use", unit="seconds", gt=0, le=366 * 86400)
    ssd_queue_bytes: ByteSize = setting(256 * MIB, "blocks waiting to be written; more are not stored", unit="bytes", ge=1, le=1 << 50)
    staging_bytes: ByteSize = setting(256 * MIB, "memory that blocks pass through from SSD to the device", unit="bytes", ge=1, le=1 << 50)
    redis_url: RedisUrl = setting(
        EMBEDDED, "pool of window snapshots: redis://, rediss:// or unix:// URL, embedded for a server of our own, or none"
    )
    redis_cluster: bool = setting(False, "the Redis URL names a node of a cluster")
    redis_timeout_s: float = setting(0.05, "longest wait for a snapshot; then its window is replayed", unit="seconds", gt=0, le=60)
    swa_ttl_s: float = setting(600.0, "how long a snapshot lives after its last use", unit="seconds", gt=0, le=366 * 86400)
    swa_bytes: OptionalBytes = setting(
        None, "memory of the embedded Redis; none takes a tenth of the machine's", unit="bytes", ge=MIB, le=1 << 50
    )


class Config(BaseSettings):
    """Everything that can be set. Build it with `load`; `Config()` alone is the defaults."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, validate_default=True)

    model: ModelSection = ModelSection()
    server: ServerSection = ServerSection()
    engine: EngineSection = EngineSection()
    cache: CacheSection = CacheSection()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # `load` reads the layers one by one, since it must know which of them a value came from.
        return (init_settings,)


def tier_options(config: Config) -> TierOptions:
    """The tiers beyond the device, as the settings of section `cache` say."""
    return TierOptions(**{name: getattr(config.cache, name) for name in TierOptions.__dataclass_fields__})


def fields(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting as (`server.port`, its field), in the order of the tree."""
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def load(file: Path | None = None, flags: Mapping[str, tuple[str, Any]] | None = None) -> tuple[Config, Origins]:
    """The effective configuration and the origin of each value.

    Args:
        file: YAML file with nested sections, or None.
        flags: setting -> (flag as the user wrote it, value), such as `{"server.port": ("--port", "8001")}`.

    Raises:
        ConfigError: unreadable file, unknown setting (names the nearest valid one), value out of range; all of a kind at once.
    """
    keys = [key for key, _ in fields()]
    values: dict[str, Any] = {}
    origins: Origins = dict.fromkeys(keys, "default")
    layers: list[Iterator[tuple[str, Any, str]]] = []
    if file is not None:
        layers.append((key, value, f"file {file}") for key, value in _read_yaml(file, keys))
    layers.append((key, value, f"environment {_env_name(key)}") for key, value in _read_environment(keys))
    layers.append((key, value, f"flag {flag}") for key, (flag, value) in (flags or {}).items())
    for layer in layers:
        for key, value, origin in layer:
            if key not in origins:
                raise ConfigError(unknown_setting(key, keys, origin.removeprefix("flag ")), param=key)
            values[key] = value
            origins[key] = origin
    try:
        config = Config(**_nest(values))
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(e, origins) for e in error.errors())) from None
    if config.cache.kv_tokens is not None and config.cache.kv_bytes is not None:
        where = " and ".join(f"{key} ({origins[key]})" for key in ("cache.kv_tokens", "cache.kv_bytes"))
        raise ConfigError(f"{where} are both set: give one", param="cache.kv_bytes")
    if config.cache.redis_cluster and config.cache.redis_url in (None, EMBEDDED):
        where = f"cache.redis_cluster ({origins['cache.redis_cluster']})"
        raise ConfigError(f"{where}: needs the URL of a node of the cluster in cache.redis_url", param="cache.redis_cluster")
    if config.server.images.fetch and not config.server.images.hosts:
        where = f"server.images.fetch ({origins['server.images.fetch']})"
        raise ConfigError(f"{where}: name the hosts in server.images.hosts, or * for every public one", param="server.images.hosts")
    return config, origins


def unknown_setting(key: str, keys: list[str], where: str) -> str:
    """One sentence that names the valid setting (or section) nearest to `key`."""
    nearest = difflib.get_close_matches(key, [*keys, *_sections(keys)], n=1, cutoff=0.0)
    # A right name in the wrong section is nearer than any spelling.
    same_name = [k for k in keys if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    return f"{where}: there is no setting {key!r}; the nearest is {(same_name or nearest)[0]!r}"


def to_yaml(config: Config, origins: Origins) -> str:
    """The effective configuration as YAML, each line with its origin in a comment. Passwords in URLs are shown as ***."""
    rows: list[tuple[str, str]] = []

    def walk(tree: Mapping[str, Any], prefix: str, depth: int) -> None:
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if key in origins:
                shown = hide_passwords(value) if isinstance(value, str) else value
                text = yaml.safe_dump({name: shown}, default_flow_style=True, width=10_000).strip()[1:-1]
                rows.append(("  " * depth + text, origins[key]))
            else:
                rows.append(("  " * depth + f"{name}:", ""))
                walk(value, f"{key}.", depth + 1)

    walk(config.model_dump(mode="json"), "", 0)
    width = max(len(text) for text, _ in rows)
    return "\n".join(f"{text:<{width}}  # {origin}" if origin else text for text, origin in rows) + "\n"


def _sections(keys: list[str]) -> list[str]:
    """`engine`, `engine.max_output_tokens`, …: what settings are grouped under."""
    return sorted({key[:i] for key in keys for i in range(len(key)) if key[i] == "."})


def _env_name(key: str) -> str:
    return ENV_PREFIX + key.upper().replace(".", "__")


def _read_yaml(file: Path, keys: list[str]) -> Iterator[tuple[str, Any]]:
    try:
        tree = yaml.safe_load(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"the configuration file {file} does not exist") from None
    except RecursionError:
        raise ConfigError(f"{file} is nested too deep") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{file} is not valid YAML{where}: {getattr(error, 'problem', None) or error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if tree is None:
        return
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} holds a {type(tree).__name__}, expected sections such as `server:`")
    sections = _sections(keys)

    def walk(node: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in node.items():
            key = f"{prefix}{name}"
            if key not in sections:
                yield key, value
            elif isinstance(value, dict):
                yield from walk(value, f"{key}.")
            elif value is not None:
                raise ConfigError(f"{file}: {key} is a section of settings, got {value!r}", param=key)

    yield from walk(tree, "")


def _read_environment(keys: list[str]) -> Iterator[tuple[str, Any]]:
    known = {_env_name(key) for key in keys}
    for name in sorted(os.environ):
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known | NOT_SETTINGS:
            nearest = difflib.get_close_matches(name.upper(), sorted(known), n=1, cutoff=0.0)[0]
            raise ConfigError(f"environment: {name} is no setting; the nearest is {nearest}")
    try:
        tree = EnvSettingsSource(Config)()
    except SettingsError as error:
        raise ConfigError(f"environment: {error}") from None
    for key in keys:
        node: Any = tree
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if node is not None:
            yield key, node


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def _explain(error: Any, origins: Origins) -> str:
    path = ".".join(str(part) for part in error["loc"])
    key = next((k for k in origins if path == k or path.startswith(f"{k}.")), path)
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if error["type"].startswith(("greater_than", "less_than")):
        extra = next((info.json_schema_extra for k, info in fields() if k == key), None)
        unit = extra.get("unit") if isinstance(extra, dict) else None
        message += f" {unit}" if unit else ""
    return f"{key} ({origins.get(key, 'configuration')}): {message[0].lower()}{message[1:]}, got {hide_passwords(repr(error['input']))}"
