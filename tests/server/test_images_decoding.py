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
from blake3 import blake3
from PIL import Image

from forebay.model.chat import ChatCodec, PlacedImage
from forebay.model.errors import ForebayError, RequestError
from forebay.model.image_pixels import render
from forebay.model.image_plan import ImagePlan, plan
from forebay.server.image_header import read_header
from forebay.server.image_pool import PROGRAM, DecodePool
from forebay.server.limits import ImageOptions, ServerOptions
from forebay.server.pictures import ImageDesk, Picture, PictureCache, PlannedImage
from image_hosts import VISION, as_it_is, asks, data_url, origin, picture, reply, rgb
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


async def decoded(made: DecodePool, data: bytes = PNG, size: tuple[int, int] | None = None) -> bytes:
    """All pixels of a file, of the size that Pillow finds."""
    size = size or Image.open(io.BytesIO(data)).size
    found = await made.render(data, size, as_it_is(*size))
    assert found.digest == blake3(found.rgb).digest()
    return found.rgb


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
                    assert await decoded(made, data, (31, 17)) == rgb(data)

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
                header = read_header(file)
                assert await decoded(made, file, (header.width, header.height)) == rgb(file)
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
                    await decoded(made, data, (300, 200))
                assert caught.value.code == "image_parse_error"
                assert await decoded(made) == rgb(PNG)
            with pytest.raises(RequestError, match="9000 by 9000 pixels where its header says 8 by 6") as caught:
                await decoded(made, declares(9000, 9000), (8, 6))  # the program has the last look at what decoding will take
            assert caught.value.code == "image_parse_error"
            assert made.failures == 0

    asyncio.run(run())


@pytest.mark.case("B103")
def test_a_bomb_ends_its_own_process_only() -> None:
    bomb = blank_png(8000)
    assert len(bomb) < 300_000
    small_canvas = as_it_is(84, 84)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    async def run() -> None:
        async with pool(workers=2, decode_memory=256 << 20) as small, pool(workers=2, decode_timeout_s=0.2) as hasty:
            assert await decoded(small) == rgb(PNG)
            asked = [(small, bomb, 8000, 8000), (small, PNG, 8, 6), (small, bomb, 8000, 8000), (hasty, bomb, 8000, 8000)]
            drawn = (made.render(data, (width, height), small_canvas) for made, data, width, height in asked)
            results = await asyncio.gather(*drawn, return_exceptions=True)
            for result in (results[0], results[2], results[3]):
                assert isinstance(result, RequestError) and result.code in ("image_too_large", "image_parse_error"), result
            assert not isinstance(results[1], BaseException)
            assert hasty.failures == 1  # by its clock
            assert await decoded(small) == await decoded(hasty) == rgb(PNG)

    asyncio.run(run())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_program_that_dies_or_hangs_is_replaced() -> None:
    async def run() -> None:
        async with pool(workers=1, decode_timeout_s=0.3) as made:
            await decoded(made)
            (pid,) = programs(made)
            os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(RequestError):  # it may or may not have been noticed before
                await decoded(made)
            assert await decoded(made) == rgb(PNG)
            (second,) = programs(made)
            assert second != pid
            os.killpg(second, signal.SIGSTOP)
            begun = time.monotonic()
            with pytest.raises(RequestError):
                await decoded(made)
            assert time.monotonic() - begun < 5
            assert await decoded(made) == rgb(PNG)
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
def render(*request):
    found = {{}}
    for name, attempt in tries.items():
        try:
            attempt(); found[name] = 0
        except OSError as error:
            found[name] = error.errno
    return 1, json.dumps(found).encode()
