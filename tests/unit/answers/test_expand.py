"""`coordexp model add-coords` on checkpoints that have no coordinate tokens yet."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from coordexp.answers.expand import add_coord_tokens
from coordexp.answers.table import VocabularyError, VocabularyTable
from coordexp.demo.model import make_model
from tests.command import run
from tests.engines import drawing, prompt


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def plain(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("plain") / "m", tied=request.param, spread=6.0, coords=False)


def test_the_expanded_model_loads_and_answers_as_before(plain, tmp_path):
    with pytest.raises(
        VocabularyError, match=r"/m: 1000 of the 1000 .*\n  add them with: coordexp model add-coords"
    ):
        VocabularyTable.from_folder(plain)
    result = run("model", "add-coords", "--model", plain, "--out", tmp_path / "out")
    assert "1000 coordinate tokens added" in result.output
    table = VocabularyTable.from_folder(tmp_path / "out")
    models = [Qwen3VLForConditionalGeneration.from_pretrained(folder) for folder in (plain, tmp_path / "out")]
    before, after = models
    used = table.first_coord
    old, new = before.get_input_embeddings().weight, after.get_input_embeddings().weight
    assert torch.equal(old[:used], new[:used])
    assert after.config.text_config.vocab_size == new.shape[0] >= used + 1000
    assert after.config.tie_word_embeddings == before.config.tie_word_embeddings
    tied = after.get_output_embeddings().weight is new
    assert tied == (before.get_output_embeddings().weight is old)
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    inputs = processor(text=[prompt(processor)], images=[drawing()], return_tensors="pt")
    with torch.no_grad():
        logits = [model(**inputs).logits[..., :used] for model in models]
    assert torch.allclose(*logits, atol=1e-4)


def test_new_rows_are_near_the_mean_and_all_different(plain, tmp_path):
    add_coord_tokens(plain, tmp_path / "out")
    table = VocabularyTable.from_folder(tmp_path / "out")
    weights = load_file(tmp_path / "out/model.safetensors")
    (name,) = [name for name in weights if name.endswith("embed_tokens.weight")]
    rows = weights[name][table.first_coord : table.first_coord + 1000]
    known = weights[name][: table.first_coord]
    assert torch.allclose(rows.mean(0), known.mean(0), atol=0.01 * known.std().item())
    assert rows.std(0).mean() == pytest.approx(0.02 * known.std().item(), rel=0.1)
    assert len(torch.unique(rows, dim=0)) == 1000


def test_ordinal_rows_are_similar_to_their_neighbours_and_not_to_distant_rows(plain, tmp_path):
    add_coord_tokens(plain, tmp_path / "out", ordinal=True)
    table = VocabularyTable.from_folder(tmp_path / "out")
    weights = load_file(tmp_path / "out/model.safetensors")
    (name,) = [name for name in weights if name.endswith("embed_tokens.weight")]
    known = weights[name][: table.first_coord]
    rows = weights[name][table.first_coord : table.first_coord + 1000] - known.mean(0)
    similarity = torch.nn.functional.cosine_similarity(rows[500][None], rows)
    assert similarity[501] > 0.95
    assert similarity[501] > similarity[520] > similarity[600] > similarity[0]
    assert rows.std() == pytest.approx(known.std().item(), rel=0.2)


def test_expanding_twice_changes_nothing(plain, tmp_path):
    assert add_coord_tokens(plain, tmp_path / "once") == 1000
    assert add_coord_tokens(tmp_path / "once", tmp_path / "twice") == 0
    for file in (tmp_path / "once").iterdir():
        assert (tmp_path / "twice" / file.name).read_bytes() == file.read_bytes()


def test_shards_without_an_embedding_are_copied_and_the_index_stays_correct(plain, tmp_path):
    import json
    import shutil

    sharded = tmp_path / "sharded"
    shutil.copytree(plain, sharded)
    weights = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    parts = [
        {n: w for n, w in weights.items() if ("embed" in n or "lm_head" in n) is first} for first in (True, False)
    ]
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for part, name in zip(parts, names, strict=True):
        save_file(part, sharded / name, metadata={"format": "pt"})
    weight_map = {n: name for part, name in zip(parts, names, strict=True) for n in part}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    add_coord_tokens(sharded, tmp_path / "out")
    assert (tmp_path / "out" / names[1]).read_bytes() == (sharded / names[1]).read_bytes()
    Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "out")
    stated = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["metadata"]["total_size"]
    tensors = [tensor for name in names for tensor in load_file(tmp_path / "out" / name).values()]
    assert stated == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_a_tied_head_that_is_also_stored_stays_tied(tmp_path):
    folder = make_model(tmp_path / "m", spread=6.0, coords=False)
    weights = load_file(folder / "model.safetensors")
    (name,) = [name for name in weights if name.endswith("embed_tokens.weight")]
    save_file({**weights, "lm_head.weight": weights[name].clone()}, folder / "model.safetensors", {"format": "pt"})
    add_coord_tokens(folder, tmp_path / "out")
    expanded = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(expanded["lm_head.weight"], expanded[name])
    model = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_padding_rows_of_the_embedding_are_used_and_the_dtype_is_kept(tmp_path):
    folder = make_model(tmp_path / "m", coords=False)
    weights = {name: weight.bfloat16() for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    add_coord_tokens(folder, tmp_path / "out")
    expanded = load_file(tmp_path / "out/model.safetensors")
    assert {weight.dtype for weight in expanded.values()} == {torch.bfloat16}
    table = VocabularyTable.from_folder(tmp_path / "out")
    (name,) = [name for name in weights if name.endswith("embed_tokens.weight")]
    assert torch.equal(expanded[name][: table.first_coord], weights[name][: table.first_coord])
    assert expanded[name].shape[0] % 64 == 0


@pytest.mark.parametrize("damage", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_damaged_checkpoint_is_named_and_no_output_is_left_behind(plain, tmp_path, damage):
    import shutil

    shutil.copytree(plain, tmp_path / "bad")
    (tmp_path / "bad" / damage).write_bytes(b"{ not")
    command = ["model", "add-coords", "--model", str(tmp_path / "bad"), "--out", str(tmp_path / "out")]
    result = run(*command, code=1)
    assert damage in result.output
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_rows_for_its_tokens_is_refused(plain, tmp_path):
    import shutil

    add_coord_tokens(plain, tmp_path / "whole")
    shutil.copytree(plain, tmp_path / "bad")
    shutil.copy(tmp_path / "whole/tokenizer.json", tmp_path / "bad/tokenizer.json")
    with pytest.raises(VocabularyError, match="it is damaged"):
        add_coord_tokens(tmp_path / "bad", tmp_path / "out")


def test_a_full_output_folder_and_a_missing_checkpoint_are_refused(plain, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("")
    with pytest.raises(VocabularyError, match="not an empty folder"):
        add_coord_tokens(plain, tmp_path / "full")
    with pytest.raises(VocabularyError, match=r"config\.json: no such file"):
        add_coord_tokens(tmp_path / "full", tmp_path / "out")
