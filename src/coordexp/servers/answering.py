"""Answers requests in the form of ms-swift's contract. A request that cannot be answered fails alone."""

import asyncio
import logging
import math
import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from PIL import Image
from pydantic import ValidationError

from coordexp.config.rollout import RepeatTerminate
from coordexp.data.images import MOST_PIXELS
from coordexp.errors import DataError
from coordexp.rollout.guard import cut_at_end, guard_arguments, key_pattern_for
from coordexp.rollout.prompt import image_tokens
from coordexp.servers.refusal import Refusal, bad_request
from coordexp.servers.requests import (
    AllowedImages,
    InferRequest,
    RequestConfig,
    RequestImage,
    sampling_fields,
    split_request,
)
from coordexp.vocab import VocabularyTable

# The most pixels of all images, of all calls, that are being decoded or cut into patches. Each pixel of an image
# that is scaled down takes 10 to 16 bytes in the process: in the file's own mode, as RGB, in the array and in the
# tensor. Patches stay until the answer is complete; the context length and `most_at_once` limit their number.
PIXELS_AT_ONCE = MOST_PIXELS
BLOCK = 2**26  # bytes that Pillow allocates at once; the allocator would keep smaller blocks after they are freed
log = logging.getLogger(__name__)


class AnsweringEngine(Protocol):
    """The part of the engine that answers requests."""

    max_model_len: int
    defaults: dict[str, Any]

    @property
    def has_ended(self) -> bool: ...

    async def render(self, prompt: dict[str, Any]) -> Any: ...

    async def answer(self, prompt: Any, sampling: dict[str, Any], id: str) -> Any: ...


