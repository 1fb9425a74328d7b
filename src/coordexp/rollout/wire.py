"""What is written to a rollout server and read from it: plain JSON in ms-swift's shape. Imports no torch.

Nothing that a server sends is believed unread: an answer that lacks a field, or has one of another kind, is an
error that names the server and the field.
"""

import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordexp.config.rollout import TOKEN as TOKEN
from coordexp.config.rollout import RepeatTerminate
from coordexp.errors import EngineError
from coordexp.rollout.backend import Request, Rollout, one_decode
from coordexp.rollout.guard import ended
from coordexp.vocab import COORD_TOKENS, VocabularyTable
from coordexp.vocab.table import STOP_TOKENS

PROTOCOL = 2
IMAGE = "<image>"
UNSYNCED = "default"  # the version of the weights that a server was started with
MINE = "coordexp"  # in `data_dict`
GUARD_ROUTE = "/coordexp_repeat_guard/"  # of a server of ms-swift that has loaded our plugin
ENGINE = "engine"  # the code of a request that failed by no fault of its own
# By these the kernel notices that a machine is gone, also while its server is busy and says nothing.
KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),
]
# Of a config, what says who wrote it and how it is computed, and nothing about the weights.
VOLATILE = frozenset(
    {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "_attn_implementation"}
)


class RequestFailed(EngineError):
    """One request of a call, while the others may be well."""

    def __init__(self, index: int, message: str, fix: str, code: str = "") -> None:
        super().__init__(f"{message}\n  {fix}" if fix else message)
        self.index, self.message, self.fix, self.code = index, message, fix, code


@dataclass(frozen=True)
class Answer:
    """As a server gives it: with its stop token, and with the version that it names, if it does."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    version: str | None


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself. One of ms-swift says only its world size, and with our plugin
    its guard."""

    world_size: int
    foreign: bool = False
    model: Mapping[str, Any] | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    guard: Mapping[str, Any] | None = None
    boot: str | None = None
    devices: tuple[str, ...] = ()
    lora: bool = False


def infer_payload(requests: Sequence[Request], question: str) -> dict[str, Any]:
    """Of one call, whose requests all decode alike. Every sampling field is set: one that is not, ms-swift takes
    from the model's `generation_config.json`."""
    if IMAGE in question:
        raise EngineError(
            f"custom.prompt: it contains {IMAGE}, which rollout servers take for the place of a picture\n"
            f"  write the prompt without {IMAGE}: the picture always comes first"
        )
    decode = one_decode(requests)
    if decode.mode == "beam":
        raise EngineError("rollout servers have no beam search\n  set rollout_backend: hf, or decode_mode: greedy")
    sampling = decode.mode == "sampling"
    return {
        "infer_requests": [
            {
                "messages": [{"role": "user", "content": IMAGE + question}],
                "images": [str(Path(one.picture.path).absolute())],
                "data_dict": {
                    MINE: {"seed": one.seed, "guard": decode.guard.enabled, "size": list(one.picture.size)}
                },
            }
            for one in requests
        ],
        "request_config": {
            "max_tokens": decode.max_new_tokens,
            "temperature": decode.temperature if sampling else 0.0,
            "top_k": decode.top_k if sampling else -1,
            "top_p": decode.top_p if sampling else 1.0,
            "repetition_penalty": 1.0,
            "stop": [],
            "seed": requests[0].seed,
            "n": 1,
            "return_details": True,
            "logprobs": True,
        },
    }


