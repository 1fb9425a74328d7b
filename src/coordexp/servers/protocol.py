"""The messages between a learner and a rollout server: plain JSON in ms-swift's format. Imports no torch.

Everything that a server sends is checked: a response that lacks a field, or has one of another type, is an error
that names the server and the field.
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
from coordexp.rollout.backend import Request, Rollout, common_decode
from coordexp.rollout.guard import cut_at_end
from coordexp.vocab import COORD_TOKENS, VocabularyTable
from coordexp.vocab.table import STOP_TOKENS

PROTOCOL = 2
IMAGE = "<image>"
OWN_KEY = "coordexp"  # the key of our own fields in `data_dict`
GUARD_ROUTE = "/coordexp_repeat_guard/"  # the route that our plugin adds to a server of ms-swift
ENGINE_FAULT = "engine"  # the code of a request that failed through no fault of its own
# With these socket options the kernel detects that a machine is gone, even while its server is busy and silent.
KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),
]
# Keys of a config that describe how it was saved or is computed, not the weights.
VOLATILE = frozenset(
    {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "_attn_implementation"}
)


class RequestFailed(EngineError):
    """One request of a call failed. The others may have succeeded."""

    def __init__(self, index: int, problem: str, fix: str, code: str = "") -> None:
        super().__init__(problem, fix)
        self.index, self.code = index, code


@dataclass(frozen=True)
class ServerAnswer:
    """An answer as a server returns it: possibly with its stop token, and with the version of the weights, if the
    server reports one."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    version: str | None


@dataclass(frozen=True)
class ServerFacts:
    """The facts that a server reports about itself. A server of ms-swift reports only its world size, and with our
    plugin its guard."""

    world_size: int
    is_swift: bool = False
    model: Mapping[str, Any] | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    guard: Mapping[str, Any] | None = None
    boot: str | None = None
    devices: tuple[str, ...] = ()


