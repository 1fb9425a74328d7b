"""Models, engines and servers that take long to start, shared by all tests of a session."""

import os
from collections.abc import Iterator
from pathlib import Path

# A KV cache of 1 GiB per engine, however much memory the machine reports: some virtual machines report a third of
# theirs for the NUMA node, and the tests' share of that is less than an engine needs.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import pytest

from coordexp.demo.model import make_model
from tests.integration.servers import Fleet


@pytest.fixture(scope="session")
def lively_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a small vocabulary and random weights, whose answers depend on the image."""
    return make_model(tmp_path_factory.mktemp("model") / "small", "small", spread=6.0)


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two rollout servers that tests share. A test after which one may be gone calls `ensure`."""
    servers = Fleet(tmp_path_factory.mktemp("fleet"), 2)
    try:
        servers.start(0, 1)  # at the same time, which is faster
        yield servers
    finally:
        servers.close()
