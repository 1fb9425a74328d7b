"""What comes to `/infer/`, in the form of ms-swift's contract, and what a request may be: its limits, and the
pictures that it may name. What of the contract is not served (tools, videos, audio) is refused, never left out."""

import base64
import binascii
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from PIL import Image
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from coordexp.data.images import opened_image, size_problem, upright_size
from coordexp.errors import DataError
from coordexp.rollout.prompt import UNUSABLE, read_image
from coordexp.serve.refusal import bad_request
from coordexp.text import encodable

MOST_REQUESTS = 4096  # in one call
MOST_BYTES = 256 * 2**20  # of one call's body
MOST_ANSWERS = 64  # to one request
TAG = "<image>"
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]


def _is_utf8(text: str) -> str:
    if not encodable(text):
        raise ValueError(HALF)
    return text


HALF = "text with half a character (a lone surrogate), which UTF-8 cannot encode"
Text = Annotated[str, AfterValidator(_is_utf8)]
# What clients may say of sampling beyond what is served, and the value by which nothing is asked for.
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


class _Loose(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Strict(_Loose):
    """What is not known is refused by its name, unless it is null, which asks for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _is_served(cls, given: Any) -> Any:
        neutral = NEUTRAL if cls is RequestConfig else {}
        for name, value in given.items() if isinstance(given, dict) else ():
            if name not in cls.model_fields and value not in (None, neutral.get(name)):
                raise ValueError(f"{ascii(str(name))[1:-1][:80]}: not served here; leave it out")
        return given


class Message(_Loose):
    role: Text
    content: str | list[dict[str, Any]]


class OurOwn(_Strict):
    """What only a coordexp learner says of a request."""

    seed: Whole | None = None
    guard: bool = True
    size: tuple[int, int] | None = None  # width and height that the picture must have


class InferRequest(_Strict):
    messages: Annotated[list[Message], Field(min_length=1)]
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
    def own(self) -> OurOwn:
        return OurOwn.model_validate((self.data_dict or {}).get("coordexp") or {})


class RequestConfig(_Strict):
    """A sampling field that is not set is that of the model's `generation_config.json`."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    stop: list[Text] | None = None
    seed: Whole | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] = 1
    logprobs: bool = False
    return_details: bool = False
    stream: bool = False


class InferCall(_Strict):
    """ms-swift's own client also sends what it counts and whether it shows progress, which change no answer."""

    infer_requests: Annotated[list[Any], Field(max_length=MOST_REQUESTS)]
    request_config: Annotated[RequestConfig, BeforeValidator(lambda given: {} if given is None else given)] = (
        RequestConfig()
    )
    metrics: Any = None
    use_tqdm: Any = None


@dataclass(frozen=True)
class Pictures:
    """Which pictures a request may have read: files below these folders, and what it brings along itself."""

    folders: tuple[Path, ...]

    def look(self, source: str, size: tuple[int, int] | None = None) -> "FoundPicture":
        """Return the picture without decoding it; its header tells whether it can be used. `size` is what its
        record says, if that was told."""
        content, name = self._found(source)
        try:
            with opened_image(content if isinstance(content, Path) else io.BytesIO(content)) as image:
                width, height, _ = upright_size(image)
        except OSError as error:
            told = f"{name}: not a readable picture ({error.strerror or error})"
            raise bad_request(told, "run `coordexp data doctor`") from error
        if problem := size_problem(width, height):
            raise bad_request(f"{name}: {problem}", UNUSABLE)
        if size is not None and (width, height) != size:
            raise bad_request(
                f"the picture is {width} x {height}, and its record says {size[0]} x {size[1]}",
                "correct the record; `coordexp data doctor` finds all of them",
            )
        return FoundPicture(content, name, width, height)

    def _found(self, source: str) -> tuple[Path | bytes, str]:
        if source.startswith("data:") or not _is_path(source):
            return _decoded(source), "the base64 picture"
        if "://" in source:
            raise bad_request(f"{source[:80]}: pictures are not fetched from elsewhere", "send a path, or base64")
        try:
            path = Path(source).resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise bad_request(f"{source[:80]!r}: not a path ({error})", "send a path, or base64") from error
        if not any(path.is_relative_to(folder) for folder in self.folders):
            known = ", ".join(map(str, self.folders)) or "no folder"
            raise bad_request(
                f"{source}: this server reads pictures below {known} only",
                "start it with --images FOLDER (may be given several times), or send base64",
            )
        return path, source


@dataclass(frozen=True)
class FoundPicture:
    """A picture of which only the header was read, and its size after turning."""

    content: Path | bytes
    name: str
    width: int
    height: int

    @property
    def pixels(self) -> int:
        return self.width * self.height

    def decode(self) -> Image.Image:
        try:
            image = read_image(
                self.content if isinstance(self.content, Path) else io.BytesIO(self.content), self.name
            )
        except DataError as error:
            message, _, fix = str(error).partition("\n  ")
            raise bad_request(message, fix) from error
        if image.size != (self.width, self.height):
            told = f"{self.name}: {image.width} x {image.height}, and its header said {self.width} x {self.height}"
            raise bad_request(
                told, "save the picture again; if it was replaced meanwhile, do not do that in a run"
            )
        return image


def _is_path(source: str) -> bool:
    """Base64 has no dot, and that of a JPEG begins as no path does."""
    return "." in source or "://" in source or (source.startswith("/") and not source.startswith("/9j/"))


def _decoded(source: str) -> bytes:
    try:
        return base64.b64decode(source.partition(",")[2] if source.startswith("data:") else source, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_request(f"{source[:40]}: neither a path nor base64 ({error})", "send one of them") from error


def parts(request: InferRequest) -> tuple[list[dict[str, Any]], list[str]]:
    """The conversation as chat templates take it, and its pictures."""
    for name in ("audios", "videos", "tools", "objects", "chat_template_kwargs", "add_eos"):
        if getattr(request, name):
            raise bad_request(f"{name}: not served here", "send text and one picture")
    conversation: list[dict[str, Any]] = []
    inline: list[str] = []
    for message in request.messages:
        content = _tagged(message.content) if isinstance(message.content, str) else list(message.content)
        inline += [str(part["image"]) for part in content if part.get("type") == "image" and part.get("image")]
        if any(part.get("type") != "image" and not _is_text(part) for part in content):
            raise bad_request("messages: a content part is neither text nor image", "send text and one picture")
        if any(part["type"] == "text" and not encodable(part["text"]) for part in content):
            raise bad_request(f"messages: {HALF}", "send UTF-8")
        plain = [part if part["type"] == "text" else {"type": "image"} for part in content]
        conversation.append({"role": message.role, "content": plain})
    pictures = inline or request.images
    named = sum(part["type"] == "image" for message in conversation for part in message["content"])
    if named != len(pictures) or named > 1:
        raise bad_request(
            f"the messages name {named} pictures, and {len(pictures)} came along; one is served",
            f"write {TAG} where the picture stands, and send it in images",
        )
    return conversation, pictures


def _is_text(part: dict[str, Any]) -> bool:
    return part.get("type") == "text" and isinstance(part.get("text"), str)


def _tagged(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(TAG)):
        found += [{"type": "image"}] if number else []
        found += [{"type": "text", "text": piece}] if piece else []
    return found


def sampling_fields(config: RequestConfig, defaults: dict[str, Any]) -> dict[str, Any]:
    """Those that decide which token is drawn."""
    names: Sequence[str] = ("temperature", "top_k", "top_p", "repetition_penalty")
    given = {name: value for name in names if (value := getattr(config, name)) is not None}
    return {name: value for name, value in defaults.items() if name in names} | given
