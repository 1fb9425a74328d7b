"""The requests to `/infer/`, in the form of ms-swift's contract: their fields, their limits, and the images that
they may name. Parts of the contract that are not served (tools, videos, audio) are refused, never ignored."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from PIL import Image
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from coordexp.data.images import open_image_file, size_problem, upright_size
from coordexp.errors import explain
from coordexp.files import is_encodable
from coordexp.rollout.prompt import UNUSABLE, read_image
from coordexp.servers.refusal import bad_request

MOST_REQUESTS = 4096  # requests in one call
MOST_ANSWERS = 64  # answers to one request
TAG = "<image>"  # stands for the image in the text of a message
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]


def _check_utf8(text: str) -> str:
    if not is_encodable(text):
        raise ValueError(HALF)
    return text


HALF = "text with half a character (a lone surrogate), which UTF-8 cannot encode"
Text = Annotated[str, AfterValidator(_check_utf8)]
# Sampling settings of the contract that are not served, and the value that has no effect and is therefore allowed.
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
    """Refuses unknown fields by name, unless they are null, which has no effect."""

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, values: Any) -> Any:
        neutral = NEUTRAL if cls is RequestConfig else {}
        for name, value in values.items() if isinstance(values, dict) else ():
            if name not in cls.model_fields and value not in (None, neutral.get(name)):
                raise ValueError(f"{ascii(str(name))[1:-1][:80]}: not served here; leave it out")
        return values


class Message(_Loose):
    role: Text
    content: str | list[dict[str, Any]]


class LearnerFields(_Strict):
    """The fields that only a coordexp learner adds to a request."""

    seed: Whole | None = None
    guard: bool = True
    size: tuple[int, int] | None = None  # the width and height that the image must have


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
    def learner_fields(self) -> LearnerFields:
        return LearnerFields.model_validate((self.data_dict or {}).get("coordexp") or {})


class RequestConfig(_Strict):
    """The settings of a call. A sampling field that is not set comes from the model's `generation_config.json`."""

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


def _default_config(value: Any) -> Any:
    return {} if value is None else value


class InferCall(_Strict):
    """The body of a call. ms-swift's own client also sends `metrics` and `use_tqdm`, which change no answer."""

    infer_requests: Annotated[list[Any], Field(max_length=MOST_REQUESTS)]
    request_config: Annotated[RequestConfig, BeforeValidator(_default_config)] = RequestConfig()
    metrics: Any = None
    use_tqdm: Any = None


@dataclass(frozen=True)
class AllowedImages:
    """The images that a request may name: files below these folders, and images in the request itself."""

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
        if source.startswith("data:") or not _is_path(source):
            return _decode_base64(source), "the base64 image"
        if "://" in source:
            raise bad_request(f"{source[:80]}: images are not fetched from elsewhere", "send a path, or base64")
        kinds = (OSError, ValueError, RuntimeError)
        with explain(kinds, f"{source[:80]!r}: not a path", "send a path, or base64", to=bad_request):
            path = Path(source).resolve()
        if not any(path.is_relative_to(folder) for folder in self.folders):
            allowed = ", ".join(map(str, self.folders)) or "no folder"
            raise bad_request(
                f"{source}: this server only reads images below {allowed}",
                "start it with --images FOLDER (can be repeated), or send base64",
            )
        return path, source


@dataclass(frozen=True)
class RequestImage:
    """An image of which only the header was read. The size is that of the upright image."""

    content: Path | bytes
    name: str
    width: int
    height: int

    @property
    def pixels(self) -> int:
        return self.width * self.height

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
    return "." in source or "://" in source or (source.startswith("/") and not source.startswith("/9j/"))


def _decode_base64(source: str) -> bytes:
    content = source.partition(",")[2] if source.startswith("data:") else source
    with explain(ValueError, f"{source[:40]}: neither a path nor base64", "send one of them", to=bad_request):
        return base64.b64decode(content, validate=True)


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
        if any(part.get("type") != "image" and not _is_text(part) for part in content):
            raise bad_request("messages: a content part is neither text nor image", "send text and one image")
        if any(part["type"] == "text" and not is_encodable(part["text"]) for part in content):
            raise bad_request(f"messages: {HALF}", "send UTF-8")
        plain = [part if part["type"] == "text" else {"type": "image"} for part in content]
        conversation.append({"role": message.role, "content": plain})
    sources = inline or request.images
    named = sum(part["type"] == "image" for message in conversation for part in message["content"])
    if named != len(sources) or named > 1:
        raise bad_request(
            f"the messages name {named} images, and {len(sources)} came along; at most one is served",
            f"write {TAG} where the image belongs, and send the image in images",
        )
    return conversation, sources


def _is_text(part: dict[str, Any]) -> bool:
    return part.get("type") == "text" and isinstance(part.get("text"), str)


def _split_text(text: str) -> list[dict[str, Any]]:
    """Return the text as content parts, with an image part for each tag."""
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(TAG)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def sampling_fields(config: RequestConfig, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that decide which token is drawn: those of the call, else those of the model."""
    names: Sequence[str] = ("temperature", "top_k", "top_p", "repetition_penalty")
    requested = {name: value for name in names if (value := getattr(config, name)) is not None}
    return {name: value for name, value in defaults.items() if name in names} | requested
