"""Who may call: API keys from the environment and from a file of salted hashes, and what each key stands for.

The file has one JSON object per line (`forebay keys add` writes them; `#` begins a comment). It is looked at again while the server
runs: a line added or removed counts from the next second on. Keys themselves are nowhere kept: not in the file, the log or errors.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forebay.model.errors import ConfigError
from forebay.server.errors import HttpError
from forebay.server.field_errors import Salt
from forebay.server.limits import ENVIRONMENT, OWN_KEY, ServerOptions

log = logging.getLogger("forebay.server")

RECHECK_S = 1.0  # between looks at the file
SETTLED_S = 0.2  # a file that changed so shortly ago may still be written: half of it would lock out those in the other half
MAX_KEY = 256  # bytes: longer ones are refused unread, so that their hashes cost nothing
MAX_RATE = 10**9
_REMEMBERED = 4096
_SHOWN = 4  # last characters of a wrong key in the error that refuses it
_NAME = r"^[A-Za-z0-9._-]{1,64}$"

Name = Annotated[str, Field(pattern=_NAME)]
Rate = Annotated[int, Field(ge=1, le=MAX_RATE)]


class Key(BaseModel):
    """What is known of one API key.

    Attributes:
        hash: `SALT:DIGEST` in hex, see `hashed`.
        tenant: whose cache it uses; keys of one tenant share cached blocks. Without one, the key is its own tenant.
        cache_salt: of requests that state none.
        requests_per_minute, tokens_per_minute, concurrency: limits; None is no limit. Tokens are those of prompts and of answers.
        priority: the most urgent priority its requests may have; lower is sooner.
        admin: it may read /metrics where that needs a key.
        disabled: requests with it are answered 403.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Name
    hash: Annotated[str, Field(pattern=r"^[0-9a-f]{32}:[0-9a-f]{64}$")]
    tenant: Name | None = None
    cache_salt: Salt | None = None
    requests_per_minute: Rate | None = None
    tokens_per_minute: Rate | None = None
    concurrency: Rate | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    admin: bool = False
    disabled: bool = False


@dataclass(frozen=True)
class Caller:
    """Whose request it is. All empty on a server without keys.

    Attributes:
        name: of the key. tenant: whose it is. namespace: of its cached blocks; "" if tenants share them.
        key: its limits.
    """

    name: str = ""
    tenant: str = ""
    namespace: str = ""
    key: Key | None = None

    def salt(self, asked: str) -> str:
        """`Request.salt`: no two tenants have one in common, whatever cache_salt they ask for, which cannot hold a slash."""
        own = asked or (self.key.cache_salt if self.key and self.key.cache_salt else "")
        return f"{self.namespace}/{own}" if self.namespace else own

    def priority(self, asked: int | None) -> int:
        """`Request.priority`: a client may stand back, but not go before what its key allows."""
        if self.key is None:
            return asked or 0
        return self.key.priority if asked is None else max(asked, self.key.priority)


ANYONE = Caller()


def new_key() -> str:
    """A fresh key of 256 random bits."""
    return f"fb-{secrets.token_urlsafe(32)}"


def hashed(key: bytes, salt: bytes | None = None) -> str:
    """`SALT:DIGEST` in hex, BLAKE2b with a salt of 16 bytes. Fast on purpose: keys are random, so there is nothing to be guessed.

    Keys that are kept together should have one salt: a key that is presented is hashed once for each.
    """
    salt = secrets.token_bytes(16) if salt is None else salt
    return f"{salt.hex()}:{_digest(key, salt).hex()}"


def _digest(key: bytes, salt: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=32, salt=salt, person=b"forebay key").digest()


