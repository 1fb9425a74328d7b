"""Check the scenario marks when tests are collected, and fail a marked test that is skipped in CI."""

import os
from collections.abc import Generator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads would wait for each other on a busy machine

import pytest
from hypothesis import settings

from coordexp.logs import show_messages
from tests import zygote
from tests.conformance.page import KINDS, parts
from tests.examples import examples

settings.register_profile("coordexp", examples(100))
settings.load_profile("coordexp")


@pytest.fixture(autouse=True)
def messages_are_plain() -> None:
    """Show messages as a command on a terminal does. The test before may have begun a log."""
    show_messages()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    zygote.session = getattr(config, "workerinput", {}).get("testrunuid", "")
    known = set(parts())
    if any(item.get_closest_marker("engine") for item in items):
        zygote.imported = zygote.IMPORTED + zygote.IMPORTED_FOR_ENGINES
    for item in items:
        if item.get_closest_marker("full") and item.get_closest_marker("scenario"):
            raise pytest.UsageError(f"{item.nodeid}: a proof of the specification is part of .ci/run")
        for mark in item.iter_markers("scenario"):
            for identity in mark.args:
                if identity not in known:
                    raise pytest.UsageError(
                        f"{item.nodeid}: {identity} is neither in tests/conformance/scenarios.yaml nor in "
                        "clauses.yaml, or a whole requirement"
                    )
            kind, starts_engine = mark.kwargs.get("on"), item.get_closest_marker("engine") is not None
            if kind not in KINDS or (kind == "engine") != starts_engine:
                raise pytest.UsageError(
                    f"{item.nodeid}: on={kind!r} must be one of {', '.join(KINDS)}, and 'engine' exactly for "
                    "tests that start a vLLM engine (pytest.mark.engine)"
                )


def pytest_runtest_setup(item: pytest.Item) -> None:
    zygote.cold = zygote.COLD or item.get_closest_marker("cold") is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and item.get_closest_marker("scenario") and os.environ.get("CI"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} proves a scenario and was skipped in CI"
    return report
