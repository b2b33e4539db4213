"""The layout of the house: links, arrows between the rooms, and what the built packages contain."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import forebay

ROOMS = ("cache", "engine", "model", "server")


def test_rooms_are_linked_into_the_package(repository: Path) -> None:
    for room in ROOMS:
        link = repository / "src" / "forebay" / room
        assert link.is_symlink()
        assert link.readlink() == Path("..", "..", room)
        assert (link / "__init__.py").is_file()
    assert (repository / "src" / "forebay" / "py.typed").is_file()


def test_every_folder_of_a_room_is_a_package(repository: Path) -> None:
    for room in ROOMS:
        for file in (repository / room).rglob("*.py"):
            assert (file.parent / "__init__.py").is_file(), file


def test_arrows_between_the_rooms_hold(repository: Path) -> None:
    done = _lint_imports(repository)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


def test_arrows_see_through_the_links(repository: Path, tmp_path: Path) -> None:
    """A house in which cache imports engine is refused, so the contracts do look at what is behind the links."""
    (tmp_path / "pyproject.toml").write_bytes((repository / "pyproject.toml").read_bytes())
    (tmp_path / "src" / "forebay").mkdir(parents=True)
    (tmp_path / "src" / "forebay" / "__init__.py").touch()
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").touch()
        (tmp_path / "src" / "forebay" / room).symlink_to(Path("..", "..", room))
    assert _lint_imports(tmp_path).returncode == 0
    (tmp_path / "cache" / "wrong.py").write_text("import forebay.engine\n")
    done = _lint_imports(tmp_path)
    assert done.returncode != 0
    assert "forebay.cache.wrong -> forebay.engine" in done.stdout


def _lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    tool = Path(sys.executable).with_name("lint-imports")
    return subprocess.run([tool, "--no-cache", "--no-logo"], cwd=folder, env={"PYTHONPATH": "src"}, capture_output=True, text=True)


def test_no_room_needs_triton_to_be_imported(repository: Path) -> None:
    """triton is optional: it may be imported inside functions only, or in a file of Gluon that is imported so itself."""
    gluon = "(attend_wide|index_lone|store_wide|streams_tile|streams_wide)"
    for room in ROOMS:
        for file in (repository / room).rglob("*.py"):
            found = re.search(rf"^(import|from) (triton|.*{gluon})", file.read_text("utf-8"), re.MULTILINE)
            assert re.fullmatch(gluon, file.stem) or not found, file


@pytest.mark.slow
def test_built_packages_hold_the_rooms(repository: Path, tmp_path: Path) -> None:
    """The wheel and the source archive hold what the links point to, at `forebay/`, and the files that are not code."""
    copy = tmp_path / "copy"
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=repository, capture_output=True, text=True, check=True)
    checkpoint = [file.relative_to(repository).as_posix() for file in (repository / "model" / "demo" / "checkpoint").iterdir()]
    for name in (*listed.stdout.splitlines(), *checkpoint):
        source, target = repository / name, copy / name
        if not source.is_symlink() and not source.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        else:
            target.write_bytes(source.read_bytes())
    build = "from setuptools import build_meta as b; print(b.build_sdist('dist')); print(b.build_wheel('dist'))"
    subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, check=True)
    with zipfile.ZipFile(next((copy / "dist").glob("*.whl"))) as wheel:
        wheel_names = set(wheel.namelist())
        wheel.extractall(tmp_path / "site")
    with tarfile.open(next((copy / "dist").glob("*.tar.gz"))) as archive:
        archive_names = {member.name for member in archive.getmembers() if member.isfile()}
    wanted = {f"forebay/{file.relative_to(repository).as_posix()}" for room in ROOMS for file in (repository / room).rglob("*.py")}
    wanted |= {"forebay/py.typed", "forebay/__init__.py"}
    tasks = repository / "model" / "demo" / "tasks"
    data = [file.relative_to(repository).as_posix() for ending in ("*.txt", "*.json") for file in tasks.glob(ending)]
    assert len(data) >= 4
    wanted |= {f"forebay/{name}" for name in (*checkpoint, *data)}
    assert wanted <= wheel_names
    assert {f"forebay-{forebay.__version__}/src/{name}" for name in wanted} <= archive_names
    licences = {"LICENSE", "NOTICE", *(f"LICENSES/{file.name}" for file in (repository / "LICENSES").iterdir())}
    assert {f"forebay-{forebay.__version__}.dist-info/licenses/{name}" for name in licences} <= wheel_names
    assert {f"forebay-{forebay.__version__}/{name}" for name in licences} <= archive_names
    assert not [name for name in wheel_names if not name.startswith("forebay")]
    _serves_from(tmp_path / "site")


def _serves_from(site: Path) -> None:
    """The demo of an installed wheel is served from there, and nothing is written beside it: an installation may be read-only."""
    folders = [site, *(path for path in site.rglob("*") if path.is_dir())]
    before = {path: path.stat().st_mtime_ns for path in site.rglob("*")}
    for folder in folders:
        folder.chmod(0o555)
    code = "import forebay.model; from forebay.engine.llm import LLM; print(forebay.model.__file__, len(LLM('demo').generate('Hello')))"
    home = site.parent / "home"  # without rights, so that nothing is kept there either
    home.mkdir(mode=0o555)
    env = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(home)}
    env.pop("XDG_CACHE_HOME", None)
    try:
        done = subprocess.run([sys.executable, "-c", code], cwd=home, env=env, capture_output=True, text=True)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(site / "forebay" / "model" / "__init__.py"), "1"]
    assert {path: path.stat().st_mtime_ns for path in site.rglob("*")} == before
    assert list(home.iterdir()) == []


def test_licence_is_apache_2(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (repository / "LICENSE").read_text("utf-8")[:200]


def test_notice_covers_what_derives_from_the_works_of_others(repository: Path) -> None:
    """NOTICE names the derived files and has the notices; the licences have their terms; README leads to both."""
    notice, readme = ((repository / name).read_text("utf-8") for name in ("NOTICE", "README.md"))
    for name in ("tasks/filler.txt", "tasks/held_out.txt", "checkpoint/tokenizer.json", "checkpoint/*.safetensors"):
        assert f"\nmodel/demo/{name}\n    From " in notice
        assert list((repository / "model" / "demo").glob(name))
    for name, copyright, clause in (
        ("Python-3.11.2.txt", "Copyright © 2001-2023 Python Software Foundation", "a brief summary of the changes made to Python"),
        ("WordNet-3.0.txt", "WordNet 3.0 Copyright 2006 by Princeton University.", 'THIS SOFTWARE AND DATABASE IS PROVIDED "AS IS"'),
    ):
        licence = " ".join((repository / "LICENSES" / name).read_text("utf-8").split())
        assert copyright in licence and clause in licence
        assert copyright in notice and f"LICENSES/{name}" in notice
    assert "[NOTICE](NOTICE)" in readme and "[LICENSES](LICENSES)" in readme
