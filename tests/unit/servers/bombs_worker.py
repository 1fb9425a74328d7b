"""Answers four image bombs with the real image processor and a fake engine, and prints its own peak memory."""

import asyncio
import base64
import json
import sys
import threading
from typing import Any, ClassVar

from transformers import AutoProcessor

from coordexp.answers.table import VocabularyTable
from coordexp.config.rollout import RepeatTerminate
from coordexp.servers.answering import AllowedImages, Answering, RequestImage
from coordexp.servers.protocol import RequestConfig, bad_request
from tests.unit.servers.bombs import memory, png_bomb


class FakeEngine:
    """Makes patches as vLLM does, with the same processor in a thread, and refuses to answer. Its context is so
    long that no image has too many tokens."""

    max_model_len = 10**9
    defaults: ClassVar[dict[str, Any]] = {}
    has_ended = False

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    async def render(self, prompt: dict[str, Any]) -> Any:
        image = prompt["multi_modal_data"]["image"]
        return await asyncio.to_thread(self.processor.image_processor, images=[image], return_tensors="pt")

    async def answer(self, prompt: Any, sampling: dict[str, Any], id: str) -> Any:
        raise bad_request(f"{len(prompt['pixel_values'])} patches")


async def main(model: str) -> None:
    processor = AutoProcessor.from_pretrained(model)
    engine = FakeEngine(processor)
    guard = RepeatTerminate()
    answering = Answering(engine, processor, VocabularyTable.from_folder(model), guard, AllowedImages(()), 64)
    image = base64.b64encode(png_bomb(11585, 11585)).decode()
    request = {"messages": [{"role": "user", "content": "<image>What?"}], "images": [image]}
    before = memory("self", "VmHWM")
    threads: list[bool] = []
    decode = RequestImage.decode

    def watched(image: RequestImage) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return decode(image)

    RequestImage.decode = watched
    answers = await asyncio.gather(*(answering.answer(request, RequestConfig(), "1") for _ in range(4)))
    messages = [item["error"]["message"] for item, _ in answers]
    report = {"before": before, "peak": memory("self", "VmHWM"), "messages": messages}
    print(json.dumps(report | {"decoded": len(threads), "on_event_loop": any(threads)}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
