"""The options of `predict` that decide the answers: what is refused, what --resume compares, and seeds."""

from pathlib import Path
from typing import Any

from coordexp.config.settings import Custom
from coordexp.data import Questions, Record
from coordexp.detect.answering import Answering, AnswerOptions, AskedModel, count_per_call
from coordexp.rollout.backend import ImageRef

DEFAULTS: dict[str, Any] = {
    "max_new_tokens": 9,
    "stop_bias": 0.0,
    "dedup": None,
    "samples": 0,
    "temperature": None,
    "top_p": None,
    "seed": None,
}


def test_options_at_their_defaults_are_not_part_of_the_identity_so_earlier_releases_can_be_resumed():
    assert AnswerOptions(**DEFAULTS).identity() == {"max_new_tokens": 9}


def test_every_option_that_changes_an_answer_is_part_of_the_identity():
    changes = {"stop_bias": -1.0, "dedup": 0.7, "samples": 2}
    sampling = {"temperature": 0.7, "top_p": 0.9, "seed": 5}
    identities = [AnswerOptions(**DEFAULTS).identity()]
    identities += [AnswerOptions(**DEFAULTS | {name: value}).identity() for name, value in changes.items()]
    identities += [
        AnswerOptions(**DEFAULTS | {"samples": 2, name: value}).identity() for name, value in sampling.items()
    ]
    assert all(identity not in identities[:k] for k, identity in enumerate(identities))
    explicit = {"samples": 2, "temperature": 1.0, "top_p": 1.0, "seed": 0}
    assert AnswerOptions(**DEFAULTS | explicit).identity() == AnswerOptions(**DEFAULTS | {"samples": 2}).identity()


def test_an_engine_and_a_server_get_several_batches_at_once_and_transformers_gets_one():
    assert count_per_call(16, None, None) == count_per_call(16, "hf", None) == 16
    assert count_per_call(16, "vllm", None) == count_per_call(16, None, "http://localhost:8000") == 64


QUESTIONS = Questions.of(Custom())


def make_request(image_id: int, sample: int | None, **changes: Any) -> Any:
    options = AnswerOptions(**DEFAULTS | changes)
    model: Any = AskedModel(Path(), None, QUESTIONS, None)  # type: ignore[arg-type]
    answering = Answering(model, None, options)  # type: ignore[arg-type]
    record = Record(f"{image_id}.png", 8, 8, "bin", ())
    return answering.make_request(image_id, record, ImageRef(record.image, 8, 8), sample)


def test_the_samples_of_an_image_have_seeds_of_their_own_whatever_the_number_of_samples_is():
    seeds = {(image, k): make_request(image, k, samples=8).seed for image in (1, 7) for k in range(1, 9)}
    assert len(set(seeds.values())) == 16
    assert make_request(7, 2, samples=2).seed == seeds[7, 2]
    assert make_request(7, 2, samples=2, seed=1).seed != seeds[7, 2]


def test_the_stop_bias_holds_for_greedy_and_for_sampled_answers():
    options = {"samples": 1, "stop_bias": 1.5, "temperature": 0.7, "top_p": 0.9}
    greedy, sampled = (make_request(1, sample, **options).decode for sample in (None, 1))
    assert (greedy.mode, greedy.temperature, greedy.stop_bias) == ("greedy", 0.0, 1.5)
    assert (sampled.mode, sampled.temperature, sampled.top_p, sampled.stop_bias) == ("sampling", 0.7, 0.9, 1.5)
