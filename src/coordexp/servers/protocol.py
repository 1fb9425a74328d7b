"""The wire between a learner and a rollout server: its routes, messages, answers and errors. Both ends import this
module, and it imports no torch.

Requests and answers are JSON in the format of ms-swift 4.6; the routes for weights are our own. A server refuses
what it does not serve, and never ignores it. A learner reads everything that a server sends with the same models:
a response that lacks a field, or has one of another type, is an error that names the server and the field.
"""

import hashlib
import json
import socket
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from typing_extensions import TypedDict

from coordexp.answers.table import COORD_TOKENS
from coordexp.config.rollout import TOKEN as TOKEN
from coordexp.config.sections import from_null
from coordexp.errors import EngineError, UserError
from coordexp.families import STOP_TOKENS
from coordexp.files import is_encodable

SERVER, PROTOCOL = "coordexp", 4
IMAGE = "<image>"  # stands for the image in the text of a message
OWN_KEY = "coordexp"  # the key of our own fields in `data_dict`
ENGINE_FAULT = "engine"  # the code of a request that failed through no fault of its own
UPDATE_TIMEOUT = 240.0  # seconds that an update may make no progress, unless the learner sets another limit
MOST_REQUESTS = 4096  # requests in one call
MOST_ANSWERS = 64  # answers to one request
HALF = "text with half a character (a lone surrogate), which UTF-8 cannot encode"
# With these socket options the kernel detects that a machine is gone, even while its server is busy and silent.
KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),
]
# Sampling settings of ms-swift that are not served, and the value that has no effect and is therefore allowed.
NEUTRAL: dict[str, int | None] = {
    "num_beams": 1,
    "best_of": 1,
    "length_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "min_p": 0,
    "top_logprobs": 0,
    "prompt_logprobs": None,
    "structured_outputs_regex": None,
}
# Keys of a config that describe how it was saved or is computed, not the weights.
VOLATILE = frozenset(
    {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "_attn_implementation"}
)


def _check_utf8(text: str) -> str:
    if not is_encodable(text):
        raise ValueError(HALF)
    return text


Text = Annotated[str, AfterValidator(_check_utf8)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0)]
LARGEST = 2**48  # bytes of a bucket


class Message(BaseModel):
    """A message of either end. Unknown fields have no effect."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that were set, as plain values."""
        return self.model_dump(mode="json", exclude_unset=True)


class StrictMessage(Message):
    """A message whose unknown fields are refused by name, unless they are null, which has no effect."""

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, values: Any) -> Any:
        neutral = NEUTRAL if cls is RequestConfig else {}
        for name, value in values.items() if isinstance(values, dict) else ():
            if name not in cls.model_fields and value not in (None, neutral.get(name)):
                raise ValueError(f"{ascii(str(name))[1:-1][:80]}: not served here; leave it out")
        return values


# Requests for answers: POST /infer/


class ChatMessage(Message):
    role: Text
    content: str | list[dict[str, Any]]


class LearnerFields(StrictMessage):
    """The fields that only a coordexp learner adds to a request."""

    seed: Whole | None = None
    guard: bool = True
    size: tuple[int, int] | None = None  # the width and height that the image must have


class InferRequest(StrictMessage):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    images: list[str] = []
    audios: list[Any] | None = None
    videos: list[Any] | None = None
    tools: Any = None
    objects: Any = None
    chat_template_kwargs: Any = None
    add_eos: bool | str | None = None
    uuid: str | None = None
    data_dict: dict[str, Any] | None = None

    @property
    def learner_fields(self) -> LearnerFields:
        return LearnerFields.model_validate((self.data_dict or {}).get(OWN_KEY) or {})


Number = Annotated[float, Field(allow_inf_nan=False)]


