"""Which addresses images may be fetched from: the form of a URL, its host and port, and what its name resolves to.

A URL comes from whoever may send requests, and the server may stand inside a network that they cannot reach: a fetch must never be a way
into it. Forms of a host that different programs read differently are refused instead of being interpreted.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from forebay.model.errors import RequestError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_URL = 8192  # characters, as in the hosted API
DEFAULT_PORTS = {"http": 80, "https": 443}

_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(?:\.(?!-)[a-z0-9_-]{1,63}(?<!-))*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # a last label by which the URL standard takes the whole host for an IPv4 address
_PRIVATE = tuple(map(ipaddress.ip_network, ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1/128", "fc00::/7")))
# Services that tell a machine its credentials under addresses that are not link-local: Azure, Alibaba, AWS over IPv6, Oracle.
_METADATA = frozenset(map(ipaddress.ip_address, ("168.63.129.16", "100.100.100.200", "fd00:ec2::254", "192.0.0.192", "fd20:ce::254")))
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")
_UNICAST = ipaddress.IPv6Network("2000::/3")  # all that is assigned for the public internet


def refused(reason: str) -> RequestError:
    return RequestError(f"This image URL cannot be used: {reason}.", code="invalid_image_url")


@dataclass(frozen=True)
class ImageUrl:
    """A URL of acceptable form.

    Attributes:
        host: in lower case, without brackets and final dot. address: of a host that is an address. target: path and query.
    """

    scheme: str
    host: str
    port: int
    target: str
    address: Address | None

    @property
    def authority(self) -> str:
        """`host` or `host:port` as the Host header has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


def parse_url(text: str) -> ImageUrl:
    """Read an http(s) URL. Raises RequestError invalid_image_url; nothing is looked up."""
    if len(text) > MAX_URL:
        raise refused(f"it has {len(text)} characters, and at most {MAX_URL} are allowed")
    if any(ord(c) <= 0x20 or ord(c) == 0x7F or c == "\\" for c in text):
        raise refused("it holds a space, a control character or a backslash")
    scheme = text.partition(":")[0].lower()
    if scheme not in DEFAULT_PORTS:
        raise refused("it must begin with data:, http:// or https://; files and paths are never opened")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise refused("its host or port is malformed") from None
    if "@" in parts.netloc:
        raise refused("a user name or password before the host is not allowed")
    if not host or not text[len(scheme):].startswith("://"):
        raise refused("it has no host")
    if port == 0:
        raise refused("port 0 does not exist")
    host = host.removesuffix(".")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return ImageUrl(scheme, host, port or DEFAULT_PORTS[scheme], target, _literal(host, "[" in parts.netloc))


def _literal(host: str, bracketed: bool) -> Address | None:
    """The address that `host` spells, None for a name."""
    if bracketed:
        if "%" in host:
            raise refused("an IPv6 zone is not allowed")
        try:
            return ipaddress.IPv6Address(host)
        except ValueError:
            raise refused("what stands in brackets is no IPv6 address") from None
    if _NUMBER.fullmatch(host.rpartition(".")[2]):
        try:
            return ipaddress.IPv4Address(host)  # four decimal numbers without leading zeros
        except ValueError:
            raise refused("an IPv4 address must be four decimal numbers") from None
    if len(host) > 253 or not _NAME.fullmatch(host):
        raise refused("its host is no host name; write names in other scripts in their xn-- form")
    return None


class Policy:
    """What the operator allows.

    `hosts` are `name`, `name:port`, `*.domain` (every name below it) or `*` (every public host). `allow_private` adds loopback and
    private addresses; link-local and metadata addresses are never allowed.
    """

    def __init__(self, hosts: Iterable[str], *, allow_private: bool = False) -> None:
        self._entries = [split_entry(entry) for entry in hosts]
        self._allow_private = allow_private

    def check_form(self, url: ImageUrl) -> None:
        """Refuse what is never right, whether or not fetching is allowed: odd ports, addresses that are not public, this machine."""
        if url.port != DEFAULT_PORTS[url.scheme] and not any(port == url.port for host, port in self._entries if _covers(host, url.host)):
            raise refused(f"port {url.port} is not allowed")
        if url.address is not None:
            self.check_address(url.address)
        if (url.host == "localhost" or url.host.endswith(".localhost")) and not self._allow_private:
            raise refused("its host is not public")

    def check(self, url: ImageUrl) -> None:
        """Refuse what must not be fetched. Raises RequestError invalid_image_url."""
        self.check_form(url)
        if not any(_covers(host, url.host) and port in (None, url.port) for host, port in self._entries):
            raise refused("its host is not among those that this server fetches images from")

    def check_address(self, address: Address) -> None:
        """Refuse an address that a name resolved to. The address is not told: who asks may be looking for it."""
        if not (is_public(address) or (self._allow_private and is_private(address))):
            raise refused("its host is not public")


def split_entry(entry: str) -> tuple[str, int | None]:
    """`name:8080` -> (name, 8080). Raises ValueError for an entry that can never match."""
    host, port = entry.lower(), ""
    if not host.endswith("]") and host.count(":") != 0 and (host.count(":") == 1 or "]:" in host):
        host, _, port = host.rpartition(":")
        if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"{entry!r} has no port from 1 to 65535")
    if host.startswith("[") != host.endswith("]"):
        raise ValueError(f"{entry!r} has half a pair of brackets")
    host = host.removeprefix("[").removesuffix("]").removesuffix(".")
    name = host.removeprefix("*.")
    if host != "*" and ":" not in host and not _NAME.fullmatch(name):
        raise ValueError(f"{entry!r} must be NAME, NAME:PORT, *.DOMAIN or *")
    if ":" in host:
        host = str(ipaddress.IPv6Address(host))
    return host, int(port) if port else None


def _covers(entry: str, host: str) -> bool:
    if ":" in host:
        host = str(ipaddress.IPv6Address(host))
    return entry == "*" or entry == host or (entry.startswith("*.") and host.endswith(entry[1:]))


def is_private(address: Address) -> bool:
    """Loopback and private networks, without metadata services."""
    return address not in _METADATA and any(address in network for network in _PRIVATE if network.version == address.version)


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet. One that carries an IPv4 address is as public as that."""
    if address in _METADATA:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    if address.ipv4_mapped is not None:
        return is_public(address.ipv4_mapped)
    if address.sixtofour is not None:
        return is_public(address.sixtofour)
    if address in _NAT64:
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
    if address.teredo is not None or address in _COMPATIBLE:
        return False
    return address in _UNICAST and address.is_global and not address.is_multicast
