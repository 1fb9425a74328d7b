"""Answers from a server with OpenAI's chat interface that serves the same checkpoint, such as `vllm serve`.

The server renders the chat template and resizes the image itself. With `return_token_ids` it says which prompt it
read and which tokens it wrote. The prompt is compared with the one of training, token by token, and the tokens are
parsed as those of any other backend. Imports no vLLM.

Without these fields a request would inherit what the checkpoint's `generation_config.json` says, such as a
repetition penalty. So all sampling options are sent.
"""

import base64
import io
import ssl
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

import httpx
from PIL import Image
from pydantic import BaseModel, ValidationError

from coordexp.answers.table import VocabularyTable
from coordexp.config.rollout import check_base_url
from coordexp.data.images import open_image_file, read_image_bytes, upright_size
from coordexp.errors import EngineError, UserError, explain
from coordexp.rollout.backend import ImageRef, Request, Rollout, check_length, check_prompt, common_decode
from coordexp.rollout.guard import cut_at_end
from coordexp.rollout.hugging_face import engine_bias
from coordexp.rollout.prompt import PromptBuilder, load_image, template_options
from coordexp.servers.protocol import read_error
from coordexp.tasks import Task

CONNECT_S = 10.0
ANSWER_S = 600.0  # for a whole answer, including the time in the server's queue
PAUSES = (1.0, 4.0)  # seconds before a call is repeated
BUSY = (429, 502, 503, 504)  # statuses of a server that may answer later
START = "start one with: vllm serve MODEL --port 8000"
T = TypeVar("T", bound=BaseModel)
SHOWN = 300  # characters of an error message of the server


class ServedModel(BaseModel):
    """An entry of `/v1/models`. vLLM adds the length that it was started with."""

    id: str
    max_model_len: int | None = None


class ServedModels(BaseModel):
    data: list[ServedModel]


class TokenLogprob(BaseModel):
    logprob: float


class ChoiceLogprobs(BaseModel):
    content: list[TokenLogprob]


class Choice(BaseModel):
    finish_reason: str
    token_ids: list[int]
    logprobs: ChoiceLogprobs


class ChatAnswer(BaseModel):
    """The fields of a chat completion that an answer is made of. `token_ids` and `prompt_token_ids` are vLLM's."""

    choices: list[Choice]
    prompt_token_ids: list[int]


class ChatServerBackend:
    """Asks a server, with at most `batch` requests at the same time. The constructor asks it for its models.

    The key is sent to this server only: redirects are not followed, and proxies of the environment are not
    used."""

    def __init__(
        self,
        url: str,
        prompts: PromptBuilder,
        table: VocabularyTable,
        *,
        batch: int = 16,
        api_key: str | None = None,
        served_model: str | None = None,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.prompts, self.table, self.batch = prompts, table, batch
        self.url = normalise_url(url)
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(answer_s, connect=CONNECT_S),
            follow_redirects=False,
            trust_env=False,
            verify=ssl.create_default_context(),
            limits=httpx.Limits(max_connections=batch),
        )
        weakref.finalize(self, self._http.close)  # for users who do not close their detector
        self.served = self._choose_model(served_model)

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """Return one rollout per request, in their order. All requests must decode in the same way."""
        if not requests:
            return []
        decode = common_decode(requests)
        if decode.mode == "beam" or decode.guard.enabled:
            raise ValueError("a chat server has neither beam search nor the repeat guard")
        waiting = iter(list(enumerate(requests)))  # which threads may share
        rollouts: dict[int, Rollout] = {}

        def answer_waiting() -> None:
            try:
                for k, request in waiting:
                    rollouts[k] = self._ask(request)
            finally:
                deque(waiting, maxlen=0)  # after an error, the others finish their request, and begin no more

        tasks = [Task(answer_waiting) for _ in range(min(self.batch, len(requests)))]
        for task in tasks:
            task.result()
        return [rollouts[k] for k in range(len(requests))]

    def close(self) -> None:
        self._http.close()

    def _choose_model(self, name: str | None) -> ServedModel:
        models = _read(ServedModels, self._call("GET", "/v1/models"), self.url).data
        names = [model.id for model in models]
        if name is None and len(models) == 1:
            return models[0]
        if name in names:
            return models[names.index(name)]
        problem = f"serves no {name}" if name is not None else f"serves {len(models)} models"
        raise EngineError(
            f"{self.url} {problem}; its models are {', '.join(names) or 'none'}",
            "give the name of one of them as served_model (--served-model)",
        )

    def _ask(self, request: Request) -> Rollout:
        image, limit = request.image, self.served.max_model_len
        prompt_ids = self.prompts.ids(*image.size, image.path, request.question)
        if limit is not None:
            check_length(request, len(prompt_ids), limit)
        body = self._make_body(request, len(prompt_ids))
        answer = _read(ChatAnswer, self._call("POST", "/v1/chat/completions", body, image.path), self.url)
        check_prompt(image.path, answer.prompt_token_ids, prompt_ids)
        if len(answer.choices) != 1:
            raise EngineError(f"{self.url} gave {len(answer.choices)} answers to one question")
        choice = answer.choices[0]
        if choice.finish_reason not in ("stop", "length"):
            raise EngineError(f"{self.url} ended an answer for a reason of its own: {choice.finish_reason}")
        logprobs = [item.logprob for item in choice.logprobs.content]
        if len(logprobs) != len(choice.token_ids):
            raise EngineError(
                f"{self.url} gave {len(logprobs)} log probabilities of {len(choice.token_ids)} tokens"
            )
        ids, reason = cut_at_end(choice.token_ids, self.table.end_of_turn, request.decode.guard, ())
        return Rollout.of(self.table, prompt_ids, ids, logprobs, reason)

    def _make_body(self, request: Request, prompt_length: int) -> dict[str, Any]:
        """Return the body of a chat completion: the image, then the question, and every option of decoding."""
        decode, limit = request.decode, self.served.max_model_len
        tokens = decode.max_new_tokens if limit is None else min(decode.max_new_tokens, limit - prompt_length)
        sampled = decode.mode == "sampling"
        content = [
            {"type": "image_url", "image_url": {"url": to_data_url(request.image)}},
            {"type": "text", "text": request.question or self.prompts.question},
        ]
        bias = {str(id): value for id, value in engine_bias(decode, self.table).items()}
        options = template_options(self.prompts.processor)
        return {
            "model": self.served.id,
            "messages": [{"role": "user", "content": content}],
            "max_completion_tokens": tokens,
            "temperature": decode.temperature if sampled else 0.0,
            "top_p": decode.top_p,
            "top_k": decode.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": request.seed,
            "ignore_eos": True,
            "stop_token_ids": [self.table.end_of_turn],
            "skip_special_tokens": False,
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
            **({"logit_bias": bias} if bias else {}),
            **({"chat_template_kwargs": options} if options else {}),
        }

    def _call(
        self, method: str, route: str, body: dict[str, Any] | None = None, image: str = ""
    ) -> httpx.Response:
        """Return the response to a call. A call that failed because the server is busy, or because the connection
        broke, is repeated: an answer has no side effects."""
        for pause in (*PAUSES, None):
            problem = ""
            try:
                response = self._http.request(method, route, json=body)
            except httpx.TimeoutException as error:
                raise EngineError(
                    f"{self.url} did not answer in time ({type(error).__name__})",
                    "see whether the server is overloaded; a lower batch asks less of it at once",
                ) from error
            except httpx.TransportError as error:
                problem, fix = f"{self.url} cannot be reached: {error}", START
            else:
                if response.is_success:
                    return response
                problem, fix = _explain_status(response, self.url, image)
                if response.status_code not in BUSY:
                    raise EngineError(problem, fix)
            if pause is None:
                raise EngineError(problem, fix)
            time.sleep(pause)
        raise AssertionError("unreachable")


