"""How the outputs of a vLLM engine become rollouts. There is no engine: the outputs are fakes of its classes."""

from types import SimpleNamespace

import pytest

from coordexp.rollout.backend import Decode, ImageRef, Request, Rollout
from coordexp.rollout.generate import _to_rollout, generate_rollouts
from tests.vocabularies import table

TABLE = table("small")
TEXT = '{"object_1": {"desc": "猫 <|coord_5|>'


def fake_output(ids: list[int]) -> SimpleNamespace:
    """Return an output with those fields of vLLM's `RequestOutput` that are read."""
    logprobs = [{id: SimpleNamespace(logprob=-0.5)} for id in ids]
    answer = SimpleNamespace(token_ids=ids, finish_reason="stop", logprobs=logprobs, weight_versions=None)
    return SimpleNamespace(prompt_token_ids=[1, 2], outputs=[answer])


@pytest.mark.scenario("R07.C5", "R20.C3", on="fake")
def test_the_answer_of_an_engine_has_its_text_without_the_stop_token():
    ids = TABLE.encode(TEXT.encode())
    rollout = _to_rollout(fake_output([*ids, TABLE.end_of_turn]), Decode.greedy(99), (), TABLE)
    assert rollout == Rollout((1, 2), tuple(ids), TEXT, (-0.5,) * len(ids), "stop", 0)


@pytest.mark.scenario("R20.C3", on="fake")
def test_text_is_decoded_from_bytes_also_where_a_character_is_split_over_tokens_or_cut():
    """Half a character becomes one replacement character, and an id without a token is left out."""
    split = [TABLE.byte_ids[byte] for byte in "猫".encode()]
    assert Rollout.of(TABLE, (), split, (), "stop").text == "猫"
    assert Rollout.of(TABLE, (), split[:2], (), "length").text == "\ufffd"
    assert Rollout.of(TABLE, (), [*split, 10**6], (), "stop").text == "猫"


def test_a_call_that_is_interrupted_leaves_no_requests_in_the_engine():
    aborted = []

    def interrupt(*_, **options):
        raise KeyboardInterrupt

    core = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=100),
        output_processor=SimpleNamespace(request_states={"a": None}),
        abort_request=lambda names, internal: aborted.extend(names),
    )
    prompts = SimpleNamespace(ids=lambda *_: [1], text=lambda _: "")
    request = Request(ImageRef("a.png", 8, 8, pixels=object()), Decode.greedy(3))
    with pytest.raises(KeyboardInterrupt):
        generate_rollouts(SimpleNamespace(llm_engine=core, generate=interrupt), prompts, TABLE, [request])
    assert aborted == ["a"]
