"""Hosts that images are fetched from, as real listeners; images; and how a model sees them, as far as the front is concerned."""

from __future__ import annotations

import base64
import contextlib
import io
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

from PIL import Image

from forebay.model.chat import ChatVision
from forebay.model.config import VisionConfig
from forebay.model.image_plan import ImagePlan

# URLs that are always refused. P is the port of a listener on this machine, which is allowed for every host.
FORBIDDEN = [
    "http://127.0.0.1:P/", "http://127.0.0.1/", "http://[::1]:P/", "http://localhost:P/", "http://LOCALHOST.:P/", "http://a.localhost:P/",
    "http://2130706433:P/", "http://0x7f000001:P/", "http://0x7f.1:P/", "http://0177.0.0.1:P/", "http://017700000001:P/",
    "http://127.1:P/", "http://127.0.0.1.:P/", "http://127.0.0.01:P/", "http://0:P/", "http://0.0.0.0:P/", "http://[::]:P/",
    "http://[::ffff:127.0.0.1]:P/", "http://[::ffff:7f00:1]:P/", "http://[0:0:0:0:0:ffff:7f00:0001]:P/", "http://[::127.0.0.1]:P/",
    "http://[64:ff9b::7f00:1]:P/", "http://[2002:7f00:1::]:P/", "http://[fe80::1%25lo]:P/", "http://169.254.169.254/latest/meta-data/",
    "http://[fd00:ec2::254]/", "http://168.63.129.16/", "http://10.0.0.1/", "http://192.168.0.1:P/", "http://224.0.0.1:P/",
    "http://example.com@127.0.0.1:P/", "http://user:pass@example.com/", "http://127.0.0.1:P@example.com/", "http://@127.0.0.1:P/",
    "http://example.com\\@127.0.0.1:P/", "http://127.0.0.1:P\\.example.com/", "http://exa mple.com:P/", "http://example.com\t:P/",
    "http://127.0.0.1:P\r\nX: y/", "http://１２７.0.0.1:P/", "http://127。0。0。1:P/", "http://ⓛocalhost:P/", "http://example.com:22/",
    "http://example.com:6379/", "http://example.com:0/", "http://example.com:99999/", "http://example.com:8a/", "https://example.com:80/",
    "ftp://127.0.0.1:P/", "gopher://127.0.0.1:P/_x", "dict://127.0.0.1:P/", "ws://127.0.0.1:P/", "jar:http://127.0.0.1:P/!/",
    "//127.0.0.1:P/", "http:/127.0.0.1:P/", "http:127.0.0.1:P", "http:///127.0.0.1:P/", "http://:P/", "http://[127.0.0.1]:P/", "http://[",
    "http://-a.example:P/", f"http://{'a' * 64}.example/", f"http://example.com/{'a' * 8192}",
]  # fmt: skip

Answer = Callable[[socket.socket, str], None]


class Origin:
    """An HTTP server of one thread per connection.

    Attributes:
        requests: (path, headers in lower case) as they came. connections: how many were accepted.
    """

    def __init__(self, answer: Answer, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        self._answer, self._tls = answer, tls
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.connections = 0
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(5)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            if self._tls is not None:
                connection = stack.enter_context(self._tls.wrap_socket(connection, server_side=True))
            head = b""
            while b"\r\n\r\n" not in head:
                if not (part := connection.recv(65536)):
                    return
                head += part
            first, *lines = head.split(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
            path = first.split(" ")[1]
            self.requests.append((path, {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}))
            self._answer(connection, path)


@contextlib.contextmanager
def origin(answer: Answer, **options: Any) -> Iterator[Origin]:
    host = Origin(answer, **options)
    try:
        yield host
    finally:
        host.close()


def reply(body: bytes, *, status: str = "200 OK", **headers: str) -> Answer:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())

    def answer(connection: socket.socket, path: str) -> None:
        length = "" if "content_length" in headers else f"content-length: {len(body)}\r\n"
        connection.sendall(f"HTTP/1.1 {status}\r\n{length}{lines}\r\n".encode() + body)

    return answer


def picture(kind: str = "PNG", size: tuple[int, int] = (8, 6), mode: str = "RGB", **options: Any) -> bytes:
    """A file with a gradient in it."""
    image = Image.linear_gradient("L").resize(size).convert(mode)
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def rgb(data: bytes) -> bytes:
    """The pixels that Pillow decodes in this process."""
    return Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def asks(*urls: Any) -> dict[str, Any]:
    """A chat body with one image part for each URL."""
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}} for url in urls]}]}


# A picture of up to 84 by 84 pixels becomes a span of 8 positions, a large one of at most 64.
SMALL_EYES = VisionConfig(
    num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=48, patch_size=14, downsample_ratio=3,
    max_image_tokens=64, min_pixels=7056,
)  # fmt: skip
VISION = ChatVision(4087, SMALL_EYES, "tower")


def as_it_is(width: int, height: int) -> ImagePlan:
    """A plan that leaves all pixels as they are."""
    return ImagePlan((width, height), (1, 1), (1, 1), (width, height), (0, 0))
