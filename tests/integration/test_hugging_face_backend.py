"""Rollouts with transformers on a real, tiny Qwen3-VL: batches, beams, sampling, the guard, and the model's
state."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from coordexp.answers.table import VocabularyTable
from coordexp.config.rollout import RepeatTerminate
from coordexp.config.settings import Adapter
from coordexp.demo.scenes import SceneSettings, write_scenes
from coordexp.rollout.backend import Decode, ImageRef, Request
from coordexp.rollout.hugging_face import HuggingFaceBackend
from coordexp.rollout.prompt import PromptBuilder
from coordexp.train.learner import with_adapter

pytestmark = pytest.mark.timeout(240)
SIDES = (96, 64, 128)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> list[ImageRef]:
    """Twelve images of three sizes, which take turns."""
    folder = tmp_path_factory.mktemp("images")
    for side in SIDES:
        write_scenes(folder / str(side), SceneSettings(side=side), train=1, val=4, seed=side)
    return [
        ImageRef(str(file), side, side)
        for k in range(4)
        for side in SIDES
        for file in sorted((folder / str(side)).glob("images/val/*.png"))[k : k + 1]
    ]


class Parts:
    """The model, and backends that generate with it."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self.prompts = PromptBuilder(AutoProcessor.from_pretrained(folder), "Detect all objects.")
        self.table = VocabularyTable.from_folder(folder)

    def backend(self, decode_batch_size: int = 12) -> HuggingFaceBackend:
        return HuggingFaceBackend(lambda: self.model, self.prompts, self.table, decode_batch_size)

    def logprobs(self, image: ImageRef, ids) -> torch.Tensor:
        """Return the log probability of each of the ids behind the prompt, from one plain forward pass."""
        prompt = self.prompts.ids(image.width, image.height)
        patches, grid = self.prompts.pixels(image.path, (image.width, image.height))
        whole = torch.tensor([[*prompt, *ids]])
        kinds = (whole == self.prompts.image_token).int()
        with torch.no_grad():
            logits = self.model(
                input_ids=whole, mm_token_type_ids=kinds, pixel_values=patches, image_grid_thw=grid
            ).logits[0]
        return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.fixture
def parts(lively_model) -> Parts:
    made = Parts(lively_model)
    made.model.eval()
    return made


@pytest.fixture
def stopping(parts) -> Parts:
    """A random model hardly ever writes the end of turn. Here a token that it writes often stands for it."""
    parts.table = replace(parts.table, end_of_turn=LIKED)
    return parts


LIKED = 1309


def requests(images, decode: Decode, first_seed: int = 1) -> list[Request]:
    return [Request(image, decode, first_seed + k) for k, image in enumerate(images)]


@contextmanager
def watching(model, monkeypatch) -> Iterator[list[dict]]:
    """Yield a list of the arguments of each call of `model.generate`."""
    calls, generate = [], model.generate

    def generate_and_record(**inputs):
        calls.append(inputs)
        return generate(**inputs)

    with monkeypatch.context() as patch:
        patch.setattr(model, "generate", generate_and_record)
        yield calls


@pytest.mark.scenario("R20.C5", "R20.S1", on="model")
def test_beam_search_gives_one_answer_and_it_is_the_most_probable_of_the_beams(stopping, images):
    """Each finalist is scored by the model itself, in one forward pass."""
    stopping.model.lm_head.register_forward_hook(
        lambda *given: 6 * given[-1]
    )  # more certain, so that long beams can win
    rollouts = stopping.backend().generate(requests(images, Decode(10, "beam", num_beams=4)))
    assert len(rollouts) == len(images)
    others = Counter()
    for image, rollout in zip(images, rollouts, strict=True):
        finalists = _finalists(stopping, image, beams=4)
        totals = {ids: stopping.logprobs(image, ids).sum().item() for ids in finalists}
        assert len(totals) == 4
        best = max(totals, key=totals.__getitem__)
        assert rollout.ids == tuple(id for id in best if id != LIKED)
        assert rollout.finish_reason == ("stop" if LIKED in best else "length")
        assert rollout.logprobs == ()
        others["mean"] += best != max(totals, key=lambda ids: totals[ids] / len(ids))
        others["short"] += best != max(totals, key=lambda ids: totals[ids] * len(ids))
    assert min(others["mean"], others["short"]) > 0, "another measure than the total prefers another beam"


