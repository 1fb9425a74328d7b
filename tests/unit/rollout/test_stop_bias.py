"""The stop bias reaches exactly the tokens that complete `}}`, and rollout servers refuse it."""

import random

import pytest
import torch

from coordexp.errors import EngineError
from coordexp.rollout.backend import Decode, ImageRef, Request
from coordexp.rollout.hugging_face import ClosingTokens, Recorder, StopBias, engine_bias
from coordexp.servers.asking import infer_payload
from tests.vocabularies import table

VOCABULARIES = ["small", "qwen", "random-1", "random-2", "random-3"]


def changed_ids(name, last_ids, bias=2.0):
    """Return, for each last token of an answer, the ids whose scores the processor changes: by exactly the
    bias."""
    vocabulary = table(name)
    scores = torch.zeros(len(last_ids), len(vocabulary.pieces) + 5)
    biased = StopBias(ClosingTokens.of(vocabulary), bias)(torch.tensor(last_ids)[:, None], scores)
    assert ((biased == 0) | (biased == -bias)).all()
    return [set(row.nonzero()[:, 0].tolist()) for row in biased]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_token_is_biased_if_and_only_if_it_completes_the_end_of_an_answer(name):
    pieces, chooser = table(name).pieces, random.Random(0)
    braces = [id for id, piece in enumerate(pieces) if b"}" in piece]
    last_ids = [*braces[:20], *(chooser.randrange(len(pieces)) for _ in range(10))]
    for last, biased in zip(last_ids, changed_ids(name, last_ids), strict=True):
        assert biased == {id for id in braces if b"}}" in pieces[last][-1:] + pieces[id]}


@pytest.mark.parametrize("name", ["small", "qwen"])
def test_the_last_token_of_an_answer_is_biased_and_no_other(name):
    box = '{"desc": "red cup", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_30|>", "<|coord_40|>"]}'
    ids = table(name).encode(f'{{"object_1": {box}, "object_2": {box}}}'.encode())
    biased = changed_ids(name, ids[:-1])
    assert [id in row for id, row in zip(ids[1:], biased, strict=True)] == [False] * (len(ids) - 2) + [True]


def test_rows_are_biased_by_their_own_last_token_and_below_0_closing_becomes_likelier():
    vocabulary = table("small")
    brace, other = vocabulary.byte_ids[ord("}")], vocabulary.byte_ids[ord("a")]
    scores = torch.zeros(3, len(vocabulary.pieces))
    scores[2, brace] = -torch.inf  # the guard of another row, for example
    processor = StopBias(ClosingTokens.of(vocabulary), -3.0)
    biased = processor(torch.tensor([[other, brace], [brace, other], [other, brace]]), scores)
    assert biased[:, brace].tolist() == [3.0, 0.0, -torch.inf]
    assert scores[0, brace] == 0.0, "the scores that others recorded have changed"


def test_recorded_log_probabilities_are_those_before_the_bias():
    vocabulary = table("small")
    brace = vocabulary.byte_ids[ord("}")]
    scores = torch.randn(1, len(vocabulary.pieces), generator=torch.Generator().manual_seed(0))
    recorder = Recorder()
    StopBias(ClosingTokens.of(vocabulary), 5.0)(torch.tensor([[brace]]), recorder(torch.tensor([[brace]]), scores))
    recorded = recorder.logprobs(torch.tensor([[brace]]))
    assert recorded[0, 0] == scores.log_softmax(-1)[0, brace]


def test_an_engine_gets_the_tokens_that_close_an_answer_alone():
    vocabulary = table("qwen")
    bias = engine_bias(Decode(9, stop_bias=1.5), vocabulary)
    assert {vocabulary.pieces[id] for id in bias} >= {b"}}", b'"}}'}
    assert all(b"}}" in vocabulary.pieces[id] for id in bias) and set(bias.values()) == {-1.5}
    assert engine_bias(Decode(9), vocabulary) == {}


def test_an_engine_whose_tokenizer_closes_answers_with_two_tokens_is_refused():
    assert engine_bias(Decode(9), table("small")) == {}
    with pytest.raises(EngineError, match=r"stop bias 1: this tokenizer has no single token[\s\S]*--backend hf"):
        engine_bias(Decode(9, stop_bias=1.0), table("small"))


def test_sampling_parameters_of_an_engine_carry_the_bias():
    from coordexp.rollout.generate import _sampling_params

    assert _sampling_params(Decode(9, stop_bias=1.0), {}, {7: -1.0}, 2, 3).logit_bias == {7: -1.0}
    assert _sampling_params(Decode(9), {}, {}, 2, 3).logit_bias is None


def test_a_request_with_a_stop_bias_is_not_sent_to_a_server():
    request = Request(ImageRef("a.png", 8, 8), Decode(9, stop_bias=-0.5))
    with pytest.raises(EngineError, match=r"servers cannot decode with a stop bias, and this request has -0\.5"):
        infer_payload([request], "q")
