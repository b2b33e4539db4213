"""The program that decodes images, started by server/image_pool.py and never imported by the server.

It loads the decoders once and then forks one process for each image, so that what an image does to its decoder ends with it. Such a process
has limits on memory, CPU time and wall time, can open nothing, and where the kernel lets it may make no other system calls than those that
computing takes. A request on standard input is REQUEST and the file's bytes; the answer on standard output is ANSWER and the RGB bytes, or
a sentence for the client. Those bytes are of the canvas that the model sees: the server never holds all pixels of a large picture. When
the process has ended, its exit status follows as a byte on standard error, which the process itself cannot reach: so the answer is known
to be over, and the next image to meet a fresh process.

It imports nothing of ours: it is run by its path, in an interpreter without our environment.
"""

from __future__ import annotations

import codecs
import copy
import ctypes
import io
import os
import platform
import resource
import signal
import struct
import sys
import warnings

from PIL import (
    GifImagePlugin,
    Image,
    ImageCms,
    ImageColor,
    ImageFile,
    ImagePalette,
    ImageSequence,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

# What Pillow imports only when an image needs it; then it would be too late.
PRELOADED = (
    copy, GifImagePlugin, ImageCms, ImageColor, ImagePalette, ImageSequence, JpegImagePlugin, MpoImagePlugin, PngImagePlugin,
    TiffImagePlugin, WebPImagePlugin,
)
CODECS = ("latin-1", "ascii", "utf-8", "utf-16", "utf-16-le", "utf-16-be", "cp1252")

# Bytes of the file; then pairs of pixels: its declared size, the canvas, the size of the picture on it, its upper left corner there.
REQUEST = struct.Struct("<QIIIIIIII")
ANSWER = struct.Struct("<BBQ")  # status, whether system calls are filtered, bytes that follow: OK, all pixels of the canvas as RGB
OK, UNREADABLE, TOO_LARGE = range(3)
GREY = (127, 127, 127)  # of the canvas around the picture
FORMATS = ("PNG", "JPEG", "GIF", "WEBP")

# read, write, close, fstat, lseek, mmap, mprotect, munmap, brk, rt_sigaction, rt_sigprocmask, rt_sigreturn, sched_yield, mremap, madvise,
# setitimer, getpid, exit, futex, clock_gettime, exit_group, getrandom. Source: the kernel's system call tables.
_CALLS = {
    "x86_64": (0xC000_003E, (0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 28, 38, 39, 60, 202, 228, 231, 318)),
    "aarch64": (0xC000_00B7, (63, 64, 57, 80, 62, 222, 226, 215, 214, 134, 135, 139, 124, 216, 233, 103, 172, 93, 98, 113, 94, 278)),
}
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _EPERM = 0x7FFF_0000, 0x0005_0001
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def filter_calls(libc: ctypes.CDLL) -> bool:
    """Let every system call but those of `_CALLS` fail with EPERM, for good (seccomp). False if this kernel or machine cannot."""
    if platform.machine() not in _CALLS:
        return False
    architecture, allowed = _CALLS[platform.machine()]
    steps = [(_LOAD, 0, 0, 4), (_JUMP_IF_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _EPERM), (_LOAD, 0, 0, 0)]
    steps += [(_JUMP_IF_EQUAL, len(allowed) - i, 0, number) for i, number in enumerate(allowed)]
    steps += [(_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(code))
    zero = ctypes.c_ulong(0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero) != 0:
        return False
    return bool(libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_FILTER), ctypes.byref(program), zero, zero) == 0)


Pair = tuple[int, int]


def render(data: bytes, size: Pair, canvas: Pair, picture: Pair, corner: Pair) -> tuple[int, bytes]:
    """(status, RGB bytes or a sentence). The first frame, without rotation by its metadata; transparency is dropped.

    With pixels of the same values, the canvas is that of `forebay.model.image_pixels.render`. A file that is not of the declared `size`,
    which limits what decoding takes, is not decoded.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.size != size:
                found, said = (f"{width} by {height}" for width, height in (image.size, size))
                return UNREADABLE, f"it has {found} pixels where its header says {said}".encode()
            image.load()
            rgb = image if image.mode == "RGB" else image.convert("RGB")
            drawn = Image.new("RGB", canvas, GREY)
            drawn.paste(rgb.resize(picture, Image.Resampling.BICUBIC), corner)
            return OK, drawn.tobytes()
    except UnidentifiedImageError:
        return UNREADABLE, b"its header is damaged"
    except MemoryError:
        return TOO_LARGE, b"decoding it takes more memory than allowed"
    except Exception as error:  # decoders raise what they like on damaged data
        return UNREADABLE, str(error).encode("utf-8", "replace")[:200]


def serve_one(memory: int, seconds: float, libc: ctypes.CDLL) -> int:
    """The life of the process of one image. Returns its exit status: 0 after an answer, 3 if there is no more to do."""
    os.close(2)
    cpu = int(seconds) + 1
    for kind, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 2),
    ):
        resource.setrlimit(kind, (limit, limit))
    filtered = filter_calls(libc)
    head = _read(REQUEST.size)
    if len(head) < REQUEST.size:
        return 3
    size, *sides = REQUEST.unpack(head)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    data = _read(size)
    width, height, *places = sides
    canvas, picture, corner = ((a, b) for a, b in zip(places[::2], places[1::2], strict=True))
    status, payload = render(data, (width, height), canvas, picture, corner)
    _write(ANSWER.pack(status, filtered, len(payload)))
    _write(payload)
    return 0


def _read(size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size and (part := os.read(0, min(size - len(parts), 1 << 20))):
        parts += part
    return bytes(parts)


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view[: 1 << 20]):]


def main(memory: int, seconds: float) -> None:
    for number in (signal.SIGALRM, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    warnings.simplefilter("ignore")
    for name in CODECS:
        codecs.lookup(name)
    libc = ctypes.CDLL(None, use_errno=True)
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    Image.MAX_IMAGE_PIXELS = None  # the longest side is what counts here
    Image._initialized = 2  # the formats above are all there are: look for no more, no file can be opened then
    while True:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = serve_one(memory, seconds, libc)
            finally:
                os._exit(status)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(2, bytes([code & 0xFF]))
        if code != 0:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