def read_json(body: bytes, who: str, what: str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        shown = body[:60].decode(errors="replace")
        raise EngineError(
            f"{who}: its answer to {what} is no JSON but {shown!r}\n"
            "  see that base_url leads to a rollout server, and what the server printed"
        ) from None


def read_answers(body: bytes, count: int, who: str) -> list[Answer]:
    """In the order of the requests. The first one that failed alone is raised."""
    found = read_json(body, who, "/infer/")
    if not isinstance(found, list) or len(found) != count:
        told = f"{len(found)} items" if isinstance(found, list) else f"a {type(found).__name__}"
        raise _broken(who, "/infer/", f"{told} where a list of {count} should be")
    return [_answer(item, index, who) for index, item in enumerate(found)]


def _answer(item: Any, index: int, who: str) -> Answer:
    at = f"[{index}]"
    if isinstance(item, dict) and "error" in item:
        message, fix = error_told(item)
        code = item["error"].get("code", "") if isinstance(item["error"], dict) else ""
        raise RequestFailed(index, message or "it failed and was not told why", fix, str(code))
    read = _Reader(who, "/infer/")
    response = read.field(item, at, "response", dict)
    choices = read.field(response, f"{at}.response", "choices", list)
    if len(choices) != 1:
        raise _broken(who, "/infer/", f"{at}.response.choices has {len(choices)} answers where 1 should be")
    place = f"{at}.response.choices[0]"
    ids = read.integers(choices[0], place, "token_ids")
    content = read.field(read.field(choices[0], place, "logprobs", dict), f"{place}.logprobs", "content", list)
    logprobs = [read.number(one, f"{place}.logprobs.content[{k}]", "logprob") for k, one in enumerate(content)]
    if len(logprobs) != len(ids):
        told = f"{place}: {len(ids)} token_ids and {len(logprobs)} logprobs"
        raise _broken(who, "/infer/", told)
    reason = read.field(choices[0], place, "finish_reason", str)
    if reason not in ("stop", "length", "repeat"):
        raise _broken(who, "/infer/", f"{place}.finish_reason is {reason!r}")
    infos = item.get("rollout_infos")
    version = infos.get("weight_version") if isinstance(infos, dict) else None
    if version is not None and not isinstance(version, str):
        raise _broken(who, "/infer/", f"{at}.rollout_infos.weight_version is {version!r}")
    prompt = read.integers(response, f"{at}.response", "prompt_token_ids")
    return Answer(prompt, ids, tuple(logprobs), reason, version)


def rollout(
    answer: Answer, guard: RepeatTerminate, pattern: Sequence[int], table: VocabularyTable, version: int
) -> Rollout:
    """Without the stop token (D26), which a server may have sent or left out."""
    ids, reason = ended(answer.ids, table.end_of_turn, guard, pattern)
    if reason == "length" and answer.finish_reason != "length":  # by another token than the end of turn
        reason = "repeat" if answer.finish_reason == "repeat" else "stop"
        other = [table.tokenizer.token_to_id(name) for name in STOP_TOKENS]
        ids = ids[:-1] if ids and ids[-1] in other else ids
    return Rollout.of(table, answer.prompt_ids, ids, answer.logprobs, reason, version)


def read_facts(body: bytes, who: str) -> ServerFacts:
    """Of `/version/`."""
    read, at = _Reader(who, "/version/"), ""
    told = read_json(body, who, "/version/")
    if read.field(told, at, "server", str) != "coordexp" or read.field(told, at, "protocol", int) != PROTOCOL:
        raise EngineError(
            f"{who}: it is {told['server']} {told.get('release', '')} with protocol {told.get('protocol')}, and "
            f"this learner speaks coordexp's protocol {PROTOCOL}\n  start it with the same release as the learner"
        )
    return ServerFacts(
        world_size=read.field(told, at, "world_size", int),
        model=read.field(told, at, "model", dict),
        dtype=read.field(told, at, "dtype", str),
        max_model_len=read.field(told, at, "max_model_len", int),
        guard=read.field(told, at, "guard", dict),
        boot=read.field(told, at, "boot", str),
        devices=tuple(map(str, read.field(told, at, "devices", list))),
        lora=read.field(told, at, "lora", bool),
    )


def read_plugin_guard(body: bytes, who: str, world_size: int) -> Mapping[str, Any]:
    """Return the settings of the guard that an ms-swift server has loaded. Raise EngineError unless all its
    workers have loaded it."""
    read, answer = _Reader(who, GUARD_ROUTE), read_json(body, who, GUARD_ROUTE)
    workers = read.field(answer, "", "workers", int)
    if workers < world_size:
        raise EngineError(
            f"{who}: the repeat guard of its plugin is active in {workers} of its {world_size} workers\n"
            "  start it again and see what it printed; the plugin was written for ms-swift 4.6"
        )
    return dict(read.field(answer, "", "guard", dict))


def read_field(body: bytes, who: str, what: str, name: str, kind: type) -> Any:
    """One field of an answer that is an object."""
    return _Reader(who, what).field(read_json(body, who, what), "", name, kind)


def error_told(told: Any) -> tuple[str, str]:
    """Message and fix of an answer that is an error; empty where it does not say."""
    error = told.get("error") if isinstance(told, dict) else None
    if isinstance(error, dict):
        return str(error.get("message", "")), str(error.get("fix", ""))
    return (str(error), "") if error else ("", "")


@dataclass(frozen=True)
class _Reader:
    who: str
    what: str

    def field(self, told: Any, at: str, name: str, kind: type) -> Any:
        value = told.get(name) if isinstance(told, dict) else None
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            where = f"{at}.{name}" if at else name
            here = isinstance(told, dict) and name in told
            problem = f"is {_short(value)}, which is no {kind.__name__}" if here else "is missing"
            raise _broken(self.who, self.what, f"{where} {problem}")
        return value

    def integers(self, told: Any, at: str, name: str) -> tuple[int, ...]:
        values = self.field(told, at, name, list)
        for k, value in enumerate(values):
            if type(value) is not int or value < 0:
                raise _broken(self.who, self.what, f"{at}.{name}[{k}] is {_short(value)}, which is no token id")
        return tuple(values)

    def number(self, told: Any, at: str, name: str) -> float:
        value = told.get(name) if isinstance(told, dict) else None
        if type(value) not in (int, float):
            raise _broken(self.who, self.what, f"{at}.{name} is {_short(value)}, which is no number")
        return float(value)  # type: ignore[arg-type]


def _short(value: Any) -> str:
    return repr(value)[:40]


def _broken(who: str, what: str, problem: str) -> EngineError:
    return EngineError(
        f"{who}: its answer to {what} cannot be read: {problem}\n"
        "  the server must speak this release's protocol, or that of `swift rollout`; see what it printed"
    )


def model_fingerprint(folder: Path | str) -> dict[str, Any]:
    """What two processes that were given a model folder must agree on, by name: its config, and the ids of the
    tokens that answers are read by."""
    folder = Path(folder)
    found = dict(_leaves(json.loads((folder / "config.json").read_text()), "config"))
    return found | _token_facts(folder / "tokenizer.json")


def _leaves(value: Any, at: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        kept = [(name, inner) for name, inner in value.items() if name not in VOLATILE]
        return [leaf for name, inner in sorted(kept) for leaf in _leaves(inner, f"{at}.{name}")]
    if isinstance(value, list):
        return [(at, hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16])]
    return [(at, value)]


def _token_facts(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    told = json.loads(file.read_text())
    ids = dict(told.get("model", {}).get("vocab", {}))
    ids |= {one["content"]: one["id"] for one in told.get("added_tokens", [])}
    wanted = {"first_coord": COORD_TOKENS[0], "last_coord": COORD_TOKENS[-1], "end_of_turn": STOP_TOKENS[0]}
    return {f"tokenizer.{name}": ids.get(token) for name, token in wanted.items()} | {"tokenizer.tokens": len(ids)}


def model_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first few values by which two fingerprints differ, if they do."""
    names = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    told = [f"{name} is {theirs.get(name)} there and {ours.get(name)} here" for name in names[:3]]
    more = f", and {len(names) - 3} more" if len(names) > 3 else ""
    return "; ".join(told) + more if names else None
