"""Rollouts by transformers on a real, tiny Qwen3-VL: batches, beams, sampling, the guard, and what is left."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from coordexp.config.rollout import RepeatTerminate, RolloutMatching
from coordexp.config.settings import Adapter
from coordexp.data import RecordFile
from coordexp.demo.scenes import SceneSettings
from coordexp.demo.write_scenes import write_scenes
from coordexp.rollout.backend import Decode, ImageRef, Request
from coordexp.rollout.hugging_face import HuggingFaceBackend
from coordexp.rollout.prompt import PromptBuilder
from coordexp.train.adapter import with_adapter
from coordexp.train.counters import Ledger
from coordexp.train.encode import Casebook, CorrectedRollouts, Moment
from coordexp.train.evaluation import AnswerEvaluation
from coordexp.vocab import VocabularyTable
from tests.scripted import Said, ScriptedBackend

pytestmark = pytest.mark.timeout(120)
SIDES = (96, 64, 128)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> list[ImageRef]:
    """Twelve, of three sizes that take turns."""
    folder = tmp_path_factory.mktemp("pictures")
    for side in SIDES:
        write_scenes(folder / str(side), SceneSettings(side=side), train=1, val=4, seed=side, advance=lambda: None)
    return [
        ImageRef(str(file), side, side)
        for k in range(4)
        for side in SIDES
        for file in sorted((folder / str(side)).glob("images/val/*.png"))[k : k + 1]
    ]


class Parts:
    """The model, and backends that ask it."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self.prompts = PromptBuilder(AutoProcessor.from_pretrained(folder), "Detect all objects.")
        self.table = VocabularyTable.from_folder(folder)

    def backend(self, decode_batch_size: int = 12) -> HuggingFaceBackend:
        return HuggingFaceBackend(lambda: self.model, self.prompts, self.table, decode_batch_size)

    def logprobs(self, picture: ImageRef, ids) -> torch.Tensor:
        """Of each of the ids behind the prompt, by one plain forward pass."""
        prompt = self.prompts.ids(picture.width, picture.height)
        patches, grid = self.prompts.pixels(picture.path, (picture.width, picture.height))
        whole = torch.tensor([[*prompt, *ids]])
        kinds = (whole == self.prompts.image_token).int()
        with torch.no_grad():
            logits = self.model(
                input_ids=whole, mm_token_type_ids=kinds, pixel_values=patches, image_grid_thw=grid
            ).logits[0]
        return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.fixture
def parts(lively_model) -> Parts:
    found = Parts(lively_model)
    found.model.eval()
    return found


@pytest.fixture
def stopping(parts) -> Parts:
    """A random model hardly ever writes the end of turn. Here a token that it likes stands for it."""
    parts.table = replace(parts.table, end_of_turn=LIKED)
    return parts


LIKED = 1309


def requests(pictures, decode: Decode, first_seed: int = 1) -> list[Request]:
    return [Request(picture, decode, first_seed + k) for k, picture in enumerate(pictures)]


@contextmanager
def watching(model, monkeypatch) -> Iterator[list[dict]]:
    """What `model.generate` is given, call by call."""
    calls, plain = [], model.generate

    def spied(**inputs):
        calls.append(inputs)
        return plain(**inputs)

    with monkeypatch.context() as patch:
        patch.setattr(model, "generate", spied)
        yield calls


@pytest.mark.scenario("R20.C5", "R20.S1", on="model")
def test_beam_search_gives_one_answer_and_it_is_the_most_probable_of_the_beams(stopping, pictures):
    """Each finalist is scored by the model itself, in one forward pass."""
    stopping.model.lm_head.register_forward_hook(lambda *given: 6 * given[-1])  # surer, so that long beams can win
    found = stopping.backend().generate(requests(pictures, Decode(10, "beam", num_beams=4)))
    assert len(found) == len(pictures)
    others = Counter()
    for picture, rollout in zip(pictures, found, strict=True):
        finalists = _finalists(stopping, picture, beams=4)
        totals = {ids: stopping.logprobs(picture, ids).sum().item() for ids in finalists}
        assert len(totals) == 4
        best = max(totals, key=totals.__getitem__)
        assert rollout.ids == tuple(id for id in best if id != LIKED)
        assert rollout.finish_reason == ("stop" if LIKED in best else "length")
        assert rollout.logprobs == ()
        others["mean"] += best != max(totals, key=lambda ids: totals[ids] / len(ids))
        others["short"] += best != max(totals, key=lambda ids: totals[ids] * len(ids))
    assert min(others["mean"], others["short"]) > 0, "a beam that is better by another measure than the total"


