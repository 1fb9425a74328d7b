"""Answers requests: reads them and their images, and returns answers in the form of the protocol. A request that
cannot be answered fails alone."""

import asyncio
import base64
import io
import logging
import math
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import ValidationError

from coordexp.answers.table import VocabularyTable
from coordexp.config.rollout import RepeatTerminate
from coordexp.data.addresses import find_url_problem, is_url
from coordexp.data.images import MOST_PIXELS, open_image_file, read_image_bytes, size_problem, upright_size
from coordexp.data.stores import RefusedAddress
from coordexp.errors import DataError, StoreError, explain
from coordexp.files import is_encodable
from coordexp.rollout.guard import cut_at_end, guard_arguments, key_pattern_for
from coordexp.rollout.prompt import UNUSABLE, chat_text, image_tokens, read_image
from coordexp.servers.engine import ServedEngine
from coordexp.servers.protocol import (
    ENGINE_FAULT,
    HALF,
    IMAGE,
    Choice,
    Completion,
    InferItem,
    InferRequest,
    Logprobs,
    Refusal,
    RequestConfig,
    RolloutInfos,
    TokenLogprob,
    bad_request,
)
from coordexp.tasks import Task

# The most pixels of all images, of all calls, that are being decoded or cut into patches. Each pixel of an image
# that is scaled down takes 10 to 16 bytes in the process: in the file's own mode, as RGB, in the array and in the
# tensor. Patches stay until the answer is complete; the context length and `most_at_once` limit their number.
PIXELS_AT_ONCE = MOST_PIXELS
READERS = 32  # image files that are read at once, and those that may be late: storage can hang for any time
READ = 60.0  # seconds for the header of an image, and again for its pixels
BLOCK = 2**26  # bytes that Pillow allocates at once; the allocator would keep smaller blocks after they are freed
MOST_QUOTED = 200  # characters of a path in an error message
Item = InferItem | dict[str, Any]  # an answer, or the JSON of a refusal
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AllowedImages:
    """The images that a request may name: files below these folders, URLs below the prefixes that are allowed in
    this process (`coordexp.data.stores`), and images in the request itself."""

    folders: tuple[Path, ...]

    def open(self, source: str, size: tuple[int, int] | None = None) -> "RequestImage":
        """Read the header of an image, without decoding it. Raise a Refusal if the image cannot be used. `size` is
        the size in its record, if the request has it."""
        content, name = self._locate(source)
        file = content if isinstance(content, Path) else io.BytesIO(content)
        with (
            explain(OSError, f"{name}: not a readable image", "run `coordexp data doctor`", to=bad_request),
            open_image_file(file) as image,
        ):
            width, height, _ = upright_size(image)
        if limit := size_problem(width, height):
            raise bad_request(f"{name}: {limit}", UNUSABLE)
        if size is not None and (width, height) != size:
            raise bad_request(
                f"the image is {width} x {height}, but its record says {size[0]} x {size[1]}",
                "correct the record; `coordexp data doctor` finds all such records",
            )
        return RequestImage(content, name, width, height)

    def _locate(self, source: str) -> tuple[Path | bytes, str]:
        """Return the path or the bytes of an image, and a name for messages."""
        if not _is_path(source):
            content = source.partition(",")[2] if source.startswith("data:") else source
            with explain(
                ValueError, f"{source[:40]}: neither a path nor base64", "send one of them", to=bad_request
            ):
                return base64.b64decode(content, validate=True), "the base64 image"
        if is_url(source):
            if problem := find_url_problem(source):
                raise bad_request(f"image: {problem}", "send another URL, a path, or base64")
            name = source[:MOST_QUOTED]
            try:
                with explain(OSError, f"{name}: not a readable image", "check the URL", to=bad_request):
                    return read_image_bytes(source), name
            except RefusedAddress as error:
                raise bad_request(error.problem[: 2 * MOST_QUOTED], error.fix) from error
        kinds = (OSError, ValueError, RuntimeError)
        with explain(kinds, f"{source[:80]!r}: not a path", "send a path, or base64", to=bad_request):
            path = Path(source).resolve()
        if not any(path.is_relative_to(folder) for folder in self.folders):
            allowed = ", ".join(map(str, self.folders)) or "no folder"
            raise bad_request(
                f"{source[:MOST_QUOTED]}: this server only reads images below {allowed}",
                "start it with --images FOLDER (can be repeated), or send base64",
            )
        return path, source[:MOST_QUOTED]


@dataclass(frozen=True)
class RequestImage:
    """An image of which only the header was read. The size is that of the upright image."""

    content: Path | bytes
    name: str
    width: int
    height: int

    def decode(self) -> Image.Image:
        """Return the upright image. Raise DataError or a Refusal if it cannot be decoded or has another size than
        its header says."""
        image = read_image(self.content if isinstance(self.content, Path) else io.BytesIO(self.content), self.name)
        if image.size != (self.width, self.height):
            raise bad_request(
                f"{self.name}: {image.width} x {image.height}, but its header says {self.width} x {self.height}",
                "save the image again; if it was replaced meanwhile, do not replace images during a run",
            )
        return image