def infer_payload(requests: Sequence[Request], question: str) -> dict[str, Any]:
    """Return the body of one call, whose requests all decode alike. It sets every sampling field, because ms-swift
    takes missing ones from the model's `generation_config.json`."""
    if IMAGE in question:
        raise EngineError(
            f"custom.prompt: it contains {IMAGE}, which marks the place of the image in requests to servers",
            f"write the prompt without {IMAGE}: the image always comes first",
        )
    decode = common_decode(requests)
    if decode.mode == "beam":
        raise EngineError("rollout servers have no beam search", "set rollout_backend: hf, or decode_mode: greedy")
    if decode.stop_bias:
        raise EngineError(
            f"rollout servers cannot decode with a stop bias, and this request has {decode.stop_bias:g}",
            "use `coordexp predict --stop-bias`, which asks no server, or a stop bias of 0",
        )
    sampling = decode.mode == "sampling"
    return {
        "infer_requests": [
            {
                "messages": [{"role": "user", "content": IMAGE + question}],
                "images": [str(Path(request.image.path).absolute())],
                "data_dict": {
                    OWN_KEY: {
                        "seed": request.seed,
                        "guard": decode.guard.enabled,
                        "size": list(request.image.size),
                    }
                },
            }
            for request in requests
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


def read_json(body: bytes, server: str, route: str) -> Any:
    """Return the content of a response. `server` and `route` are for the message of the error."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        beginning = body[:60].decode(errors="replace")
        raise EngineError(
            f"{server}: its answer to {route} is not JSON but {beginning!r}",
            "check that base_url leads to a rollout server, and see what the server printed",
        ) from None


def read_answers(body: bytes, count: int, server: str) -> list[ServerAnswer]:
    """Return the answers in the order of the requests. Raise RequestFailed for the first request that failed."""
    items = read_json(body, server, "/infer/")
    if not isinstance(items, list) or len(items) != count:
        actual = f"{len(items)} items" if isinstance(items, list) else f"a {type(items).__name__}"
        raise _unreadable(server, "/infer/", f"{actual} where a list of {count} should be")
    return [_read_answer(item, index, server) for index, item in enumerate(items)]


def _read_answer(item: Any, index: int, server: str) -> ServerAnswer:
    at = f"[{index}]"
    if isinstance(item, dict) and "error" in item:
        problem, fix, code = read_error(item)
        raise RequestFailed(index, problem or "it failed without a reason", fix, code)
    read = _Reader(server, "/infer/")
    response = read.field(item, at, "response", dict)
    choices = read.field(response, f"{at}.response", "choices", list)
    if len(choices) != 1:
        raise _unreadable(server, "/infer/", f"{at}.response.choices has {len(choices)} answers where 1 should be")
    place = f"{at}.response.choices[0]"
    ids = read.integers(choices[0], place, "token_ids")
    content = read.field(read.field(choices[0], place, "logprobs", dict), f"{place}.logprobs", "content", list)
    logprobs = [read.number(token, f"{place}.logprobs.content[{k}]", "logprob") for k, token in enumerate(content)]
    if len(logprobs) != len(ids):
        raise _unreadable(server, "/infer/", f"{place}: {len(ids)} token_ids and {len(logprobs)} logprobs")
    reason = read.field(choices[0], place, "finish_reason", str)
    if reason not in ("stop", "length", "repeat"):
        raise _unreadable(server, "/infer/", f"{place}.finish_reason is {reason!r}")
    infos = item.get("rollout_infos")
    version = infos.get("weight_version") if isinstance(infos, dict) else None
    if version is not None and not isinstance(version, str):
        raise _unreadable(server, "/infer/", f"{at}.rollout_infos.weight_version is {version!r}")
    prompt = read.integers(response, f"{at}.response", "prompt_token_ids")
    return ServerAnswer(prompt, ids, tuple(logprobs), reason, version)


def to_rollout(
    answer: ServerAnswer, guard: RepeatTerminate, pattern: Sequence[int], table: VocabularyTable, version: int
) -> Rollout:
    """Return the answer as a rollout, without its stop token, which a server may or may not have sent."""
    ids, reason = cut_at_end(answer.ids, table.end_of_turn, guard, pattern)
    if reason == "length" and answer.finish_reason != "length":  # it ended with another token than the end of turn
        reason = "repeat" if answer.finish_reason == "repeat" else "stop"
        other = [table.tokenizer.token_to_id(name) for name in STOP_TOKENS]
        ids = ids[:-1] if ids and ids[-1] in other else ids
    return Rollout.of(table, answer.prompt_ids, ids, answer.logprobs, reason, version)


def read_facts(body: bytes, server: str) -> ServerFacts:
    """Read the response of `/version/`."""
    read, at = _Reader(server, "/version/"), ""
    facts = read_json(body, server, "/version/")
    if read.field(facts, at, "server", str) != "coordexp" or read.field(facts, at, "protocol", int) != PROTOCOL:
        raise EngineError(
            f"{server}: it is {facts['server']} {facts.get('release', '')} with protocol {facts.get('protocol')}, "
            f"but this learner uses coordexp's protocol {PROTOCOL}",
            "start it with the same release as the learner",
        )
    return ServerFacts(
        world_size=read.field(facts, at, "world_size", int),
        model=read.field(facts, at, "model", dict),
        dtype=read.field(facts, at, "dtype", str),
        max_model_len=read.field(facts, at, "max_model_len", int),
        guard=read.field(facts, at, "guard", dict),
        boot=read.field(facts, at, "boot", str),
        devices=tuple(map(str, read.field(facts, at, "devices", list))),
    )


def read_plugin_guard(body: bytes, server: str, world_size: int) -> Mapping[str, Any]:
    """Return the settings of the guard that an ms-swift server has loaded. Raise EngineError unless all its
    workers have loaded it."""
    read, facts = _Reader(server, GUARD_ROUTE), read_json(body, server, GUARD_ROUTE)
    workers = read.field(facts, "", "workers", int)
    if workers < world_size:
        raise EngineError(
            f"{server}: the repeat guard of its plugin is active in {workers} of its {world_size} workers",
            "start it again and see what it printed; the plugin was written for ms-swift 4.6",
        )
    return dict(read.field(facts, "", "guard", dict))


def read_field(body: bytes, server: str, route: str, name: str, kind: type) -> Any:
    """Return one field of a response that is an object."""
    return _Reader(server, route).field(read_json(body, server, route), "", name, kind)


def read_error(content: Any) -> tuple[str, str, str]:
    """Return the problem, the fix and the code of an error response; each is empty if it is missing."""
    error = content.get("error") if isinstance(content, dict) else None
    if isinstance(error, dict):
        return str(error.get("message", "")), str(error.get("fix", "")), str(error.get("code", ""))
    return (str(error), "", "") if error else ("", "", "")


@dataclass(frozen=True)
class _Reader:
    """Reads fields of a response from `route` and checks their types. `at` is the path of their object."""

    server: str
    route: str

    def field(self, content: Any, at: str, name: str, kind: type) -> Any:
        value = content.get(name) if isinstance(content, dict) else None
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            where = f"{at}.{name}" if at else name
            is_present = isinstance(content, dict) and name in content
            problem = f"is {_shorten(value)}, which is not a {kind.__name__}" if is_present else "is missing"
            raise _unreadable(self.server, self.route, f"{where} {problem}")
        return value

    def integers(self, content: Any, at: str, name: str) -> tuple[int, ...]:
        values = self.field(content, at, name, list)
        for k, value in enumerate(values):
            if type(value) is not int or value < 0:
                problem = f"{at}.{name}[{k}] is {_shorten(value)}, which is not a token id"
                raise _unreadable(self.server, self.route, problem)
        return tuple(values)

    def number(self, content: Any, at: str, name: str) -> float:
        value = content.get(name) if isinstance(content, dict) else None
        if type(value) not in (int, float):
            problem = f"{at}.{name} is {_shorten(value)}, which is not a number"
            raise _unreadable(self.server, self.route, problem)
        return float(value)  # type: ignore[arg-type]


def _shorten(value: Any) -> str:
    return repr(value)[:40]


def _unreadable(server: str, route: str, problem: str) -> EngineError:
    return EngineError(
        f"{server}: its answer to {route} cannot be read: {problem}",
        "the server must use this release's protocol, or that of `swift rollout`; see what it printed",
    )


def model_fingerprint(folder: Path | str) -> dict[str, Any]:
    """Return what two processes that use the same model must agree on, by name: its config, and the ids of the
    tokens that answers consist of."""
    folder = Path(folder)
    facts = dict(_leaves(json.loads((folder / "config.json").read_text()), "config"))
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
    content = json.loads(file.read_text())
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
