"""Real parts that take long to start, shared by all tests of a session."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordexp.demo.generate import start_vllm, stop_vllm
from coordexp.demo.model import make_model
from tests.integration.servers import Fleet


@pytest.fixture(scope="session")
def lively_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small vocabulary, random weights, answers that depend on the image."""
    return make_model(tmp_path_factory.mktemp("model") / "small", "small", spread=6.0)


@pytest.fixture(scope="session")
def lively_engine(lively_model: Path) -> Iterator[Any]:
    engine = start_vllm(lively_model)
    yield engine
    stop_vllm(engine)


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two rollout servers for all tests that need some. One that is not sure of them says so (`ensure`)."""
    servers = Fleet(tmp_path_factory.mktemp("fleet"), 2)
    try:
        servers.start(0, 1)  # side by side, which takes less time than one after the other
        yield servers
    finally:
        servers.close()
