"""The messages that a user reads when a config is wrong."""

import re
from pathlib import Path

import pytest

from coordexp.config import ConfigError, load_settings
from coordexp.config.rollout import ServerEndpoint
from tests.unit.config.trees import SERVER, only_problem, problems, server_mode, stage2

TEN_MISTAKES = Path("examples/check/ten-mistakes.yaml")


# What a user writes after the first run, in the order of the file.
CORRECTIONS = {
    "stage2_rollout_alinged": "stage2_rollout_aligned",
    "{struct_ce_weight: 1.0, ": "{struct_ce_weight: 1.0, desc_ce_weight: 1.0, ",
    "bbox_smoothl1_weight": "smoothl1_weight",
    "decode_batch_size: four": "decode_batch_size: 4",
    "  rollout_buffer: {enabled: true, m_steps: 2}\n": "",
    '      base_url: ["http://127.0.0.1:8000"]\n      group_port: [51216]\n': "",
    ", unknown_flag: true": "",
}


def test_ten_mistakes_are_ten_messages_in_the_order_of_the_file_and_two_runs(tmp_path):
    text, corrected = TEN_MISTAKES.read_text(), TEN_MISTAKES.read_text()
    for wrong, right in CORRECTIONS.items():
        corrected = corrected.replace(wrong, right)
    assert subjects_of(text, tmp_path) == [
        "custom.trainer_variant",
        "stage1.pipeline.objective[0].config.desc_ce_weight",
        "stage1.pipeline.objective[1].config.bbox_smoothl1_weight",
        "rollout_matching.decode_batch_size",
        "rollout_matching.rollout_buffer",
        "rollout_matching.vllm.server.base_url",
        "rollout_matching.vllm.server.servers[0].unknown_flag",
    ]
    assert subjects_of(corrected, tmp_path) == [
        "rollout_matching.pipeline",
        "rollout_matching.decode_mode",
        "rollout_matching.vllm.sync.mode",
    ]


def subjects_of(text, folder):
    """Return the settings that are wrong. Each must have a fix and the line at which it is written."""
    (folder / "config.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(folder / "config.yaml")
    lines = text.splitlines()
    for finding in caught.value.findings:
        assert finding.fix
        (place,) = finding.places
        keys = re.sub(r"\[\d+\]", "", finding.subject).split(".")[-2:]
        assert any(key in lines[place.line - 1] for key in keys), finding
    return [finding.subject for finding in caught.value.findings]


@pytest.mark.parametrize(
    ("tree", "path", "expected"),
    [
        (stage2(rollout_matching__decode_batch_size="4"), "decode_batch_size", '"4" is not an integer >= 1'),
        (stage2(rollout_matching__decode_batch_size=True), "decode_batch_size", "true is not an integer"),
        (stage2(rollout_matching__decode_batch_size=0), "decode_batch_size", "0 is not an integer >= 1"),
        (stage2(rollout_matching__decode_batch_size=None), "decode_batch_size", "null is not an integer"),
        (stage2(rollout_matching__maskiou_gate=1.5), "maskiou_gate", "a number >= 0 and <= 1"),
        (
            stage2(rollout_matching__rollout_backend="vlm"),
            "rollout_backend",
            "did you mean rollout_backend: vllm?",
        ),
        (stage2(rollout_matching__vllm=3), "vllm", "3 is not a mapping"),
        (stage2(rollout_matching__pipeline=[]), "pipeline", "[] is not a mapping or null"),
        (stage2(training__packing="yes"), "packing", '"yes" is not true or false'),
        (stage2(training__learning_rate="1e-5x"), "learning_rate", "is not a number"),
        (stage2(training__optim="adamw_torchfused"), "optim", "did you mean optim: adamw_torch_fused?"),
        (stage2(training__report_to=[1]), "report_to", "a list of texts"),
        (stage2(training__learning_rte=1e-5), "learning_rte", "did you mean training.learning_rate?"),
        (stage2(model__adapter={"r": 8}), "r", "use model.adapter.rank instead"),
        (stage2(model__adapter={"lora_alpha": 8}), "lora_alpha", "use model.adapter.alpha instead"),
        (stage2(model__path=""), "path", '"" is not text'),
    ],
)
def test_the_message_on_a_wrong_value_says_what_is_allowed(tree, path, expected):
    wrong_path, message = only_problem(tree)
    assert wrong_path.rpartition(".")[2].partition("[")[0] == path
    assert expected in message


def test_a_missing_key_is_explained_with_an_example():
    tree = server_mode(rollout_matching__vllm__server={"servers": [SERVER, {"base_url": "http://127.0.0.1:8001"}]})
    path, message = only_problem(tree)
    assert path == "rollout_matching.vllm.server.servers[1].group_port"
    assert message == (
        "missing\nport for weight transfer to this server, different for each server; add e.g. group_port: 51216"
    )


def test_the_message_on_an_unknown_module_lists_the_known_ones():
    tree = stage2(rollout_matching__pipeline={"objective": [{"name": "giou"}], "diagnostics": []})
    path, message = only_problem(tree)
    assert path == "rollout_matching.pipeline.objective[0].name"
    assert "token_ce, coord_reg, bbox_geo" in message


def test_an_empty_file_asks_for_everything_required():
    assert set(problems({})) == {"model", "custom", "training"}


def test_infinite_and_nan_weights_are_refused():
    for value in (float("inf"), float("nan")):
        assert only_problem(stage2(rollout_matching__fp_cost=value))[0] == "rollout_matching.fp_cost"


SECRET = "hunter2"


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{SECRET}@127.0.0.1:8000",
        f"http://{SECRET}@127.0.0.1:8000",
        f"http://user:{SECRET}/more@127.0.0.1:8000",
        f"http://user:{SECRET} more@127.0.0.1:8000",
        f'http://user:{SECRET}"more@127.0.0.1:8000',
        f"http://user:{SECRET}{'x' * 80}@127.0.0.1:8000",
        f"user:{SECRET}@127.0.0.1:8000",
    ],
)
def test_a_password_in_a_url_is_refused_with_a_fix_and_not_printed(url):
    tree = server_mode(rollout_matching__vllm__server={"servers": [SERVER | {"base_url": url}]})
    path, message = only_problem(tree)
    assert path == "rollout_matching.vllm.server.servers[0].base_url"
    assert "COORDEXP_SERVER_TOKEN" in message and "127.0.0.1" in message and SECRET not in message


@pytest.mark.parametrize(
    "server",
    [
        {"base_url": f"http://user:{SECRET}@127.0.0.1:8000"},
        {"servers": {"base_url": f"http://user:{SECRET}@127.0.0.1:8000"}},
        {"servers": [f"http://user:{SECRET}@127.0.0.1:8000"]},
        {"servers": [SERVER | {"base_url": [f"http://user:{SECRET}@127.0.0.1:8000"]}]},
        {"servers": f"http://user:{SECRET}@127.0.0.1:8000"},
    ],
)
def test_a_password_in_a_url_at_the_wrong_place_is_not_printed(server):
    messages = problems(server_mode(rollout_matching__vllm__server=server))
    assert messages and SECRET not in str(messages)


def test_pydantics_own_error_does_not_print_values():
    with pytest.raises(ValueError, match="base_url") as error:
        ServerEndpoint(base_url=f"http://user:{SECRET}@127.0.0.1:8000", group_port=5)
    assert SECRET not in str(error.value)