worker.render = render
worker.main(1 << 31, 5.0)
"""
    process = subprocess.Popen([sys.executable, "-I", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    answer, ends = process.communicate(struct.pack("<QIIIIIIII", 3, *range(1, 9)) + b"abc", timeout=60)
    assert ends[:1] == b"\0", ends
    _, filtered, size = struct.unpack_from("<BBQ", answer)
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
                    await decoded(made, data, (8, 6))
                assert caught.value.status == 500

    asyncio.run(run())


def test_a_decoder_has_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_API_KEYS", "sk-secret")

    async def run() -> None:
        async with pool(workers=1) as made:
            await decoded(made)
            (pid,) = programs(made)
            assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
            assert sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2"]

    asyncio.run(run())


# ---- the desk


def planned(data: bytes, width: int, height: int, longest: int | None = None) -> PlannedImage:
    return PlannedImage("messages.7.content.1.image_url", data, (width, height), plan(width, height, VISION.config, longest=longest))


def desk(**options: Any) -> ImageDesk:
    return ImageDesk(ImageOptions(workers=1, **options), VISION)


def test_a_canvas_is_what_the_reference_draws() -> None:
    """By the program, which can import nothing of ours, as by `render`."""

    async def run() -> None:
        made = desk()
        try:
            for kind, size, mode, longest in (
                ("PNG", (8, 6), "RGB", None), ("PNG", (640, 480), "L", None), ("JPEG", (1500, 40), "RGB", None),
                ("WEBP", (70, 900), "RGBA", None), ("GIF", (600, 700), "P", 512), ("PNG", (84, 84), "RGB", None),
                ("PNG", (1, 60), "RGB", None),
            ):  # fmt: skip
                data = picture(kind, size, mode)
                image = planned(data, *size, longest)
                pixels = np.frombuffer(rgb(data), np.uint8).reshape(size[1], size[0], 3)
                (found,) = await made.render([image])
                assert np.array_equal(found.canvas, render(pixels, image.plan)), (kind, size)
                assert found.digest == VISION.digest(blake3(found.canvas.tobytes()).digest(), image.plan)
        finally:
            made.close()

    asyncio.run(run())


def test_pictures_are_remembered_by_content_plan_and_tenant() -> None:
    other, large = picture(size=(4, 4)), picture(size=(2000, 1000))

    async def run() -> None:
        made = desk()
        try:
            asked = [planned(PNG, 8, 6), planned(other, 4, 4), planned(bytes(bytearray(PNG)), 8, 6)]
            pictures = await made.render(asked, "a")
            assert pictures[0] is pictures[2] and not pictures[0].canvas.flags.writeable
            assert pictures[0].digest != pictures[1].digest
            misses = made.cache.misses
            again = await made.render(asked, "a")
            assert made.cache.misses == misses and all(a is b for a, b in zip(again, pictures, strict=True))
            await made.render(asked[:1], "b")
            assert made.cache.misses == misses + 1
            high, low = await made.render([planned(large, 2000, 1000), planned(large, 2000, 1000, 50)], "a")
            assert high.canvas.shape != low.canvas.shape and high.digest != low.digest
            assert made.cache.misses == misses + 3
            damaged = planned(picture("JPEG", (99, 99))[:400], 99, 99)
            with pytest.raises(RequestError) as caught:
                await made.render([*asked, damaged])
            assert (caught.value.param, caught.value.code) == ("messages.7.content.1.image_url", "image_parse_error")
        finally:
            made.close()

    asyncio.run(run())


def test_equal_pictures_of_a_request_are_decoded_once() -> None:
    async def run() -> None:
        made = desk(cache_bytes=0)
        try:
            plain = made.pool.render

            async def count(*arguments: Any) -> Any:
                drawn.append(1)
                return await plain(*arguments)

            made.pool.render = count  # type: ignore[method-assign]
            drawn: list[int] = []
            first, *others = await made.render([planned(bytes(bytearray(PNG)), 8, 6) for _ in range(5)])
            assert drawn == [1]
            assert all(picture.canvas is first.canvas for picture in others)
            claimed: list[int] = []
            places = [PlacedImage(str(number), 10 * number, 10 * number + 10) for number in range(5)]
            shown = await made.show(places, {place.part: planned(bytes(bytearray(PNG)), 8, 6) for place in places}, claimed.append)
            assert claimed == [first.canvas.nbytes]
            assert [(image.start, image.stop, image.plan.tokens) for image in shown] == [(10 * n, 10 * n + 10, 10) for n in range(5)]
        finally:
            made.close()

    asyncio.run(run())


def test_the_cache_keeps_to_its_budget() -> None:
    key = planned(PNG, 8, 6).plan

    def entry(number: int, size: int) -> tuple[tuple[str, bytes, ImagePlan], Picture]:
        return ("", bytes([number]), key), Picture(np.zeros((1, size, 3), np.uint8), bytes([number]))

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
        engine.codec = ChatCodec(engine.tokenizer, vision=VISION)
        images = ImageOptions(fetch=True, hosts=(f"127.0.0.1:{host.port}",), allow_private=True, workers=2, decode_memory=256 << 20)
        with serve(engine, ServerOptions(images=images)) as served:
            base = f"http://127.0.0.1:{host.port}"

            def post(*urls: str) -> httpx.Response:
                return httpx.post(f"{served.url}/v1/chat/completions", json=asks(*urls), timeout=60)

            assert post(f"{base}/a", URL).status_code == 200
            assert [image.canvas.shape for image in engine.requests[-1].images] == [(84, 98, 3)] * 2
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