def _is_path(source: str) -> bool:
    """Return True if the source is a path or a URL, not base64. Base64 has no dot, and a JPEG in base64 begins
    with `/9j/`."""
    may_be = "." in source or "://" in source or (source.startswith("/") and not source.startswith("/9j/"))
    return may_be and not source.startswith("data:")


def split_request(request: InferRequest) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the conversation in the form that chat templates need, and the sources of its images."""
    for name in ("audios", "videos", "tools", "objects", "chat_template_kwargs", "add_eos"):
        if getattr(request, name):
            raise bad_request(f"{name}: not served here", "send text and one image")
    conversation: list[dict[str, Any]] = []
    inline: list[str] = []
    for message in request.messages:
        content = _split_text(message.content) if isinstance(message.content, str) else list(message.content)
        inline += [str(part["image"]) for part in content if part.get("type") == "image" and part.get("image")]
        for part in content:
            kind, text = part.get("type"), part.get("text")
            if kind != "image" and not (kind == "text" and isinstance(text, str)):
                raise bad_request("messages: a content part is neither text nor image", "send text and one image")
            if kind == "text" and not is_encodable(str(text)):
                raise bad_request(f"messages: {HALF}", "send UTF-8")
        plain = [part if part["type"] == "text" else {"type": "image"} for part in content]
        conversation.append({"role": message.role, "content": plain})
    sources = inline or request.images
    named = sum(part["type"] == "image" for message in conversation for part in message["content"])
    if named != len(sources) or named > 1:
        raise bad_request(
            f"the messages name {named} images, and {len(sources)} came along; at most one is served",
            f"write {IMAGE} where the image belongs, and send the image in images",
        )
    return conversation, sources


def _split_text(text: str) -> list[dict[str, Any]]:
    """Return the text as content parts, with an image part for each tag."""
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(IMAGE)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def sampling_fields(config: RequestConfig, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that decide which token is drawn: those of the call, else those of the model."""
    names: Sequence[str] = ("temperature", "top_k", "top_p", "repetition_penalty")
    requested = {name: value for name in names if (value := getattr(config, name)) is not None}
    return {name: value for name, value in defaults.items() if name in names} | requested


class PixelBudget:
    """A number of pixels, given out in the order of arrival. A larger image waits until all of them are free."""

    def __init__(self, pixels: int) -> None:
        self.pixels = self.free = pixels
        self._turn, self._released = asyncio.Lock(), asyncio.Event()

    async def acquire(self, pixels: int) -> int:
        """Wait for free pixels, and return how many must be released."""
        share = min(pixels, self.pixels)
        async with self._turn:
            while self.free < share:
                self._released.clear()
                await self._released.wait()
            self.free -= share
        return share

    def release(self, share: int) -> None:
        self.free += share
        self._released.set()