class RequestConfig(StrictMessage):
    """The settings of a call. A sampling field that is not set comes from the model's `generation_config.json`."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Number | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Number | None = None
    repetition_penalty: Number | None = None
    stop: list[Text] | None = None
    seed: Whole | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] = 1
    logprobs: bool = False
    return_details: bool = False
    stream: bool = False


class InferCall(StrictMessage):
    """The body of a call. Its requests are read one by one, so that a bad one fails alone. ms-swift's own client
    also sends `metrics` and `use_tqdm`, which change no answer."""

    infer_requests: Annotated[list[Any], Field(max_length=MOST_REQUESTS)]
    request_config: Annotated[RequestConfig, from_null] = RequestConfig()
    metrics: Any = None
    use_tqdm: Any = None


# Weights: groups and updates


class WeightMessage(Message):  # POST /finish_update/
    """A message about weights. `group` is the random name of the learner's group."""

    group: Name


class JoinGroup(WeightMessage):  # POST /init_communicator/
    """The response stays open, and the server is this learner's until the connection closes. It has a line of JSON
    when the server is the learner's, and one when the group is complete, or the error."""

    learner: Annotated[str, Field(max_length=200)] = "unknown"
    port: Annotated[int, Field(ge=1, le=65535)]
    world_size: Annotated[int, Field(ge=2)]
    timeout_s: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] = UPDATE_TIMEOUT


class BeginUpdate(WeightMessage):  # POST /begin_update/
    version: Name
    adapter: dict[str, Any] | None = None  # the config of the adapter that is sent, as peft writes it


class Metadata(Message):
    """A tensor in a bucket, which is a buffer of bytes."""

    name: Annotated[Text, Field(min_length=1, max_length=500)]
    dtype: Name
    shape: Annotated[list[Annotated[int, Field(ge=0, le=LARGEST, strict=True)]], Field(max_length=64)]
    start_idx: Annotated[int, Field(ge=0, le=LARGEST, strict=True)]
    end_idx: Annotated[int, Field(ge=0, le=LARGEST, strict=True)]


class LoadBucket(WeightMessage):  # POST /load_bucket/
    metadatas: Annotated[list[Metadata], Field(min_length=1)]
    next_bytes: Annotated[int, Field(ge=0, le=LARGEST)] = 0


# What a server sends


class Response(Message):
    """A message of a server. A learner reads it strictly: a number as text, for example, is an error."""

    model_config = ConfigDict(strict=True)


class ServerIdentity(Response):
    server: str
    protocol: int
    release: str = ""


class ServerVersion(ServerIdentity):
    """The response of `/version/?full=1`: facts that a learner checks, and the state of the weights. Without
    `full`, `model` is missing."""

    boot: str
    model: dict[str, Any]
    dtype: str
    world_size: int
    max_model_len: int
    guard: dict[str, Any]
    devices: list[str]
    lora: bool = False
    weight_version: str | None = None
    base: str = "original"
    updating: bool = False
    learner: str | None = None


class WorldSize(Response):
    world_size: Annotated[int, Field(ge=1)]


class WeightVersion(Response):
    weight_version: str | None


# A learner reads the answers of other servers too. Fields that it does not use may be anything.


class TokenLogprob(TypedDict):  # a dict, because an answer may have thousands of them
    logprob: float
    token: NotRequired[Any]


class Logprobs(Response):
    content: list[TokenLogprob]


class Choice(Response):
    """One answer. A call without `return_details` or `logprobs` gets none of them."""

    index: Any = 0
    message: Any = {}
    finish_reason: Literal["stop", "length", "repeat"]
    token_ids: list[TokenId] | None = None
    logprobs: Logprobs | None = None


class Completion(Response):
    id: Any = ""
    object: Any = "chat.completion"
    created: Any = 0
    model: Any = SERVER
    choices: list[Choice]
    usage: Any = {}
    prompt_token_ids: list[TokenId] | None = None


class RolloutInfos(Response):
    weight_version: str | None = None
    ended_by_guard: Any = []


class InferItem(Response):
    """The answer to one request of a call. A request that failed has the JSON of a `Refusal` instead."""

    response: Completion
    rollout_infos: RolloutInfos | None = None


class Refusal(UserError):
    """The answer of a server that does not do what it was asked: an HTTP status, a code for programs, and the
    problem and the fix for people."""

    def __init__(self, status: int, code: str, problem: str, fix: str = "") -> None:
        super().__init__(problem, fix)
        self.status, self.code = status, code

    def to_json(self) -> dict[str, Any]:
        return {"error": {"code": self.code, "message": self.problem, "fix": self.fix}}


