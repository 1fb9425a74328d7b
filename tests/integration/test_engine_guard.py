"""The repeat guard in a real vLLM engine ends the same answers as with transformers, at the same token and for the
same reason."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from coordexp.answers.table import VocabularyTable
from coordexp.config.rollout import RepeatTerminate
from coordexp.rollout.backend import Decode, FinishReason, ImageRef, Request
from coordexp.rollout.guard import ARGUMENT, EngineGuard, cut_at_end, loop_in
from coordexp.rollout.hugging_face import HuggingFaceBackend
from coordexp.rollout.prompt import PromptBuilder, open_image
from coordexp.servers import SWIFT_REPEAT_GUARD
from tests.engines import drawing, start_vllm, stop_vllm
from tests.fake_swift import FakeSwiftRollout
from tests.unit.rollout.test_guard import guard

pytestmark = [pytest.mark.engine, pytest.mark.timeout(480)]

LIMIT = 64
OFTEN = 473  # a token that this random model writes often; it stands for an object key
RULES = {
    "token": {"max_consecutive_token_repeats": 4},
    "ngram": {"ngram_size": 2, "ngram_repeats": 2},
    "keys": {"max_object_keys": 1},
    "token, late": {"max_consecutive_token_repeats": 2, "min_new_tokens": 25},
}
OFF = RepeatTerminate()


Answers = list[tuple[tuple[int, ...], FinishReason]]


class Both:
    """The same model behind transformers and behind vLLM."""

    def __init__(self, folder: Path, engine: Any) -> None:
        self.engine, self.table = engine, VocabularyTable.from_folder(folder)
        self.prompts = PromptBuilder(AutoProcessor.from_pretrained(folder), "Detect all objects.")
        model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self.backend = HuggingFaceBackend(lambda: model, self.prompts, self.table, decode_batch_size=12)

    def with_transformers(self, images: Sequence[ImageRef], guard: RepeatTerminate) -> Answers:
        rollouts = self.backend.generate([Request(image, Decode(LIMIT, guard=guard)) for image in images])
        return [(rollout.ids, rollout.finish_reason) for rollout in rollouts]

    def with_vllm(self, images: Sequence[ImageRef], guards: Sequence[RepeatTerminate]) -> Answers:
        """Answer all images in one call, each with its own guard."""
        stop = self.table.end_of_turn
        sampling = [self.greedy(self.arguments(guard)) for guard in guards]
        outputs = self.engine.generate(self.inputs(images), sampling, use_tqdm=False)
        answers = [
            cut_at_end(output.outputs[0].token_ids, stop, guard, [OFTEN])
            for output, guard in zip(outputs, guards, strict=True)
        ]
        return [(tuple(ids), reason) for ids, reason in answers]

    def inputs(self, images: Sequence[ImageRef]) -> list[dict[str, Any]]:
        return [
            {"prompt": self.prompts.text(), "multi_modal_data": {"image": open_image(image.path, image.size)}}
            for image in images
        ]

    def arguments(self, guard: RepeatTerminate) -> dict[str, Any]:
        """Return all settings, also those of a disabled guard: a request without settings gets the plugin's."""
        whole = EngineGuard(**guard.model_dump(), key_pattern=(OFTEN,), end_of_turn=self.table.end_of_turn)
        return {ARGUMENT: whole.model_dump(mode="json")}

    def greedy(self, arguments: dict[str, Any] | None) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0.0,
            max_tokens=LIMIT,
            ignore_eos=True,
            stop_token_ids=[self.table.end_of_turn],
            extra_args=arguments,
        )


@pytest.fixture(scope="module")
def both(lively_model: Path) -> Iterator[Both]:
    """The engine is started as in a server of ms-swift: only the plugin gives it the guard. Requests may carry
    other settings, or disable the guard."""
    with FakeSwiftRollout(guard(**RULES["token"])) as swift:
        swift.import_external_plugins([SWIFT_REPEAT_GUARD])
        engine = start_vllm(lively_model)
        yield Both(lively_model, engine)
        stop_vllm(engine)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[ImageRef]:
    """More images than the engine answers at once, so that rows of its batch are used again."""
    folder, images = tmp_path_factory.mktemp("drawings"), []
    for seed in range(12):
        side = (128, 96, 160, 64)[seed % 4]
        drawing(seed, side).save(folder / f"{seed}.png")
        images.append(ImageRef(str(folder / f"{seed}.png"), side, side))
    return images


@pytest.mark.scenario("R33.C3", "R33.S3", on="engine")
def test_an_engine_that_was_started_with_the_plugin_guards_requests_that_carry_no_settings(both, images):
    outputs = both.engine.generate(both.inputs(images), both.greedy(None), use_tqdm=False)
    rule, stop = guard(**RULES["token"]), both.table.end_of_turn
    answers = [cut_at_end(output.outputs[0].token_ids, stop, rule, ()) for output in outputs]
    assert [(tuple(ids), reason) for ids, reason in answers] == both.with_transformers(images, rule)
    assert 2 <= sum(reason == "repeat" for _, reason in answers) < len(images)


@pytest.mark.scenario("R34.S1", on="engine")
def test_the_engine_ends_the_answers_that_transformers_ends_at_the_same_token_for_the_same_reason(
    both, images, monkeypatch
):
    monkeypatch.setattr("coordexp.rollout.guard.key_pattern", lambda table: (OFTEN,))
    guards = [guard(**rule) for rule in RULES.values()] + [OFF]
    expected = [both.with_transformers(images, rule) for rule in guards]
    pairs = [(image, rule) for image in images for rule in guards]  # all rules side by side in one batch
    answers = both.with_vllm([image for image, _ in pairs], [rule for _, rule in pairs])
    by_guard = [answers[k :: len(guards)] for k in range(len(guards))]
    assert by_guard == expected
    free = by_guard.pop()
    assert Counter(reason for _, reason in free) == {"length": len(images)}
    assert {len(ids) for ids, _ in free} == {LIMIT}
    for name, rule, rows in zip(RULES, guards, by_guard, strict=False):
        loops = {loop_in(ids, ids.count(OFTEN), rule): ids for ids, reason in rows if reason == "repeat"}
        assert list(loops) == [name.partition(",")[0]]
        assert 2 <= sum(reason == "repeat" for _, reason in rows) < len(images), name
        for (ids, reason), (whole, _) in zip(rows, free, strict=True):
            assert ids == whole[: len(ids)]
            assert (len(ids) < LIMIT) == (reason == "repeat")
