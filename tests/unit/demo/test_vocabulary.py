"""The two tokenizers, and the tiny models that are made with them."""

import pytest
from transformers import AutoTokenizer

from coordexp.demo.model import SPECIAL_TOKENS, make_model
from coordexp.errors import UserError


@pytest.mark.slow
def test_the_real_vocabulary_has_the_published_ids_and_merged_tokens(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(make_model(tmp_path / "qwen", "qwen"))
    published = {"<|endoftext|>": 151643, "<|im_end|>": 151645, "<|image_pad|>": 151655, "</think>": 151668}
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in published} == published
    assert tokenizer.convert_tokens_to_ids("<|coord_0|>") == 151669
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(151643, 151657))
    for merged in ("]},", '"],', "}}", '}}"', '{"', '":', ' {"'):
        assert len(tokenizer(merged)["input_ids"]) == 1, merged


def test_a_model_is_the_same_for_the_same_seed_and_does_not_change_the_random_state(tmp_path):
    import torch

    before = torch.random.get_rng_state()
    first, second, other = (
        make_model(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert torch.equal(before, torch.random.get_rng_state())
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, second, other)]
    assert weights[0] == weights[1] != weights[2]


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(UserError):
        make_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


@pytest.mark.parametrize("tied", [True, False])
def test_heads_are_tied_or_not_as_requested(tmp_path, tied):
    from safetensors import safe_open

    folder = make_model(tmp_path / "m", tied=tied)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert ("lm_head.weight" in weights.keys()) is not tied  # noqa: SIM118