def bad_request(problem: str, fix: str = "") -> Refusal:
    return Refusal(400, "bad_request", problem, fix)


def read_error(content: Any) -> tuple[str, str, str]:
    """Return the problem, the fix and the code of an error response; each is empty if it is missing."""
    error = content.get("error") if isinstance(content, dict) else None
    if isinstance(error, dict):
        return str(error.get("message", "")), str(error.get("fix", "")), str(error.get("code", ""))
    return (str(error), "", "") if error else ("", "", "")


def read_response(form: Any, body: bytes, server: str, route: str) -> Any:
    """Return the content of a response in a form, such as a message class. `server` and `route` are for the
    message of the error."""
    return check_form(form, read_json(body, server, route), server, route)


def read_json(body: bytes, server: str, route: str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        beginning = body[:60].decode(errors="replace")
        raise EngineError(
            f"{server}: its answer to {route} is not JSON but {beginning!r}",
            "check that base_url leads to a rollout server, and see what the server printed",
        ) from None


def check_form(form: Any, content: Any, server: str, route: str) -> Any:
    try:
        return _adapter(form).validate_python(content)
    except ValidationError as error:
        raise unreadable(server, route, _describe_fault(error)) from None


@cache
def _adapter(form: Any) -> TypeAdapter[Any]:
    return TypeAdapter(form)


def _describe_fault(error: ValidationError) -> str:
    """Describe the first fault of a message, with its place."""
    fault = error.errors()[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).lstrip(".")
    if fault["type"] == "missing":
        return f"{place} is missing"
    return f"{place} is {repr(fault['input'])[:40]}: {fault['msg']}"


def unreadable(server: str, route: str, problem: str) -> EngineError:
    return EngineError(
        f"{server}: its answer to {route} cannot be read: {problem}",
        "the server must use this release's protocol; see what it printed",
    )


def read_version(body: bytes, server: str) -> ServerVersion:
    """Read the response of `/version/`. Raise EngineError if the server uses another protocol."""
    identity = read_response(ServerIdentity, body, server, "/version/")
    if (identity.server, identity.protocol) != (SERVER, PROTOCOL):
        raise EngineError(
            f"{server}: it is {identity.server} {identity.release} with protocol {identity.protocol}, but this "
            f"learner uses coordexp's protocol {PROTOCOL}",
            "start it with the same release as the learner",
        )
    version: ServerVersion = read_response(ServerVersion, body, server, "/version/")
    return version


# The model that both ends must have


def model_fingerprint(folder: Path | str, image_size: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return what two processes that use the same model must agree on, by name: its config, the limits on the
    pixels of an image, and the ids of the tokens that answers consist of."""
    folder = Path(folder)
    facts = dict(_leaves(json.loads((folder / "config.json").read_text(encoding="utf-8")), "config"))
    facts |= {f"image_size.{name}": pixels for name, pixels in (image_size or {}).items()}
    return facts | _token_facts(folder / "tokenizer.json")


def _leaves(value: Any, at: str) -> list[tuple[str, Any]]:
    """Return all values of a nested config, by their paths. A list is represented by its hash."""
    if isinstance(value, dict):
        kept = [(name, inner) for name, inner in value.items() if name not in VOLATILE]
        return [leaf for name, inner in sorted(kept) for leaf in _leaves(inner, f"{at}.{name}")]
    if isinstance(value, list):
        return [(at, hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16])]
    return [(at, value)]


def _token_facts(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    ids = dict(content.get("model", {}).get("vocab", {}))
    ids |= {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    tokens = {"first_coord": COORD_TOKENS[0], "last_coord": COORD_TOKENS[-1], "end_of_turn": STOP_TOKENS[0]}
    return {f"tokenizer.{name}": ids.get(token) for name, token in tokens.items()} | {"tokenizer.tokens": len(ids)}


def model_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Describe the first few values in which two fingerprints differ. Return None if they are equal."""
    names = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    differences = [f"{name} is {theirs.get(name)} there and {ours.get(name)} here" for name in names[:3]]
    more = f", and {len(names) - 3} more" if len(names) > 3 else ""
    return "; ".join(differences) + more if names else None
