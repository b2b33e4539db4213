"""Decoding images in processes of their own, remembering them, and a whole server that does it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from forebay.model.errors import ForebayError, RequestError
from forebay.server.image_pool import PROGRAM, DecodePool
from forebay.server.images import FoundImage, ImageDesk, Picture, PictureCache
from forebay.server.limits import ImageOptions, ServerOptions
from image_hosts import SeeingCodec, asks, data_url, origin, picture, reply, rgb
from script_engine import ScriptEngine, serve

PNG = picture()
URL = data_url(PNG)


def declares(width: int, height: int) -> bytes:
    """A small PNG whose header declares a size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return PNG[:16] + head + struct.pack(">I", zlib.crc32(b"IHDR" + head)) + PNG[33:]


def blank_png(side: int) -> bytes:
    """A valid picture of side × side pixels in a file a thousandth of its size."""
    data = io.BytesIO()
    Image.new("RGB", (side, side)).save(data, "PNG")
    return data.getvalue()


# ---- decoding


@contextlib.asynccontextmanager
async def pool(**options: Any) -> AsyncIterator[DecodePool]:
    made = DecodePool(ImageOptions(**options))
    try:
        yield made
    finally:
        made.close()


def programs(made: DecodePool) -> list[int]:
    return [program._process.pid for program in made._programs if program._process is not None]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16"])
def test_pixels_are_those_that_pillow_decodes_here(mode: str) -> None:
    async def run() -> None:
        async with pool(workers=1) as made:
            for kind, modes in {"PNG": {"RGB", "RGBA", "L", "LA", "P", "1", "I;16"}, "JPEG": {"RGB", "L", "CMYK"}, "GIF": {"RGB", "L", "P"},
                                "WEBP": {"RGB", "RGBA"}}.items():  # fmt: skip
                if mode in modes:
                    data = picture(kind, (31, 17), mode)
                    decoded = await made.decode(data, 8192)
                    assert (decoded.width, decoded.height, decoded.rgb) == (31, 17, rgb(data))

    asyncio.run(run())


def test_odd_but_valid_files() -> None:
    """What a decoder imports late: the sandbox can open nothing any more."""
    frames = [Image.new("P", (9, 9), i) for i in range(3)]
    gif, webp, mpo = io.BytesIO(), io.BytesIO(), io.BytesIO()
    frames[0].save(gif, "GIF", save_all=True, append_images=frames[1:], transparency=0)
    frames[0].convert("RGBA").save(webp, "WEBP", save_all=True, append_images=[f.convert("RGBA") for f in frames[1:]])
    frames[0].convert("RGB").save(mpo, "MPO", save_all=True, append_images=[f.convert("RGB") for f in frames[1:]])
    exif = Image.Exif()
    exif[0x0112], exif[0x010E], exif[0x011A] = 6, "ä", 72.0
    palette = Image.new("P", (5, 7), 1)
    files = [gif.getvalue(), webp.getvalue(), mpo.getvalue(), picture("JPEG", (20, 10), exif=exif), picture(exif=exif)]
    data = io.BytesIO()
    palette.save(data, "PNG", transparency=bytes(range(256)))
    files.append(data.getvalue())

    async def run() -> None:
        async with pool(workers=1) as made:
            for file in files:
                assert (await made.decode(file, 8192)).rgb == rgb(file)
            pid = programs(made)
            assert made.failures == 0 and len(pid) == 1

    asyncio.run(run())