def parse_file(text: str, where: str) -> list[Key]:
    """The keys of a file. Raises ConfigError naming the line and what is wrong with it."""
    keys: list[Key] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            keys.append(Key.model_validate(orjson.loads(line)))
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"{where}, line {number}: not a JSON object: {error.msg}") from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or "line"
            raise ConfigError(f"{where}, line {number}: {field}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None
    _refuse_repeated(keys, where)
    return keys


def parse_environment(text: str) -> list[Key]:
    """Keys written as `KEY,NAME:KEY,…`; those without a name are key-1, key-2, … by their place. Raises ConfigError without showing one."""
    keys: list[Key] = []
    salt = secrets.token_bytes(16)
    for number, part in enumerate((part.strip() for part in text.split(",") if part.strip()), 1):
        name, colon, key = part.partition(":")
        if not colon:
            name, key = f"key-{number}", part
        if not re.fullmatch(_NAME, name) or not re.fullmatch(f"[!-~]{{1,{MAX_KEY}}}", key):
            rule = f"KEY or NAME:KEY: a key is at most {MAX_KEY} visible ASCII characters, a name at most 64 letters, digits and . _ -"
            raise ConfigError(f"environment {ENVIRONMENT}: entry {number} must be {rule}")
        keys.append(Key(name=name, hash=hashed(key.encode(), salt)))
    if not keys:
        raise ConfigError(f"environment {ENVIRONMENT} is set but holds no key; unset it for a server without keys")
    _refuse_repeated(keys, f"environment {ENVIRONMENT}")
    return keys


def _refuse_repeated(keys: Iterable[Key], where: str) -> None:
    seen: set[str] = set()
    for key in keys:
        if key.name in seen:
            raise ConfigError(f"{where}: the name {key.name!r} is given twice")
        seen.add(key.name)


class KeyRing:
    """The keys that count now. Without any source it is open: everybody may call.

    Raises ConfigError when built over an unreadable file or an empty source, or without any where /metrics needs a key.
    Later, a file that cannot be read or is wrong leaves the keys as they were and is logged: a slip of the editor must neither lock
    everybody out nor let anybody in.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._file = options.api_keys_file
        self._fixed = parse_environment(options.api_keys) if options.api_keys is not None else []
        self._share = options.share_cache
        self._callers: list[Caller] = []
        self._tables: dict[bytes, dict[bytes, Caller]] = {}  # by salt: whose key a digest is of
        self._known: dict[bytes, Caller] = {}
        self._secret = secrets.token_bytes(32)
        self._seen: Any = None
        self._next_look = 0.0
        self.open = self._file is None and options.api_keys is None
        if self.open and options.metrics_key:
            text = f"server.metrics_key: there are no API keys that /metrics could need; set server.api_keys_file or {ENVIRONMENT}"
            raise ConfigError(text, param="server.metrics_key")
        if self._file is not None:
            self._seen = _state(self._file)
            if not self._read(self._file):
                raise ConfigError(f"{self._file} holds no key; add one with `forebay keys add NAME --file {self._file}`")
        else:
            self._take(self._fixed)

    def callers(self) -> list[Caller]:
        """Who has a key, in the order of their keys."""
        return list(self._callers)

    def find(self, presented: bytes) -> Caller | None:
        """Whose key it is. A key that is not known costs the same time whatever it has in common with those that are: what is looked up
        is a digest under a secret of this process, one hash for each salt."""
        self._look_again()
        if not presented or len(presented) > MAX_KEY:
            return None
        mark = hmac.digest(self._secret, presented, "sha256")
        if (caller := self._known.get(mark)) is not None:
            return caller
        found = None
        for salt, table in self._tables.items():  # all of them, also after a match
            found = table.get(self._mark(_digest(presented, salt))) or found
        if found is not None and len(self._known) < _REMEMBERED:
            self._known[mark] = found
        return found

    def _mark(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")

    def _take(self, keys: list[Key]) -> None:
        self._known.clear()
        self._callers, self._tables = [], {}
        for key in keys:
            salt, _, digest = key.hash.partition(":")
            tenant = key.tenant or key.name
            caller = Caller(key.name, tenant, "" if self._share else tenant, key)
            self._callers.append(caller)
            self._tables.setdefault(bytes.fromhex(salt), {})[self._mark(bytes.fromhex(digest))] = caller

    def _look_again(self) -> None:
        now = time.monotonic()
        if self._file is None or now < self._next_look:
            return
        self._next_look = now + RECHECK_S
        state = _state(self._file)
        if state == self._seen:
            return
        if state is not None and 0 <= time.time() - state[0] / 1e9 < SETTLED_S:
            self._next_look = now + SETTLED_S
            return
        self._seen = state
        try:
            count = self._read(self._file)
        except ConfigError as error:
            log.error("the API keys stay as they were: %s", error.message)
        else:
            log.info("%d API keys are in %s", count, self._file)

    def _read(self, file: Path) -> int:
        """Take the keys of `file` and of the environment; how many the file holds."""
        try:
            if not stat.S_ISREG(os.stat(file).st_mode):  # a pipe would keep everybody waiting
                raise OSError(0, "not a regular file")
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConfigError(f"the file of API keys {file} cannot be read: {reason}", param="server.api_keys_file") from None
        keys = parse_file(text, str(file))
        _refuse_repeated([*self._fixed, *keys], f"environment {ENVIRONMENT} and {file}")
        self._take([*self._fixed, *keys])
        return len(keys)


def _state(file: Path) -> tuple[int, int, int] | None:
    """What changes when a file is written or replaced; None if it is not there."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def presented_keys(headers: dict[bytes, bytes]) -> Iterator[bytes]:
    """The keys a request brings: some clients send an old one in one header and the right one in another."""
    scheme, _, rest = headers.get(b"authorization", b"").strip().partition(b" ")
    if scheme.lower() == b"bearer" and rest.strip():
        yield rest.strip()
    for name in (b"x-api-key", b"api-key"):
        if value := headers.get(name, b"").strip():
            yield value


def identify(ring: KeyRing, headers: dict[bytes, bytes]) -> Caller:
    """Whose request it is. Raises HttpError 401 (no key, wrong key) or 403 (the key is disabled)."""
    if ring.open:
        return ANYONE
    wrong = None
    for key in presented_keys(headers):
        if (caller := ring.find(key)) is not None:
            if caller.key is not None and caller.key.disabled:
                raise forbidden("This API key is disabled.")
            return caller
        wrong = wrong or key
    if wrong is None:
        text = "No API key was given. Send one as `Authorization: Bearer KEY`, or in the header `x-api-key` or `api-key`."
    else:
        text = f"Incorrect API key provided{_ending(wrong)}."
    raise HttpError(401, text, code="invalid_api_key", headers=[(b"www-authenticate", b"Bearer")])


def own_headers() -> dict[str, str]:
    """What our own clients send: the key of the environment, if there is one."""
    key = os.environ.get(OWN_KEY, "").strip()
    return {"authorization": f"Bearer {key}"} if key else {}


def forbidden(text: str) -> HttpError:
    """403 for a key that is right but does not do."""
    return HttpError(403, text, code="permission_denied")


def _ending(key: bytes) -> str:
    """So that a person can tell which of their keys it was; nothing of a key so short that it would be told away."""
    end = key[-_SHOWN:].decode("latin-1")
    return f", ending in {end}" if len(key) >= 4 * _SHOWN and end.isascii() and end.isprintable() else ""