class PixelBudget:
    """A number of pixels, given out in the order of arrival. A larger image waits until all of them are free."""

    def __init__(self, pixels: int) -> None:
        self.pixels = self.free = pixels
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, pixels: int) -> int:
        """Wait for free pixels, and return how many must be released."""
        share = min(pixels, self.pixels)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((share, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was admitted at the same time
                self.free += share
            self._admit()
            raise
        return share

    def release(self, share: int) -> None:
        self.free += share
        self._admit()

    def _admit(self) -> None:
        while self._waiting and (self._waiting[0][1].cancelled() or self._waiting[0][0] <= self.free):
            share, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.free -= share
                turn.set_result(None)


class Answering:
    """Makes an answer for each request. `guard` is the repeat guard that the server was started with; it applies
    unless a request turns it off."""

    def __init__(
        self,
        engine: AnsweringEngine,
        processor: Any,
        table: VocabularyTable,
        guard: RepeatTerminate,
        images: AllowedImages,
        most_at_once: int,
    ) -> None:
        self.engine, self.processor, self.table = engine, processor, table
        self.guard, self.images = guard, images
        self.pattern = key_pattern_for(guard, table)
        self.unguarded = RepeatTerminate()
        self._slots = asyncio.Semaphore(2 * most_at_once)  # further requests are not read yet
        self._pixels = PixelBudget(PIXELS_AT_ONCE)
        Image.core.set_block_size(BLOCK)  # type: ignore[attr-defined]

    async def answer(self, body: Any, config: RequestConfig, version: str) -> tuple[dict[str, Any], int]:
        """Return the item that answers this request, which may be an error, and the number of generated tokens."""
        async with self._slots:
            return await self._answer(body, config, version)

    async def _answer(self, body: Any, config: RequestConfig, version: str) -> tuple[dict[str, Any], int]:
        try:
            request = InferRequest.model_validate(body)
            fields = request.learner_fields
            prompt = await self._render(request)
            guard = self.guard if fields.guard else self.unguarded
            seed = fields.seed if fields.seed is not None else config.seed
            output = await self.engine.answer(prompt, self._sampling(config, guard, seed), uuid.uuid4().hex)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors()[:3])
            return bad_request("; ".join(problems), "see the contract in docs/operations.md").to_json(), 0
        except DataError as error:
            return bad_request(error.problem, error.fix).to_json(), 0
        except Refusal as refusal:
            return refusal.to_json(), 0
        except Exception as error:  # the other requests of the call must not fail with this one
            if self.engine.has_ended:
                raise
            log.exception("a request failed")
            return _engine_fault(f"{type(error).__name__}: {error}", "see this server's output"), 0
        tokens = sum(len(answer.token_ids) for answer in output.outputs)
        return self._item(output, config, guard, version), tokens

    async def _render(self, request: InferRequest) -> Any:
        """Return the prompt in the engine's form. Its image is decoded when there are free pixels for it, and is
        freed once it has been cut into patches."""
        text, image = await asyncio.to_thread(self._read, request)
        if image is None:
            return await self.engine.render({"prompt": text})
        share = await self._pixels.acquire(image.pixels)
        work = asyncio.ensure_future(self._render_image(text, image))
        work.add_done_callback(lambda _: self._pixels.release(share))
        # A thread cannot be interrupted. If the request is cancelled, its pixels count until the thread has ended.
        return await asyncio.shield(work)

    def _read(self, request: InferRequest) -> tuple[str, RequestImage | None]:
        """Return the text of the prompt, and its image. Raise a Refusal if the image cannot be used."""
        conversation, sources = split_request(request)
        text = self.processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        if not sources:
            return text, None
        image = self.images.open(sources[0], request.learner_fields.size)
        tokens = image_tokens(self.processor, image.width, image.height, image.name)
        if tokens >= self.engine.max_model_len:
            raise bad_request(
                f"{image.name}: {image.width} x {image.height} are {tokens} tokens, but prompt and answer "
                f"together may have {self.engine.max_model_len}",
                "send a smaller image, or start the server with a longer global_max_length",
            )
        return text, image

    async def _render_image(self, text: str, image: RequestImage) -> Any:
        pixels = await asyncio.to_thread(image.decode)
        return await self.engine.render({"prompt": text, "multi_modal_data": {"image": pixels}})

    def _sampling(self, config: RequestConfig, guard: RepeatTerminate, seed: int | None) -> dict[str, Any]:
        if config.stream:
            raise bad_request("stream: answers are only sent complete", "set stream: false")
        return sampling_fields(config, self.engine.defaults) | {
            "max_tokens": config.max_tokens or self.engine.max_model_len,
            "n": config.n,
            "seed": seed,
            "stop": config.stop or None,
            "logprobs": 0 if config.logprobs else None,
            "ignore_eos": True,
            "stop_token_ids": [self.table.end_of_turn],
            "skip_special_tokens": False,
            "extra_args": guard_arguments(guard, self.pattern, self.table.end_of_turn) or None,
        }

    def _item(self, output: Any, config: RequestConfig, guard: RepeatTerminate, version: str) -> dict[str, Any]:
        for answer in output.outputs:
            versions = {span.version for span in answer.weight_versions or ()} or {version}
            if answer.finish_reason not in ("stop", "length") or versions != {version}:
                reason = f"{answer.finish_reason}, weights {', '.join(sorted(versions))}"
                return _engine_fault(f"vLLM ended an answer by itself ({reason})", "ask again")
            if config.logprobs and not all(map(math.isfinite, _logprobs(answer))):
                return _engine_fault(
                    "a log-probability of the answer is not finite",
                    "the weights of this server may contain NaN: sync it again",
                )
        choices = [self._choice(k, answer, config) for k, answer in enumerate(output.outputs)]
        reasons = [self._finish_reason(answer.token_ids, guard) for answer in output.outputs]
        completion = sum(len(answer.token_ids) for answer in output.outputs)
        prompt = len(output.prompt_token_ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        response = {
            "id": output.request_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": "coordexp",
            "choices": choices,
            "usage": usage,
        }
        if config.return_details:
            response["prompt_token_ids"] = list(output.prompt_token_ids)
        infos = {"weight_version": version, "ended_by_guard": [reason == "repeat" for reason in reasons]}
        return {"response": response, "rollout_infos": infos}

    def _finish_reason(self, ids: Sequence[int], guard: RepeatTerminate) -> str:
        return cut_at_end(ids, self.table.end_of_turn, guard, self.pattern)[1]

    def _choice(self, index: int, answer: Any, config: RequestConfig) -> dict[str, Any]:
        ids = list(answer.token_ids)
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": answer.text},
            "finish_reason": answer.finish_reason,
        }
        if config.return_details:
            choice["token_ids"] = ids
        if config.logprobs:
            choice["logprobs"] = {"content": [{"token": "", "logprob": value} for value in _logprobs(answer)]}
        return choice


def _logprobs(answer: Any) -> list[float]:
    return [step[id].logprob for step, id in zip(answer.logprobs, answer.token_ids, strict=True)]


def _engine_fault(problem: str, fix: str) -> dict[str, Any]:
    return Refusal(500, "engine", problem, fix).to_json()