class Answering:
    """Makes an answer for each request. `guard` is the repeat guard that the server was started with; it applies
    unless a request turns it off."""

    def __init__(
        self,
        engine: ServedEngine,
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
        self._slots = asyncio.Semaphore(2 * most_at_once)  # further images are not cut into patches yet
        self._pixels = PixelBudget(PIXELS_AT_ONCE)
        self._readers = asyncio.Semaphore(READERS)
        self._late: list[Task[Any]] = []  # threads that still wait for an image whose request has failed
        Image.core.set_block_size(BLOCK)  # type: ignore[attr-defined]

    async def answer(self, body: Any, config: RequestConfig, version: str) -> tuple[Item, int]:
        """Return the item that answers this request, which may be an error, and the number of generated tokens."""
        try:
            request = InferRequest.model_validate(body)
            fields = request.learner_fields
            guard = self.guard if fields.guard else self.unguarded
            seed = fields.seed if fields.seed is not None else config.seed
            async with AsyncExitStack() as slot:
                prompt = await self._render(request, slot)
                output = await self.engine.answer(prompt, self._sampling(config, guard, seed), uuid.uuid4().hex)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors()[:3])
            return bad_request("; ".join(problems), "see the contract in docs/operations.md").to_json(), 0
        except DataError as error:
            return bad_request(error.problem, error.fix).to_json(), 0
        except StoreError as error:
            return _engine_fault(error.problem, error.fix), 0
        except Refusal as refusal:
            return refusal.to_json(), 0
        except Exception as error:  # the other requests of the call must not fail with this one
            if self.engine.has_ended:
                raise
            log.exception("a request failed")
            return _engine_fault(f"{type(error).__name__}: {error}", "see this server's output"), 0
        tokens = sum(len(answer.token_ids) for answer in output.outputs)
        return self._item(output, config, guard, version), tokens

    async def _render(self, request: InferRequest, slot: AsyncExitStack) -> Any:
        """Return the prompt in the engine's form, and take a slot. Its image is decoded when there are free pixels
        for it, and is freed once it has been cut into patches. No slot is held while storage is waited for."""
        conversation, sources = await asyncio.to_thread(split_request, request)
        text = await asyncio.to_thread(chat_text, self.processor, conversation)
        if not sources:
            await slot.enter_async_context(self._slots)
            return await self.engine.render({"prompt": text})
        image = await self._open(sources[0], request.learner_fields.size)
        share = await self._pixels.acquire(image.width * image.height)
        work = asyncio.ensure_future(self._read(sources[0], image.decode))
        try:
            pixels = {"image": await asyncio.shield(work)}
            await slot.enter_async_context(self._slots)
            work = asyncio.ensure_future(self.engine.render({"prompt": text, "multi_modal_data": pixels}))
            return await asyncio.shield(work)
        finally:
            # If the request is cancelled, its pixels count until the thread has ended, or is late.
            work.add_done_callback(lambda _: self._pixels.release(share))

    async def _open(self, source: str, size: tuple[int, int] | None) -> RequestImage:
        image: RequestImage = await asyncio.shield(self._read(source, lambda: self.images.open(source, size)))
        tokens = image_tokens(self.processor, image.width, image.height, image.name)
        if tokens >= self.engine.max_model_len:
            raise bad_request(
                f"{image.name}: {image.width} x {image.height} are {tokens} tokens, but prompt and answer "
                f"together may have {self.engine.max_model_len}",
                "send a smaller image, or start the server with a longer global_max_length",
            )
        return image

    async def _read(self, source: str, work: Callable[[], Any]) -> Any:
        """Return the result of work that reads an image. Raise a Refusal if its storage hangs, which cannot be
        interrupted. Shield this call, so that its thread counts until it has ended, or is late."""
        if not _is_path(source):
            return await asyncio.to_thread(work)
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def run() -> Any:
            try:
                return work()
            finally:
                loop.call_soon_threadsafe(ended.set_result, None)

        async with self._readers:
            self._late = [reader for reader in self._late if not reader.done.is_set()]
            if len(self._late) < READERS:
                reader = Task(run)
                if (await asyncio.wait({ended}, timeout=READ))[0]:
                    return reader.result()
                self._late.append(reader)
        problem = f"{source[:MOST_QUOTED]}: not read, because {len(self._late)} images wait for storage that hangs"
        raise Refusal(500, ENGINE_FAULT, problem, "check the storage that the image is on")

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

    def _item(self, output: Any, config: RequestConfig, guard: RepeatTerminate, version: str) -> Item:
        choices, ended_by_guard, completion = [], [], 0
        for index, answer in enumerate(output.outputs):
            versions = {span.version for span in answer.weight_versions or ()} or {version}
            if answer.finish_reason not in ("stop", "length") or versions != {version}:
                reason = f"{answer.finish_reason}, weights {', '.join(sorted(versions))}"
                return _engine_fault(f"vLLM ended an answer by itself ({reason})", "ask again")
            ids, logprobs = list(answer.token_ids), None
            if config.logprobs:
                steps = zip(answer.logprobs, ids, strict=True)
                content: list[TokenLogprob] = [{"token": "", "logprob": step[id].logprob} for step, id in steps]
                logprobs = Logprobs(content=content)
                if not all(math.isfinite(token["logprob"]) for token in content):
                    fix = "the weights of this server may contain NaN: sync it again"
                    return _engine_fault("a log-probability of the answer is not finite", fix)
            choice = Choice(
                index=index,
                message={"role": "assistant", "content": answer.text},
                finish_reason=answer.finish_reason,
                token_ids=ids if config.return_details else None,
                logprobs=logprobs,
            )
            choices.append(choice)
            ended_by_guard.append(cut_at_end(ids, self.table.end_of_turn, guard, self.pattern)[1] == "repeat")
            completion += len(ids)
        prompt = list(output.prompt_token_ids)
        response = Completion(
            id=output.request_id,
            created=int(time.time()),
            choices=choices,
            usage={
                "prompt_tokens": len(prompt),
                "completion_tokens": completion,
                "total_tokens": len(prompt) + completion,
            },
            prompt_token_ids=prompt if config.return_details else None,
        )
        infos = RolloutInfos(weight_version=version, ended_by_guard=ended_by_guard)
        return InferItem(response=response, rollout_infos=infos)


def _engine_fault(problem: str, fix: str) -> dict[str, Any]:
    return Refusal(500, ENGINE_FAULT, problem, fix).to_json()
