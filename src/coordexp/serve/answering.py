"""From a request to an answer, in the form of ms-swift's contract. One that cannot be answered fails alone."""

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
from coordexp.rollout.guard import ended, guard_arguments, key_pattern
from coordexp.rollout.prompt import image_tokens
from coordexp.serve.refusal import Refusal, bad_request
from coordexp.serve.requests import FoundPicture, InferRequest, Pictures, RequestConfig, parts, sampling_fields
from coordexp.vocab import VocabularyTable

# All pictures that are being decoded or made into patches, of all calls, have at most this many pixels together. A
# pixel of a picture that is scaled down takes 10 to 16 bytes on its way: the file's own mode, RGB, the array and
# the tensor. Patches stay until the answer is there; their number is bounded by the context and by `most_at_once`.
PIXELS_AT_ONCE = MOST_PIXELS
BLOCK = 2**26  # bytes that Pillow asks for at once; smaller ones would stay with the thread that has freed them
log = logging.getLogger(__name__)


class RefusedByEngine(Exception):
    """What vLLM says of a request that it cannot take."""


class Answers(Protocol):
    max_model_len: int
    defaults: dict[str, Any]

    @property
    def has_ended(self) -> bool: ...

    async def render(self, prompt: dict[str, Any]) -> Any: ...

    async def answer(self, prompt: Any, sampling: dict[str, Any], id: str) -> Any: ...


class PixelBudget:
    """Room for so many pixels, given out in the order of arrival. An image that is larger waits for all of it."""

    def __init__(self, pixels: int) -> None:
        self.pixels = self.free = pixels
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, pixels: int) -> int:
        """Wait for room, and return how much of it has to be released."""
        share = min(pixels, self.pixels)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((share, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was let in at the same time
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
    """`guard` is the server's own, which it was started with (R33): a learner does not have to ask for it."""

    def __init__(
        self,
        engine: Answers,
        processor: Any,
        table: VocabularyTable,
        guard: RepeatTerminate,
        pictures: Pictures,
        most_at_once: int,
    ) -> None:
        self.engine, self.processor, self.table = engine, processor, table
        self.guard, self.pictures = guard, pictures
        self.pattern = key_pattern(table) if guard.enabled and guard.max_object_keys is not None else ()
        self.unguarded = RepeatTerminate()
        self._room = asyncio.Semaphore(2 * most_at_once)  # others are not looked at yet
        self._pixels = PixelBudget(PIXELS_AT_ONCE)
        Image.core.set_block_size(BLOCK)  # type: ignore[attr-defined]

    async def one(self, given: Any, config: RequestConfig, version: str) -> tuple[dict[str, Any], int]:
        """The item that stands for this request, and how many tokens were written for it."""
        async with self._room:
            return await self._one(given, config, version)

    async def _one(self, given: Any, config: RequestConfig, version: str) -> tuple[dict[str, Any], int]:
        try:
            request = InferRequest.model_validate(given)
            own = request.own
            prompt = await self._prompt(request)
            guard = self.guard if own.guard else self.unguarded
            seed = own.seed if own.seed is not None else config.seed
            output = await self.engine.answer(prompt, self._sampling(config, guard, seed), uuid.uuid4().hex)
        except ValidationError as error:
            told = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:3])
            return bad_request(told, "see the contract in docs/operations.md").told(), 0
        except Refusal as refusal:
            return refusal.told(), 0
        except RefusedByEngine as error:
            return bad_request(str(error)).told(), 0
        except Exception as error:  # whatever it is, it is this request's alone
            if self.engine.has_ended:
                raise
            log.exception("a request failed")
            return Refusal(500, "engine", f"{type(error).__name__}: {error}", "see this server's output").told(), 0
        written = sum(len(answer.token_ids) for answer in output.outputs)
        return self._item(output, config, guard, version), written

    async def _prompt(self, request: InferRequest) -> Any:
        """Return the prompt as the engine takes it. Its picture is decoded when there is room for it, and let go
        when it has been made into patches."""
        text, picture = await asyncio.to_thread(self._text, request)
        if picture is None:
            return await self.engine.render({"prompt": text})
        share = await self._pixels.acquire(picture.pixels)
        work = asyncio.ensure_future(self._with_picture(text, picture))
        work.add_done_callback(lambda _: self._pixels.release(share))
        return await asyncio.shield(work)  # a thread cannot be interrupted, and what it holds stays counted

    def _text(self, request: InferRequest) -> tuple[str, FoundPicture | None]:
        conversation, sources = parts(request)
        text = self.processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        if not sources:
            return text, None
        picture = self.pictures.look(sources[0], request.own.size)
        tokens = image_tokens(self.processor, picture.width, picture.height, picture.name)
        if tokens >= self.engine.max_model_len:
            told = f"{picture.name}: {picture.width} x {picture.height} are {tokens} tokens"
            raise bad_request(
                f"{told}, and prompt and answer together may have {self.engine.max_model_len}",
                "send a smaller picture, or start the server with a longer global_max_length",
            )
        return text, picture

    async def _with_picture(self, text: str, picture: FoundPicture) -> Any:
        image = await asyncio.to_thread(picture.decode)
        return await self.engine.render({"prompt": text, "multi_modal_data": {"image": image}})

    def _sampling(self, config: RequestConfig, guard: RepeatTerminate, seed: int | None) -> dict[str, Any]:
        if config.stream:
            raise bad_request("stream: answers come whole", "set stream: false")
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
            made = {span.version for span in answer.weight_versions or ()} or {version}
            if answer.finish_reason not in ("stop", "length") or made != {version}:
                told = (
                    f"vLLM ended an answer by itself ({answer.finish_reason}, weights {', '.join(sorted(made))})"
                )
                return Refusal(500, "engine", told, "ask again").told()
            if config.logprobs and not all(map(math.isfinite, _logprobs(answer))):
                told = "a log-probability of the answer is not finite"
                return Refusal(500, "engine", told, "the weights of this server may hold NaN; sync it anew").told()
        choices = [self._choice(k, answer, config) for k, answer in enumerate(output.outputs)]
        reasons = [self._ended(answer.token_ids, guard) for answer in output.outputs]
        written = sum(len(answer.token_ids) for answer in output.outputs)
        read = len(output.prompt_token_ids)
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
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

    def _ended(self, ids: Sequence[int], guard: RepeatTerminate) -> str:
        return ended(ids, self.table.end_of_turn, guard, self.pattern)[1]

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
