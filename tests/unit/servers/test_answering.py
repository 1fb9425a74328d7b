"""The images in memory are limited by their pixels, however many requests come at once, and a request fails alone.
The engine is a fake."""

import asyncio
import base64
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from PIL import Image
from transformers import AutoProcessor

from coordexp.answers.table import VocabularyTable
from coordexp.config.rollout import RepeatTerminate
from coordexp.servers import answering as answering_module
from coordexp.servers.answering import PIXELS_AT_ONCE, AllowedImages, Answering, PixelBudget, RequestImage
from coordexp.servers.protocol import InferItem, RequestConfig
from tests import zygote
from tests.source import SOURCE

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples/scenes-cpu/model"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_four_bombs_in_one_call_take_the_memory_of_one_image():
    """Each is a file of 16 KB and 2^27 pixels. With all four in memory at once it would be 5 GB and more.
    None is decoded in the thread of the event loop, which answers other requests meanwhile."""
    command = [sys.executable, "-m", "tests.unit.servers.bombs_worker", str(MODEL)]
    run = subprocess.run(command, env=_environment(), cwd=ROOT, capture_output=True, text=True, check=True)
    report = json.loads(run.stdout.splitlines()[-1])
    print(f"peak memory {report['peak']} MiB, before {report['before']} MiB")
    assert all("patches" in message for message in report["messages"])  # all of them were decoded
    assert report["peak"] - report["before"] < 16 * PIXELS_AT_ONCE / 2**20
    assert report["decoded"] == 4 and not report["on_event_loop"]


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{SOURCE}:{ROOT}"}


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work(), 20))


def test_pixels_in_flight_stay_within_the_budget_for_many_calls_of_4096_requests():
    async def work() -> None:
        budget, held, most, done = PixelBudget(1000), 0, 0, 0
        sizes = random.Random(5)

        async def hold(pixels: int) -> None:
            nonlocal held, most, done
            share = await budget.acquire(pixels)
            held += pixels
            most = max(most, held)
            await asyncio.sleep(0)
            held -= pixels
            done += 1
            budget.release(share)

        calls = [[hold(sizes.choice((1, 10, 300, 999, 1000))) for _ in range(4096)] for _ in range(4)]
        await asyncio.gather(*(asyncio.gather(*call) for call in calls))
        assert done == 4 * 4096 and 900 < most <= 1000 and budget.free == 1000

    run(work)


def test_pixels_are_given_out_in_the_order_of_arrival_and_no_image_overtakes_a_large_one():
    async def work() -> None:
        budget, order = PixelBudget(100), []

        async def hold(name: str, pixels: int) -> None:
            share = await budget.acquire(pixels)
            order.append(name)
            await asyncio.sleep(0.01)
            budget.release(share)

        await asyncio.gather(
            hold("a", 60), hold("large", 100), hold("b", 10), hold("larger than all", 10**9), hold("c", 1)
        )
        assert order == ["a", "large", "b", "larger than all", "c"] and budget.free == 100

    run(work)


@pytest.mark.parametrize("is_admitted_at_the_same_time", [False, True])
def test_a_request_that_is_cancelled_while_it_waits_holds_no_pixels(is_admitted_at_the_same_time):
    async def work() -> None:
        budget = PixelBudget(100)
        share = await budget.acquire(100)
        waiting = [asyncio.ensure_future(budget.acquire(100)) for _ in range(2)]
        await asyncio.sleep(0)
        if is_admitted_at_the_same_time:
            budget.release(share)
        waiting[0].cancel()
        if not is_admitted_at_the_same_time:
            budget.release(share)
        assert await waiting[1] == 100 and budget.free == 0
        budget.release(100)
        assert budget.free == 100 and waiting[0].cancelled()

    run(work)


class FakeEngine:
    """Answers with one token. Waits in `render` while `gate` is closed."""

    defaults: ClassVar[dict[str, Any]] = {}
    has_ended = False

    def __init__(self, max_model_len: int = 256, logprob: float = -0.5) -> None:
        self.max_model_len, self.logprob = max_model_len, logprob
        self.gate, self.rendered = asyncio.Event(), 0
        self.gate.set()

    async def render(self, prompt: dict[str, Any]) -> Any:
        self.rendered += 1
        await self.gate.wait()
        return {"type": "multimodal" if "multi_modal_data" in prompt else "text"}

    async def answer(self, prompt: Any, sampling: dict[str, Any], id: str) -> Any:
        assert prompt in ({"type": "multimodal"}, {"type": "text"})
        logprobs = [{7: SimpleNamespace(logprob=self.logprob)}]
        answer = SimpleNamespace(
            token_ids=[7], text="x", finish_reason="stop", weight_versions=None, logprobs=logprobs
        )
        return SimpleNamespace(outputs=[answer], prompt_token_ids=[1], request_id=id)


def answering(engine: FakeEngine, folder: Path, most_at_once: int = 4) -> Answering:
    processor, table = AutoProcessor.from_pretrained(MODEL), VocabularyTable.from_folder(MODEL)
    return Answering(engine, processor, table, RepeatTerminate(), AllowedImages((folder.resolve(),)), most_at_once)


def request_for(folder: Path, size: tuple[int, int], **more: Any) -> dict[str, Any]:
    file = folder / f"{size[0]}-{size[1]}.png"
    Image.new("RGB", size).save(file)
    return {"messages": [{"role": "user", "content": "<image>What?"}], "images": [str(file)], **more}