def _finalists(parts: Parts, image: ImageRef, beams: int) -> list[tuple[int, ...]]:
    """Return all beams that are left at the end, including their stop token."""
    prompt, stop = parts.prompts.ids(image.width, image.height), parts.table.end_of_turn
    patches, grid = parts.prompts.pixels(image.path, (image.width, image.height))
    ids = torch.tensor([prompt])
    with torch.no_grad():
        sequences = parts.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == parts.prompts.image_token).int(),
            pixel_values=patches,
            image_grid_thw=grid,
            max_new_tokens=10,
            do_sample=False,
            num_beams=beams,
            num_return_sequences=beams,
            length_penalty=0.0,
            eos_token_id=stop,
            pad_token_id=stop,
        )
    rows = [row[len(prompt) :] for row in sequences.tolist()]
    return [tuple(row[: row.index(stop) + 1] if stop in row else row) for row in rows]


@pytest.mark.scenario("R10.C1", "R10.C5", "R10.S2", on="model")
@pytest.mark.parametrize("size", [1, 2, 5, 7, 12, 50])
def test_no_more_sequences_than_allowed_are_decoded_at_once_and_answers_are_the_same(
    parts, images, monkeypatch, size
):
    alone = [parts.backend(1).generate([request])[0] for request in requests(images, Decode.greedy(16))]
    with watching(parts.model, monkeypatch) as calls:
        rollouts = parts.backend(size).generate(requests(images, Decode.greedy(16)))
    sequences = [len(call["input_ids"]) for call in calls]
    assert max(sequences) == min(size, 12)
    assert sum(sequences) == 12
    assert len(calls) == -(-12 // size)
    assert [rollout.ids for rollout in rollouts] == [rollout.ids for rollout in alone]
    assert [rollout.prompt_ids for rollout in rollouts] == [rollout.prompt_ids for rollout in alone]
    for rollout, other in zip(rollouts, alone, strict=True):
        assert rollout.logprobs == pytest.approx(other.logprobs, abs=1e-3)
    assert len({rollout.ids for rollout in rollouts}) > 8


@pytest.mark.scenario("R06.S2", on="model")
def test_generation_takes_one_padded_row_per_image_and_no_packed_row(parts, images, monkeypatch):
    with watching(parts.model, monkeypatch) as calls:
        parts.backend(12).generate(requests(images, Decode.greedy(2)))
    (inputs,) = calls
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    longest = max(len(parts.prompts.ids(image.width, image.height)) for image in images)
    assert ids.shape == mask.shape == (12, longest)
    assert (mask == 0).any()
    for row, kept, image, grid in zip(ids, mask, images, inputs["image_grid_thw"], strict=True):
        prompt = parts.prompts.ids(image.width, image.height)
        assert row[kept == 1].tolist() == prompt
        assert kept.tolist() == [0] * (longest - len(prompt)) + [1] * len(prompt)
        assert prompt.count(parts.prompts.image_token) == int(grid.prod()) // 4
    assert len(inputs["pixel_values"]) == int(inputs["image_grid_thw"].prod(1).sum())
    packed = {"position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
    assert not packed & set(inputs)


@pytest.mark.scenario("R20.C2", on="model")
@pytest.mark.parametrize("fails", [False, True])
def test_answers_have_no_gradient_and_every_module_is_in_its_former_mode_afterwards(parts, images, fails):
    model, seen = parts.model.train(), []
    frozen = model.model.visual.eval()  # a tower that is not trained may be in this mode
    before = {name: module.training for name, module in model.named_modules()}
    assert len(set(before.values())) == 2

    def look(*_):
        seen.append((torch.is_grad_enabled(), any(module.training for module in model.modules())))
        if fails and len(seen) == 2:
            raise RuntimeError("the engine broke")

    model.register_forward_pre_hook(look)
    if fails:
        with pytest.raises(RuntimeError, match="the engine broke"):
            parts.backend().generate(requests(images, Decode.greedy(3)))
    else:
        parts.backend().generate(requests(images, Decode.greedy(3)))
    assert len(seen) >= 2
    assert set(seen) == {(False, False)}
    assert torch.is_grad_enabled()
    assert {name: module.training for name, module in model.named_modules()} == before
    assert not frozen.training
    assert all(weight.grad is None for weight in model.parameters())


GUARD = RepeatTerminate(
    enabled=True, min_new_tokens=2, max_consecutive_token_repeats=3, ngram_size=2, ngram_repeats=2
)


@pytest.mark.parametrize("mode", ["greedy", "sampling"])
def test_the_guard_ends_a_looping_sequence_and_leaves_the_others_bit_identical(parts, images, mode):
    free = Decode(40, mode, temperature=0.3 if mode == "sampling" else 0.0)
    plain = parts.backend().generate(requests(images, free))
    guarded = parts.backend().generate(requests(images, replace(free, guard=GUARD)))
    ended = [rollout.finish_reason == "repeat" for rollout in guarded]
    assert 2 <= sum(ended) <= 10
    for before, after, looped in zip(plain, guarded, ended, strict=True):
        if looped:
            assert len(after.ids) < len(before.ids)
            assert before.ids[: len(after.ids)] == after.ids
            assert before.logprobs[: len(after.ids)] == after.logprobs
            *_, c, b, a = after.ids
            assert c == b == a or after.ids[-4:-2] == (b, a)
        else:
            assert after == before
    disabled = replace(free, guard=GUARD.model_copy(update={"enabled": False}))
    assert parts.backend().generate(requests(images, disabled)) == plain


def test_an_answer_that_stops_by_itself_does_not_include_its_stop_and_is_not_called_a_loop(stopping, images):
    rollouts = stopping.backend().generate(requests(images, Decode(40, guard=GUARD)))
    reasons = Counter(rollout.finish_reason for rollout in rollouts)
    assert reasons["stop"] > 0
    for rollout in rollouts:
        assert LIKED not in rollout.ids
        assert len(rollout.logprobs) == len(rollout.ids)
        assert (rollout.finish_reason == "length") == (len(rollout.ids) == 40)


SAMPLING = Decode(16, "sampling", temperature=0.8, top_p=0.95)


def test_sampled_answers_are_the_same_alone_in_other_batches_and_in_another_order(parts, images):
    asked = requests(images, SAMPLING)
    whole = parts.backend(12).generate(asked)
    answer = {request.seed: rollout.ids for request, rollout in zip(asked, whole, strict=True)}
    for size, order in ((1, asked), (5, asked), (12, asked[::-1]), (7, asked[3:9])):
        rollouts = parts.backend(size).generate(order)
        assert [rollout.ids for rollout in rollouts] == [answer[request.seed] for request in order]
    greedy = parts.backend().generate(requests(images, Decode.greedy(16)))
    assert sum(rollout.ids != other.ids for rollout, other in zip(whole, greedy, strict=True)) > 6


@pytest.mark.parametrize("decode", [Decode.greedy(12), replace(SAMPLING, top_k=20, temperature=1.7)])
def test_log_probabilities_are_those_of_the_model_itself(parts, images, decode):
    for image, rollout in zip(images, parts.backend().generate(requests(images, decode)), strict=True):
        readable = (
            rollout.ids.index(token) if (token := parts.prompts.image_token) in rollout.ids else len(rollout.ids)
        )
        expected = parts.logprobs(image, rollout.ids[:readable]).tolist()
        assert rollout.logprobs[:readable] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("adapter", [None, Adapter(rank=2, alpha=4)])
def test_the_generation_config_of_the_checkpoint_does_not_change_the_answers(parts, images, adapter):
    """Qwen2.5-VL, for example, comes with a repetition penalty."""
    asked = requests(images, Decode.greedy(16))
    expected = parts.backend().generate(asked)
    base = parts.model
    parts.model = with_adapter(base, adapter, parts.table.first_coord)
    own = base.generation_config
    own.update(repetition_penalty=1.3, no_repeat_ngram_size=2, do_sample=True, temperature=0.7, top_k=20)
    rollouts = parts.backend().generate(asked)
    assert [rollout.ids for rollout in rollouts] == [rollout.ids for rollout in expected]
    assert base.generation_config is own