@pytest.mark.case("B103")
def test_damaged_files_are_refused_and_the_next_one_is_decoded() -> None:
    jpeg, webp = picture("JPEG", (300, 200)), picture("WEBP", (300, 200))
    broken = [jpeg[: len(jpeg) * 2 // 3], jpeg[:200], webp[: len(webp) // 2], PNG[:45], PNG[:40] + b"\0" * 20 + PNG[60:],
              b"\xff\xd8\xff" + bytes(99), picture("GIF")[:20], b"RIFF\xff\xff\xff\x7fWEBPVP8 " + bytes(40)]  # fmt: skip

    async def run() -> None:
        async with pool(workers=1) as made:
            for data in broken:
                with pytest.raises(RequestError) as caught:
                    await made.decode(data, 8192)
                assert caught.value.code == "image_parse_error"
                assert (await made.decode(PNG, 8192)).rgb == rgb(PNG)
            with pytest.raises(RequestError) as caught:  # whoever asks, the program has the last look at the size
                await made.decode(declares(9000, 9000), 8192)
            assert caught.value.code == "image_too_large"
            assert made.failures == 0

    asyncio.run(run())


@pytest.mark.case("B103")
def test_a_bomb_ends_its_own_process_only() -> None:
    bomb = blank_png(8000)
    assert len(bomb) < 300_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    async def run() -> None:
        async with pool(workers=2, decode_memory=256 << 20) as small, pool(workers=2, decode_timeout_s=0.2) as hasty:
            assert (await small.decode(PNG, 8192)).width == 8
            asked = [(small, bomb), (small, PNG), (small, bomb), (hasty, bomb)]
            results = await asyncio.gather(*(made.decode(data, 8192) for made, data in asked), return_exceptions=True)
            for result in (results[0], results[2], results[3]):
                assert isinstance(result, RequestError) and result.code in ("image_too_large", "image_parse_error"), result
            assert not isinstance(results[1], BaseException)
            assert hasty.failures == 1  # by its clock
            assert (await small.decode(PNG, 8192)).rgb == (await hasty.decode(PNG, 8192)).rgb == rgb(PNG)

    asyncio.run(run())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_program_that_dies_or_hangs_is_replaced() -> None:
    async def run() -> None:
        async with pool(workers=1, decode_timeout_s=0.3) as made:
            await made.decode(PNG, 8192)
            (pid,) = programs(made)
            os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(RequestError):  # it may or may not have been noticed before
                await made.decode(PNG, 8192)
            assert (await made.decode(PNG, 8192)).rgb == rgb(PNG)
            (second,) = programs(made)
            assert second != pid
            os.killpg(second, signal.SIGSTOP)
            begun = time.monotonic()
            with pytest.raises(RequestError):
                await made.decode(PNG, 8192)
            assert time.monotonic() - begun < 5
            assert (await made.decode(PNG, 8192)).rgb == rgb(PNG)
            last = programs(made)
        for pid in last:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(run())


@pytest.mark.case("B105")
def test_a_decoder_can_open_nothing_start_nothing_and_call_nobody() -> None:
    """The program's own limits, tried from inside."""
    script = f"""
import importlib.util, json, os, socket, subprocess, sys, ctypes
spec = importlib.util.spec_from_file_location("worker", {str(PROGRAM)!r})
worker = importlib.util.module_from_spec(spec); spec.loader.exec_module(worker)
tries = {{
    "open": lambda: os.open("/etc/hosts", os.O_RDONLY), "create": lambda: os.open("/tmp/x", os.O_CREAT | os.O_WRONLY),
    "socket": lambda: socket.socket(), "fork": os.fork, "exec": lambda: os.execv("/bin/true", ["true"]),
    "kill": lambda: os.kill(os.getppid(), 0), "pipe": os.pipe, "unlink": lambda: os.unlink("/tmp/none"), "list": lambda: os.listdir("/"),
}}
def decode(data, side):
    found = {{}}
    for name, attempt in tries.items():
        try:
            attempt(); found[name] = 0
        except OSError as error:
            found[name] = error.errno
    return 1, 0, 0, json.dumps(found).encode()
worker.decode = decode
worker.main(1 << 31, 5.0)
"""
    process = subprocess.Popen([sys.executable, "-I", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    answer, ends = process.communicate(struct.pack("<QI", 3, 9) + b"abc", timeout=60)
    assert ends[:1] == b"\0", ends
    _, filtered, _, _, size = struct.unpack_from("<BBIIQ", answer)
    found = json.loads(answer[-size:])
    if not filtered:
        pytest.skip("this system cannot filter system calls")
    assert found == dict.fromkeys(found, 1) and len(found) == 9  # EPERM


def test_a_decoder_that_cannot_start_is_no_fault_of_the_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "worker.py"
    broken.write_text("import nothing_of_this_name")
    monkeypatch.setattr("forebay.server.image_pool.PROGRAM", broken)

    async def run() -> None:
        async with pool(workers=1) as made:
            for data in (PNG, bytes(1 << 20)):  # the second does not fit into a pipe
                with pytest.raises(ForebayError, match="nothing_of_this_name") as caught:
                    await made.decode(data, 8192)
                assert caught.value.status == 500

    asyncio.run(run())


def test_a_decoder_has_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_API_KEYS", "sk-secret")

    async def run() -> None:
        async with pool(workers=1) as made:
            await made.decode(PNG, 8192)
            (pid,) = programs(made)
            assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
            assert sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2"]

    asyncio.run(run())


# ---- the desk


def test_pictures_are_remembered_by_content_and_tenant() -> None:
    other = picture(size=(4, 4))

    async def run() -> None:
        desk = ImageDesk(ImageOptions(workers=1))
        try:
            found = desk.find(asks(URL, data_url(other), data_url(PNG, "gif")), fetching=True)
            pictures = await desk.resolve(found, "a")
            assert [p.pixels.shape for p in pictures] == [(6, 8, 3), (4, 4, 3), (6, 8, 3)]
            assert pictures[0].pixels.tobytes() == rgb(PNG) and not pictures[0].pixels.flags.writeable
            assert pictures[0].digest == pictures[2].digest != pictures[1].digest
            misses = desk.cache.misses
            again = await desk.resolve(found, "a")
            assert desk.cache.misses == misses and all(a.pixels is b.pixels for a, b in zip(again[:2], pictures[:2], strict=True))
            await desk.resolve(found[:1], "b")
            assert desk.cache.misses == misses + 1
            with pytest.raises(RequestError) as caught:
                await desk.resolve([*found, FoundImage("messages.7.content.1.image_url", picture("JPEG", (99, 99))[:400])])
            assert (caught.value.param, caught.value.code) == ("messages.7.content.1.image_url", "image_parse_error")
        finally:
            desk.close()

    asyncio.run(run())


def test_the_cache_keeps_to_its_budget() -> None:
    def entry(number: int, size: int) -> tuple[tuple[str, bytes], Picture]:
        return ("", bytes([number])), Picture(np.zeros((1, size, 3), np.uint8), bytes([number]))

    cache = PictureCache(300)
    for number in range(5):
        cache.put(*entry(number, 40))
    assert cache.size == 240
    assert [cache.get(entry(n, 1)[0]) is not None for n in range(5)] == [False, False, False, True, True]
    cache.get(entry(3, 1)[0])
    cache.put(*entry(9, 50))
    assert cache.get(entry(3, 1)[0]) is not None and cache.get(entry(4, 1)[0]) is None
    cache.put(*entry(8, 101))
    assert cache.get(entry(8, 1)[0]) is None and cache.size == 270


# ---- over HTTP


@pytest.mark.case("B103")
def test_with_vision_images_are_fetched_decoded_and_bad_ones_harm_nobody() -> None:
    release = threading.Event()

    def answer(connection: Any, path: str) -> None:
        if path == "/slow":
            release.wait(20)
        parts: dict[str, Callable[[], bytes]] = {"/cut": lambda: picture("JPEG", (200, 200))[:900], "/bomb": lambda: blank_png(8000)}
        reply(parts.get(path, lambda: PNG)())(connection, path)

    with origin(answer) as host:
        engine = ScriptEngine()
        engine.codec = SeeingCodec(engine.tokenizer)
        images = ImageOptions(fetch=True, hosts=(f"127.0.0.1:{host.port}",), allow_private=True, workers=2, decode_memory=256 << 20)
        with serve(engine, ServerOptions(images=images)) as served:
            base = f"http://127.0.0.1:{host.port}"

            def post(*urls: str) -> httpx.Response:
                return httpx.post(f"{served.url}/v1/chat/completions", json=asks(*urls), timeout=60)

            assert post(f"{base}/a", URL).status_code == 200
            assert engine.text().count("image") == 2
            assert httpx.get(f"{served.url}/v1/models").json()["data"][0]["capabilities"]["vision"] is True
            slow = threading.Thread(target=post, args=(f"{base}/slow",))
            slow.start()
            served.wait(lambda: any(path == "/slow" for path, _ in host.requests))
            for url, code in ((f"{base}/cut", "image_parse_error"), (f"{base}/bomb", None), (f"{base}:/", "invalid_image_url")):
                bad = post(URL, url)
                error = bad.json()["error"]
                assert bad.status_code == 400, error
                assert error["param"] == "messages[0].content[1].image_url"
                assert code is None or error["code"] == code
                begun = time.monotonic()
                assert post(URL).status_code == 200  # from the cache, while the slow one still waits
                assert time.monotonic() - begun < 2
            release.set()
            slow.join(20)
            decoders = programs(served.app._turns.images.pool)
            assert decoders
    for pid in decoders:  # the server has ended
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_server_itself_loads_no_decoder() -> None:
    script = "import sys; import forebay.server.app; sys.exit('PIL' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    assert subprocess.run([sys.executable, "-c", script], env=environment, timeout=120).returncode == 0