def item_of(engine: FakeEngine, folder: Path, request: Any, **config: Any) -> dict[str, Any]:
    async def work() -> dict[str, Any]:
        return (await answering(engine, folder).answer(request, RequestConfig(**config), "1"))[0]

    return run(work)


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        ((1, 5000), "1 x 5000: the longer side is more than 200 times the shorter one"),
        ((1024, 1024), "1024 x 1024 are 4096 tokens, but prompt and answer together may have 256"),
    ],
)
def test_an_image_that_cannot_be_used_is_refused_from_its_header(tmp_path, monkeypatch, size, problem):
    monkeypatch.setattr(
        "coordexp.servers.answering.RequestImage.decode", lambda self: pytest.fail("it was decoded")
    )
    engine = FakeEngine()
    error = item_of(engine, tmp_path, request_for(tmp_path, size))["error"]
    assert error["code"] == "bad_request" and problem in error["message"] and error["fix"]
    assert engine.rendered == 0


def test_the_pixels_of_a_client_that_disconnects_count_until_they_are_freed(tmp_path):
    async def work() -> None:
        engine = FakeEngine()
        engine.gate.clear()
        server = answering(engine, tmp_path)
        call = asyncio.ensure_future(server.answer(request_for(tmp_path, (64, 64)), RequestConfig(), "1"))
        while not engine.rendered:
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled() and server._pixels.free == PIXELS_AT_ONCE - 64 * 64
        engine.gate.set()
        while server._pixels.free != PIXELS_AT_ONCE:
            await asyncio.sleep(0.01)

    run(work)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("hanging", ["open", "decode"])
def test_images_on_storage_that_hangs_fail_by_name_and_hold_up_nothing_else(tmp_path, monkeypatch, hanging):
    """Storage that hangs is a fake here. Nothing can interrupt a thread that waits for it."""
    mends = threading.Event()

    def wait_in(kind: type, method: str) -> None:
        original = getattr(kind, method)

        def wait(self: Any, *arguments: Any) -> Any:
            if "-9." in str((vars(self), arguments)):
                mends.wait(100)
            return original(self, *arguments)

        monkeypatch.setattr(kind, method, wait)

    wait_in(*((AllowedImages, "open") if hanging == "open" else (RequestImage, "decode")))
    monkeypatch.setattr(answering_module, "READ", 2.0)
    monkeypatch.setattr(answering_module, "READERS", 8)

    async def work() -> None:
        server = answering(FakeEngine(), tmp_path, most_at_once=1)

        def ask(request: dict[str, Any]) -> Any:
            return asyncio.ensure_future(server.answer(request, RequestConfig(), "1"))

        good = request_for(tmp_path, (64, 64))
        inline = good | {"images": [base64.b64encode(Path(good["images"][0]).read_bytes()).decode()]}
        text = {"messages": [{"role": "user", "content": "What?"}]}
        requests = [request_for(tmp_path, (width, 9)) for width in range(10, 10 + 20)]
        late = [ask(request) for request in requests]
        while threading.active_count() < 9:
            await asyncio.sleep(0.01)
        for request in (inline, text, inline, text):
            assert isinstance((await ask(request))[0], InferItem)
        await asyncio.to_thread(time.monotonic)  # as other routes do
        assert not any(answer.done() for answer in late)
        for width, answer in enumerate(late, 10):
            error = (await answer)[0]["error"]
            assert error["code"] == "engine" and f"{width}-9.png: not read" in error["message"]
        since = time.monotonic()
        refused = (await ask(good))[0]["error"]  # at once: all threads are late
        assert refused["code"] == "engine" and f"{len(server._late)} images wait" in refused["message"]
        assert 8 <= len(server._late) < 2 * 8
        assert time.monotonic() - since < 2 and server._pixels.free == PIXELS_AT_ONCE
        assert isinstance((await ask(inline))[0], InferItem)
        mends.set()
        while not isinstance((await ask(good))[0], InferItem):
            await asyncio.sleep(0.01)

    try:
        asyncio.run(asyncio.wait_for(work(), 90))
    finally:
        mends.set()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_process_ends_while_an_image_of_it_waits_for_storage(tmp_path):
    code = f"""if True:
        import asyncio, pathlib, threading
        from coordexp.servers import answering
        from tests.unit.servers import test_answering as tests
        answering.READ = 0.2
        answering.AllowedImages.open = lambda *_: threading.Event().wait()
        folder = pathlib.Path({str(tmp_path)!r})
        print(tests.item_of(tests.FakeEngine(), folder, tests.request_for(folder, (64, 64)))["error"]["code"])
    """
    run = zygote.run(["-c", code], env=_environment(), cwd=ROOT, timeout=100)
    assert run.returncode == 0 and run.stdout == "engine\n", run.stderr


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_a_log_probability_that_is_not_finite_is_an_error(tmp_path, logprob):
    item = item_of(FakeEngine(logprob=logprob), tmp_path, request_for(tmp_path, (64, 64)), logprobs=True)
    assert item["error"]["code"] == "engine" and "not finite" in item["error"]["message"]
    assert isinstance(item_of(FakeEngine(), tmp_path, request_for(tmp_path, (64, 64)), logprobs=True), InferItem)


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        ({"messages": [{"role": "user", "content": "caf\ud83d"}]}, "half a character"),
        ({"messages": [{"role": "\ud83d", "content": "x"}]}, "half a character"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}]}, "half a character"),
        ({"messages": [{"role": "user", "content": "x"}], "labels": [1]}, "labels: not served here; leave it out"),
        (
            {"messages": [{"role": "user", "content": "x"}], "data_dict": {"coordexp": {"speed": 1}}},
            "speed: not served here",
        ),
    ],
)
def test_a_request_for_something_that_is_not_served_is_refused_with_the_reason(tmp_path, request_, problem):
    error = item_of(FakeEngine(), tmp_path, request_)["error"]
    assert error["code"] == "bad_request" and problem in error["message"]