def _finalists(parts: Parts, picture: ImageRef, beams: int) -> list[tuple[int, ...]]:
    """All beams that are left at the end, up to and with their stop."""
    prompt, stop = parts.prompts.ids(picture.width, picture.height), parts.table.end_of_turn
    patches, grid = parts.prompts.pixels(picture.path, (picture.width, picture.height))
    ids = torch.tensor([prompt])
    with torch.no_grad():
        found = parts.model.generate(
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
    rows = [row[len(prompt) :] for row in found.tolist()]
    return [tuple(row[: row.index(stop) + 1] if stop in row else row) for row in rows]


def test_a_beam_is_better_than_the_greedy_answer_and_is_not_the_same(parts, pictures):
    greedy = parts.backend().generate(requests(pictures, Decode.greedy(10)))
    beam = parts.backend().generate(requests(pictures, Decode(10, "beam", num_beams=4)))
    totals = [
        [parts.logprobs(picture, rollout.ids).sum().item() for picture, rollout in zip(pictures, way, strict=True)]
        for way in (greedy, beam)
    ]
    assert sum(totals[1]) > sum(totals[0])
    assert [one.ids for one in greedy] != [one.ids for one in beam]


@pytest.mark.scenario("R10.C1", "R10.C5", "R10.S2", on="model")
@pytest.mark.parametrize("size", [1, 2, 5, 7, 12, 50])
def test_no_more_sequences_than_allowed_are_decoded_at_once_and_answers_are_the_same(
    parts, pictures, monkeypatch, size
):
    alone = [parts.backend(1).generate([request])[0] for request in requests(pictures, Decode.greedy(16))]
    with watching(parts.model, monkeypatch) as calls:
        found = parts.backend(size).generate(requests(pictures, Decode.greedy(16)))
    sequences = [len(call["input_ids"]) for call in calls]
    assert max(sequences) == min(size, 12)
    assert sum(sequences) == 12
    assert len(calls) == -(-12 // size)
    assert [one.ids for one in found] == [one.ids for one in alone]
    assert [one.prompt_ids for one in found] == [one.prompt_ids for one in alone]
    for one, other in zip(found, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
    assert len({one.ids for one in found}) > 8


@pytest.mark.parametrize(("size", "rows"), [(3, 1), (5, 1), (6, 2), (8, 2), (50, 12)])
def test_each_beam_counts_as_a_sequence(parts, pictures, monkeypatch, size, rows):
    with watching(parts.model, monkeypatch) as calls:
        parts.backend(size).generate(requests(pictures, Decode(3, "beam", num_beams=3)))
    assert max(len(call["input_ids"]) * call["num_beams"] for call in calls) <= size
    assert max(len(call["input_ids"]) for call in calls) == rows


@pytest.mark.scenario("R06.S2", on="model")
def test_generation_takes_one_padded_row_a_picture_and_no_packed_one(parts, pictures, monkeypatch):
    with watching(parts.model, monkeypatch) as calls:
        parts.backend(12).generate(requests(pictures, Decode.greedy(2)))
    (inputs,) = calls
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    longest = max(len(parts.prompts.ids(picture.width, picture.height)) for picture in pictures)
    assert ids.shape == mask.shape == (12, longest)
    assert (mask == 0).any()
    for row, kept, picture, grid in zip(ids, mask, pictures, inputs["image_grid_thw"], strict=True):
        prompt = parts.prompts.ids(picture.width, picture.height)
        assert row[kept == 1].tolist() == prompt
        assert kept.tolist() == [0] * (longest - len(prompt)) + [1] * len(prompt)
        assert prompt.count(parts.prompts.image_token) == int(grid.prod()) // 4
    assert len(inputs["pixel_values"]) == int(inputs["image_grid_thw"].prod(1).sum())
    packed = {"position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
    assert not packed & set(inputs)


@pytest.mark.scenario("R20.C3", on="model")
@pytest.mark.parametrize("decode", [Decode.greedy(16), Decode(16, "beam", num_beams=2)])
def test_an_answer_is_ids_and_the_text_that_the_tokenizer_decodes_them_to(stopping, pictures, decode):
    found = stopping.backend().generate(requests(pictures, decode))
    for one in found:
        assert one.text == stopping.table.tokenizer.decode(list(one.ids), skip_special_tokens=False)
    assert len({one.text for one in found}) > 6


@pytest.mark.scenario("R20.C2", on="model")
@pytest.mark.parametrize("fails", [False, True])
def test_answers_have_no_gradient_and_every_modules_mode_is_as_before(parts, pictures, fails):
    model, seen = parts.model.train(), []
    frozen = model.model.visual.eval()  # as one that is not trained may be left
    before = {name: module.training for name, module in model.named_modules()}
    assert len(set(before.values())) == 2

    def look(*_):
        seen.append((torch.is_grad_enabled(), any(module.training for module in model.modules())))
        if fails and len(seen) == 2:
            raise RuntimeError("the engine broke")

    model.register_forward_pre_hook(look)
    if fails:
        with pytest.raises(RuntimeError, match="the engine broke"):
            parts.backend().generate(requests(pictures, Decode.greedy(3)))
    else:
        parts.backend().generate(requests(pictures, Decode.greedy(3)))
    assert len(seen) >= 2
    assert set(seen) == {(False, False)}
    assert torch.is_grad_enabled()
    assert {name: module.training for name, module in model.named_modules()} == before
    assert not frozen.training
    assert all(weight.grad is None for weight in model.parameters())


def test_dropout_is_not_active_while_the_model_answers(parts, pictures):
    asked = requests(pictures, Decode.greedy(12))
    expected = [one.ids for one in parts.backend().generate(asked)]
    layer = parts.model.model.language_model.layers[0]
    layer.mlp = torch.nn.Sequential(layer.mlp, torch.nn.Dropout(0.5))
    parts.model.train()
    assert not torch.equal(*(parts.logprobs(pictures[0], expected[0]) for _ in range(2))), "training drops out"
    assert [one.ids for one in parts.backend().generate(asked)] == expected


GUARD = RepeatTerminate(
    enabled=True, min_new_tokens=2, max_consecutive_token_repeats=3, ngram_size=2, ngram_repeats=2
)


@pytest.mark.parametrize("mode", ["greedy", "sampling"])
def test_the_guard_ends_a_looping_sequence_and_leaves_the_others_bit_identical(parts, pictures, mode):
    free = Decode(40, mode, temperature=0.3 if mode == "sampling" else 0.0)
    plain = parts.backend().generate(requests(pictures, free))
    guarded = parts.backend().generate(requests(pictures, replace(free, guard=GUARD)))
    ended = [one.finish_reason == "repeat" for one in guarded]
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
    assert parts.backend().generate(requests(pictures, disabled)) == plain


@pytest.mark.scenario("R34.C1", on="model")
@pytest.mark.parametrize("enabled", [True, False])
def test_the_guard_of_the_settings_ends_looping_answers_in_evaluation_when_it_is_enabled(
    parts, pictures, tmp_path, enabled
):
    file = tmp_path / "val.jsonl"
    records = [
        {"image": one.path, "width": one.width, "height": one.height, "space": "bin", "objects": []}
        for one in pictures
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    cfg = RolloutMatching(max_new_tokens=40, repeat_terminate=GUARD.model_copy(update={"enabled": enabled}))
    evaluation = AnswerEvaluation(
        RecordFile(file), parts.backend(), lambda: iter(()), parts.table, cfg, tmp_path / "run"
    )
    evaluation(3)
    lines = (tmp_path / "run/evaluations/step-3.answers.jsonl").read_text().splitlines()
    reasons = Counter(json.loads(line)["finish_reason"] for line in lines)
    assert reasons.total() == len(pictures)
    assert (reasons["repeat"] >= 2) == enabled
    assert ("repeat" in reasons) == enabled


def test_the_guard_ends_an_answer_with_too_many_objects(parts, pictures, monkeypatch):
    """What the tokenizer writes for a key is, for this, a token that the random model writes often."""
    plain = parts.backend().generate(requests(pictures, Decode.greedy(40)))
    often, _ = Counter(id for one in plain for id in set(one.ids)).most_common(1)[0]
    monkeypatch.setattr("coordexp.rollout.guard.key_pattern", lambda table: (often,))
    guard = RepeatTerminate(enabled=True, min_new_tokens=0, max_object_keys=1)
    guarded = parts.backend().generate(requests(pictures, Decode(40, guard=guard)))
    assert "repeat" in {one.finish_reason for one in guarded}
    for before, after in zip(plain, guarded, strict=True):
        where = [k for k, id in enumerate(before.ids) if id == often]
        if len(where) > 1 and where[1] < 39:
            assert (after.ids, after.finish_reason) == (before.ids[: where[1] + 1], "repeat")
        else:
            assert after == before


def test_an_answer_that_stops_by_itself_is_without_its_stop_and_is_not_called_a_loop(stopping, pictures):
    found = stopping.backend().generate(requests(pictures, Decode(40, guard=GUARD)))
    reasons = Counter(one.finish_reason for one in found)
    assert reasons["stop"] > 0
    for one in found:
        assert LIKED not in one.ids
        assert len(one.logprobs) == len(one.ids)
        assert (one.finish_reason == "length") == (len(one.ids) == 40)


SAMPLING = Decode(16, "sampling", temperature=0.8, top_p=0.95)


def test_sampled_answers_are_the_same_alone_in_other_batches_and_in_another_order(parts, pictures):
    asked = requests(pictures, SAMPLING)
    whole = parts.backend(12).generate(asked)
    answer = {request.seed: one.ids for request, one in zip(asked, whole, strict=True)}
    for size, order in ((1, asked), (5, asked), (12, asked[::-1]), (7, asked[3:9])):
        found = parts.backend(size).generate(order)
        assert [one.ids for one in found] == [answer[request.seed] for request in order]
    greedy = parts.backend().generate(requests(pictures, Decode.greedy(16)))
    assert sum(one.ids != other.ids for one, other in zip(whole, greedy, strict=True)) > 6


def test_another_seed_samples_another_answer(parts, pictures):
    one, same, other = parts.backend().generate([Request(pictures[0], SAMPLING, seed) for seed in (5, 5, 6)])
    assert one.ids == same.ids != other.ids


@pytest.mark.parametrize("decode", [Decode.greedy(12), replace(SAMPLING, top_k=20, temperature=1.7)])
def test_log_probabilities_are_of_the_model_itself(parts, pictures, decode):
    for picture, one in zip(pictures, parts.backend().generate(requests(pictures, decode)), strict=True):
        readable = one.ids.index(image) if (image := parts.prompts.image_token) in one.ids else len(one.ids)
        expected = parts.logprobs(picture, one.ids[:readable]).tolist()
        assert one.logprobs[:readable] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("adapter", [None, Adapter(rank=2, alpha=4)])
def test_what_the_checkpoint_says_about_generation_does_not_change_the_answers(parts, pictures, adapter):
    """Qwen2.5-VL, for one, comes with a repetition penalty."""
    asked = requests(pictures, Decode.greedy(16))
    expected = parts.backend().generate(asked)
    base = parts.model
    parts.model = with_adapter(base, adapter, parts.table.first_coord)
    own = base.generation_config
    own.update(repetition_penalty=1.3, no_repeat_ngram_size=2, do_sample=True, temperature=0.7, top_k=20)
    found = parts.backend().generate(asked)
    assert [one.ids for one in found] == [one.ids for one in expected]
    assert base.generation_config is own


def test_two_ways_of_decoding_in_one_call_are_refused(parts, pictures):
    asked = [Request(pictures[0], Decode.greedy(4)), Request(pictures[1], Decode.greedy(5))]
    for size in (1, 2):  # also when they would not be decoded at once
        with pytest.raises(ValueError, match="2 ways of decoding in one call"):
            parts.backend(size).generate(asked)


@pytest.mark.scenario("R20.C1", on="model")
def test_answers_carry_the_version_of_the_weights_and_their_prompt(parts, pictures):
    backend = parts.backend()
    assert backend.generate([]) == []
    for version in (0, 7):
        backend.sync(lambda: iter(()), version)
        (one,) = backend.generate(requests(pictures[:1], Decode.greedy(2)))
        assert one.version == version
        assert list(one.prompt_ids) == parts.prompts.ids(pictures[0].width, pictures[0].height)


@pytest.mark.scenario("R36.S1", on="model")
def test_another_backend_with_the_same_answers_gives_the_same_examples_and_counters(parts, tmp_path):
    write_scenes(tmp_path / "s", SceneSettings(), train=1, val=5, seed=0, advance=lambda: None)
    cfg = RolloutMatching(rollout_backend="hf", max_new_tokens=16)
    cases = Casebook(RecordFile(tmp_path / "s/val.jsonl"), parts.prompts, parts.table, "desc_first", cfg)
    script = {}

    def step(backend, watch):
        ledger = Ledger()
        encode = CorrectedRollouts(cases, backend, lambda: iter(()), cfg, 17, 0, ledger, watch)
        examples = encode(range(5), Moment(3, 0))
        counters = {name: value for name, value in ledger.report(1).items() if not name.startswith("time/")}
        return [_plain(example) for example in examples], counters

    def remember(moment, case, request, rollout, correction):
        script[Path(case.image.path).name] = Said("", rollout.finish_reason, rollout.ids)

    real = step(parts.backend(2), remember)
    prompt = tuple(parts.prompts.ids(64, 64))
    assert step(ScriptedBackend(script, parts.table, prompt), lambda *_: None) == real
    assert real[1]["rollout/answers"] == 5


def _plain(example) -> tuple:
    streams = ("ids", "roles", "kinds", "sides", "coord_targets", "weights")
    return example.image, example.channel, *(getattr(example.segment, name).tobytes() for name in streams)
