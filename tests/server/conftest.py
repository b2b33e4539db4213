"""A running server over a scripted engine, one for each module of tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from forebay.server.limits import ServerOptions
from script_engine import ScriptEngine, Served, serve


@pytest.fixture(scope="session", autouse=True)
def kv_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where commands and servers of these tests keep KV: never in the developer's cache."""
    folder = tmp_path_factory.mktemp("kv")
    os.environ["FOREBAY_CACHE__DIR"] = str(folder)
    yield folder
    del os.environ["FOREBAY_CACHE__DIR"]


@pytest.fixture(scope="module")
def options() -> ServerOptions:
    """Options of the module's server; a module overrides this fixture to change them."""
    return ServerOptions()


@pytest.fixture(scope="module")
def module_server(options: ServerOptions) -> Iterator[Served]:
    with serve(ScriptEngine(), options) as served:
        yield served


@pytest.fixture
def served(module_server: Served) -> Iterator[Served]:
    """The module's server with a fresh script. After the test nothing may be left running."""
    engine = module_server.engine
    engine.say("Hello there.")
    engine.hold, engine.cached, engine.state, engine.reason, engine.age = False, 0, "ready", "", 0.0
    engine.max_running, engine.max_queued, engine.max_context = 256, 1024, 65536
    engine.requests.clear()
    engine.aborted.clear()
    yield module_server
    engine.hold = False
    module_server.wait(lambda: not engine.running and not engine.waiting)


@pytest.fixture(scope="module")
def module_client(module_server: Served) -> Iterator[openai.OpenAI]:
    with module_server.client() as client:
        yield client


@pytest.fixture
def client(served: Served, module_client: openai.OpenAI) -> openai.OpenAI:
    """The official client, pointed at `served`."""
    return module_client
