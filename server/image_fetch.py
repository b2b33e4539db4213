"""Fetching images over http(s) from hosts that the operator allows (server/image_address.py), within limits on size, time and speed.

A name is resolved once and the connection goes to an address that was checked, so that a second answer of the name server changes nothing.
Redirects are followed here, each checked like the first URL. Neither proxies, cookies nor credentials are used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urljoin

import httpx

from forebay import __version__
from forebay.model.errors import RequestError
from forebay.server.errors import HttpError
from forebay.server.image_address import Address, ImageUrl, Policy, parse_url, refused
from forebay.server.image_header import MAGIC, kind_of_image
from forebay.server.limits import ImageOptions

_HEADERS = {"User-Agent": f"forebay/{__version__}", "Accept": "image/*", "Accept-Encoding": "identity", "Connection": "close"}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})
MAX_TRIED = 2  # addresses of one name


@dataclass
class Budget:
    """What the images of one request may have in all, in bytes. `claim` is told of all that is taken, and raises if there is no memory."""

    left: int
    limit: int
    claim: Callable[[int], None] = lambda size: None

    def take(self, size: int) -> None:
        """Raises RequestError image_too_large, or what `claim` raises."""
        self.left -= size
        if self.left < 0:
            text = f"The images of this request have more than {_size(self.limit)} together. Send fewer or smaller ones."
            raise RequestError(text, code="image_too_large")
        self.claim(size)


def too_many_bytes(limit: int) -> RequestError:
    return RequestError(f"The image is larger than the limit of {_size(limit)}.", code="image_too_large")


def _size(count: int) -> str:
    return f"{count / (1 << 20):g} MiB" if count >= 1 << 20 else f"{count} bytes"


class ImageFetcher:
    """Fetches for all requests of a server; use it from one event loop."""

    def __init__(self, options: ImageOptions, policy: Policy) -> None:
        self._options, self._policy = options, policy
        self._all = asyncio.Semaphore(options.parallel_all)
        self._client: httpx.AsyncClient | None = None

    async def fetch(self, url: ImageUrl, budget: Budget) -> bytes:
        """The file behind `url`, whose first bytes are those of an image.

        Raises RequestError (invalid_image_url, image_parse_error, image_too_large), or HttpError 503 where another try may help.
        """
        seconds = self._options.fetch_timeout_s
        try:
            async with asyncio.timeout(seconds), self._all:
                for _ in range(self._options.redirects + 1):
                    self._policy.check(url)
                    found = await self._follow(url, budget)
                    if isinstance(found, bytes):
                        return found
                    url = found
        except TimeoutError:
            raise refused(f"fetching it took longer than {seconds:g} s") from None
        raise refused(f"it redirects more than {self._options.redirects} times")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _follow(self, url: ImageUrl, budget: Budget) -> bytes | ImageUrl:
        """The file, or where it is said to be. A second address is tried if the first cannot be reached."""
        addresses = (await self._resolve(url))[:MAX_TRIED]
        for address in addresses:
            try:
                return await self._get(url, address, budget)
            except httpx.ConnectTimeout:
                error: Exception = refused(f"its host did not answer within {self._options.connect_timeout_s:g} s")
            except httpx.ConnectError:
                error = _unavailable("its host cannot be reached")
            except httpx.TimeoutException:
                raise refused("its host stopped sending") from None
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                raise _unavailable("the connection broke off") from None
            except (httpx.HTTPError, httpx.InvalidURL):
                raise refused("it cannot be fetched") from None
        raise error

    async def _resolve(self, url: ImageUrl) -> list[Address]:
        """Addresses of the host, all of them checked."""
        if url.address is not None:
            return [url.address]
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._options.connect_timeout_s):
                found = await loop.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno == socket.EAI_AGAIN:
                raise _unavailable("its host name cannot be resolved now") from None
            raise refused("its host name does not exist") from None
        except (TimeoutError, UnicodeError):
            raise refused("its host name cannot be resolved") from None
        addresses = list(dict.fromkeys(ipaddress.ip_address(entry[4][0]) for entry in found))
        for address in addresses:
            self._policy.check_address(address)
        if not addresses:
            raise refused("its host name has no address")
        return addresses

    async def _get(self, url: ImageUrl, address: Address, budget: Budget) -> bytes | ImageUrl:
        if self._client is None:
            self._client = await asyncio.to_thread(self._new_client)
        host = f"[{address}]" if address.version == 6 else str(address)
        pinned = f"{url.scheme}://{host}:{url.port}{url.target}"
        headers = {**_HEADERS, "Host": url.authority}
        # Certificates are those of the name, whatever address it has.
        async with self._client.stream("GET", pinned, headers=headers, extensions={"sni_hostname": url.host}) as response:
            status = response.status_code
            if status in _REDIRECTS and (location := response.headers.get("location")):
                following = parse_url(urljoin(f"{url.scheme}://{url.authority}{url.target}", location))
                if url.scheme == "https" and following.scheme != "https":
                    raise refused("it redirects from https to http")
                return following
            if status in _RETRYABLE:
                raise _unavailable(f"its host answers with status {status}")
            if status != 200:
                raise refused(f"its host answers with status {status}")
            if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
                raise refused("its host sends it compressed although it was asked not to")
            declared = response.headers.get("content-length", "")
            if declared.isascii() and declared.isdecimal() and (len(declared) > 18 or int(declared) > self._options.max_bytes):
                raise too_many_bytes(self._options.max_bytes)
            return await self._read(response, budget)

    async def _read(self, response: httpx.Response, budget: Budget) -> bytes:
        options, clock = self._options, asyncio.get_running_loop().time
        data = bytearray()
        since, before, known = clock(), 0, False
        async for part in response.aiter_raw():
            if len(data) + len(part) > options.max_bytes:
                raise too_many_bytes(options.max_bytes)
            budget.take(len(part))
            data += part
            if not known and len(data) >= MAGIC:
                kind_of_image(data)
                known = True
            if (passed := clock() - since) >= options.fetch_window_s:
                if len(data) - before < options.fetch_floor * passed:
                    raise refused(f"its host sends less than {options.fetch_floor} bytes per second")
                since, before = clock(), len(data)
        if not known:
            kind_of_image(data)
        return bytes(data)

    def _new_client(self) -> httpx.AsyncClient:
        options = self._options
        return httpx.AsyncClient(
            verify=ssl.create_default_context(),  # the system's authorities, which operators can add to
            http2=False,
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(options.connect_timeout_s, pool=None),
            limits=httpx.Limits(max_connections=options.parallel_all, max_keepalive_connections=0),
        )


def _unavailable(reason: str) -> HttpError:
    return HttpError(503, f"An image URL cannot be fetched now: {reason}.", code="image_unavailable", retry_after=2)
