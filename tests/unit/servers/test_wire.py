"""The messages to and from a rollout server, without a server."""

import json
from dataclasses import replace
from typing import Any, Literal

import pytest
from pydantic import TypeAdapter

from coordexp.config.rollout import RepeatTerminate
from coordexp.errors import EngineError
from coordexp.rollout.backend import Decode, ImageRef, Request
from coordexp.servers.asking import infer_payload, to_rollout
from coordexp.servers.protocol import (
    NEUTRAL,
    InferItem,
    InferRequest,
    RequestConfig,
    model_difference,
    model_fingerprint,
)
from tests.vocabularies import table

TABLE = table("small")
END, OTHER_END = TABLE.end_of_turn, TABLE.tokenizer.token_to_id("<|endoftext|>")
GUARD = RepeatTerminate(enabled=True, min_new_tokens=2, max_consecutive_token_repeats=2)


def request(seed=1, path="a.png", **decode):
    return Request(ImageRef(path, 8, 8), Decode(**({"max_new_tokens": 9} | decode)), seed)


@pytest.mark.scenario("R40.C1", "R40.C4", on="pure")
def test_a_payload_has_every_sampling_field_and_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sampling = {"mode": "sampling", "temperature": 0.5, "top_p": 0.9, "top_k": 7, "guard": GUARD}
    payload = infer_payload([request(5, "é.png", **sampling), request(6, "/b.png", **sampling)], "find all")
    assert json.loads(json.dumps(payload)) == {
        "infer_requests": [
            {
                "messages": [{"role": "user", "content": "<image>find all"}],
                "images": [path],
                "data_dict": {"coordexp": {"seed": seed, "guard": True, "size": [8, 8]}},
            }
            for path, seed in ((str(tmp_path / "é.png"), 5), ("/b.png", 6))
        ],
        "request_config": {
            "max_tokens": 9,
            "temperature": 0.5,
            "top_k": 7,
            "top_p": 0.9,
            "repetition_penalty": 1.0,
            "stop": [],
            "seed": 5,
            "n": 1,
            "return_details": True,
            "logprobs": True,
        },
    }


def test_a_question_with_an_image_tag_is_refused():
    with pytest.raises(EngineError, match=r"its prompt contains <image>"):
        infer_payload([request()], "what is <image>?")


def answer(ids: list[int], reason: str) -> InferItem:
    choice = {"token_ids": ids, "finish_reason": reason, "logprobs": {"content": [{"logprob": -0.1}] * len(ids)}}
    return InferItem.model_validate({"response": {"prompt_token_ids": [1, 2], "choices": [choice]}})


@pytest.mark.scenario("R07.C5", on="pure")
@pytest.mark.parametrize(
    ("ids", "reported", "kept", "reason"),
    [
        ([5, 6, END], "stop", 2, "stop"),
        ([5, 6], "stop", 2, "stop"),  # without the stop token (D26)
        ([5, 6, OTHER_END], "stop", 2, "stop"),
        ([5, 6], "length", 2, "length"),
        ([5, 7, 7, END], "repeat", 3, "repeat"),
        ([END], "stop", 0, "stop"),
    ],
)
def test_a_rollout_has_no_stop_token_and_says_how_it_ended(ids, reported, kept, reason):
    rollout = to_rollout(answer(ids, reported), GUARD, (), TABLE, version=3)
    assert rollout.ids == tuple(ids[:kept])
    assert (len(rollout.logprobs), rollout.finish_reason) == (kept, reason)
    assert (rollout.version, rollout.prompt_ids) == (3, (1, 2))


@pytest.mark.scenario("R20.C3", on="pure")
def test_the_text_of_a_rollout_has_no_stop_token():
    ids = TABLE.encode('{"object_1": {"desc": "猫 <|coord_5|>'.encode())
    rollout = to_rollout(answer([*ids, END], "stop"), GUARD, (), TABLE, version=3)
    assert (rollout.text, rollout.ids) == ('{"object_1": {"desc": "猫 <|coord_5|>', tuple(ids))


def test_a_fingerprint_tells_models_apart_and_not_who_saved_them(tmp_path):
    def model(name, **config):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        TABLE.tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        return model_fingerprint(tmp_path / name)

    text = {"hidden": 8, "layers": ["a", "b"], "dtype": "float32"}
    first = model("first", transformers_version="5.1", text=text, eos=3)
    again = model("again", transformers_version="5.2", text=text | {"dtype": "bfloat16"}, eos=3)
    other = model("other", text=text | {"layers": ["a", "c"]}, eos=4)
    assert model_difference(first, again) is None
    assert model_difference(first, other).startswith("config.eos is 4 there and 3 here; config.text.layers is ")
    assert first["tokenizer.first_coord"] == TABLE.first_coord
    assert model_difference(first, json.loads(json.dumps(first))) is None


def test_one_call_decodes_in_one_way():
    with pytest.raises(ValueError, match="2 ways of decoding"):
        infer_payload([request(), replace(request(), decode=Decode.greedy(5))], "q")


# The fields of ms-swift 4.6.0 (`swift.infer_engine.protocol`), recorded from its source with their types.
RECORDED_ROLLOUT_INFER_REQUEST = {
    "messages": list[dict[str, Any]],
    "images": list[str],
    "audios": list[str],
    "videos": list[str],
    "tools": list[dict[str, Any]] | None,
    "objects": dict[str, Any],
    "chat_template_kwargs": dict[str, Any],
    "data_dict": dict[str, Any],
    "uuid": str | None,
    "add_eos": bool | Literal["auto"] | None,
}
RECORDED_REQUEST_CONFIG = {
    "max_tokens": int | None,
    "temperature": float | None,
    "top_k": int | None,
    "top_p": float | None,
    "min_p": float | None,
    "repetition_penalty": float | None,
    "num_beams": int,
    "stop": list[str] | None,
    "seed": int | None,
    "stream": bool,
    "logprobs": bool,
    "top_logprobs": int | None,
    "prompt_logprobs": int | None,
    "n": int,
    "best_of": int | None,
    "presence_penalty": float,
    "frequency_penalty": float,
    "length_penalty": float,
    "return_details": bool,
    "structured_outputs_regex": str | None,
}


@pytest.mark.scenario("R40.C2", "R40.C1", on="pure")
@pytest.mark.parametrize("mode", ["greedy", "sampling"])
def test_payloads_are_json_with_fields_and_types_of_the_recorded_dataclasses_of_ms_swift(mode):
    payload = infer_payload([request(5, mode=mode), request(6, mode=mode)], "Detect all objects.")
    payload = json.loads(json.dumps(payload))
    assert payload.keys() == {"infer_requests", "request_config"}
    for sent in payload["infer_requests"]:
        assert "messages" in sent  # the one field without a default
        assert_fits(sent, RECORDED_ROLLOUT_INFER_REQUEST)
    assert_fits(payload["request_config"], RECORDED_REQUEST_CONFIG)


def assert_fits(sent: dict[str, Any], fields: dict[str, Any]) -> None:
    for name, value in sent.items():
        TypeAdapter(fields[name]).validate_python(value, strict=True)


@pytest.mark.scenario("R40.C1", on="pure")
def test_the_server_serves_or_refuses_every_recorded_field_of_ms_swift():
    assert set(InferRequest.model_fields) == set(RECORDED_ROLLOUT_INFER_REQUEST)
    assert set(RequestConfig.model_fields) | set(NEUTRAL) == set(RECORDED_REQUEST_CONFIG)