def normalise_url(url: str) -> str:
    """Return the address of a server, without the /v1 with which all routes begin. Raise UserError if it is not
    one."""
    if "@" in url:  # checked first, before a message can quote the password
        raise UserError("the address of the server contains a name or a password", "give the key as api_key")
    with explain(ValueError, f"server {url!r}", "give e.g. http://127.0.0.1:8000", to=UserError):
        return check_base_url(url).removesuffix("/v1")


def to_data_url(image: ImageRef) -> str:
    """Return an image as a data URL. A JPEG file that is upright and in RGB is sent as it is; everything else is
    sent as a PNG, which loses nothing."""
    upright = load_image(image)  # also checks the file: the server's message about it would say less
    if image.pixels is None and _is_plain_jpeg(image.path):
        return _data_url("jpeg", read_image_bytes(image.path))
    buffer = io.BytesIO()
    upright.save(buffer, "PNG", compress_level=1)
    return _data_url("png", buffer.getvalue())


def _is_plain_jpeg(address: str) -> bool:
    with open_image_file(address) as file:
        _, _, is_rotated = upright_size(file)
        is_mirrored = Image.Image.getexif(file).get(0x0112, 1) != 1
        return file.format == "JPEG" and file.mode == "RGB" and not is_rotated and not is_mirrored


def _data_url(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"


def _explain_status(response: httpx.Response, url: str, image: str) -> tuple[str, str]:
    """Return what is wrong with a call that has no answer, and what to do."""
    status = response.status_code
    if status in (401, 403):
        return f"{url} refuses this key ({status})", "give the server's key as api_key (COORDEXP_API_KEY)"
    if response.is_redirect:
        return f"{url} redirects to another address ({status})", "give that address, if you trust it"
    if status == 404:
        return f"{url} has no {response.request.url.path}", f"it is not an OpenAI-compatible server; {START}"
    about = f" about {image}" if image else ""
    return f"{url} did not answer a question{about} ({status}): {_read_message(response)}", ""


def _read_message(response: httpx.Response) -> str:
    """Return the server's error message, in one line that is safe to print."""
    message = ""
    with suppress(ValueError, RecursionError):
        message, _, _ = read_error(response.json())
    line = " ".join((message or response.text).split())[:SHOWN]
    return "".join(character if character.isprintable() else "?" for character in line) or "no reason given"


def _read(kind: type[T], response: httpx.Response, url: str) -> T:
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        places = ", ".join(".".join(map(str, problem["loc"])) or "all of it" for problem in error.errors()[:3])
        raise EngineError(
            f"{url} gave an answer without the tokens that it consists of (missing or wrong: {places})",
            "use vLLM: scores and coordinates are read from token ids and log probabilities, which other servers "
            "do not return",
        ) from error
