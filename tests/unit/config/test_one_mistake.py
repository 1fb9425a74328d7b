"""One mistake in a YAML file gives one message, at the line where it was written, and never a traceback."""

import pytest

from coordexp.config import ConfigError, load_settings

HEAD = """\
model: {path: m, adapter: {rank: 8}}
custom: {trainer_variant: stage2_rollout_aligned, train_jsonl: t.jsonl}
global_max_length: 16000
training: {output_dir: runs}
"""
PIPELINE = """\
  pipeline:
    objective:
      - {name: token_ce, enabled: true, weight: 1.0, channels: [B], config: %s}
    diagnostics: []
"""
TEXT_CE = "{struct_ce_weight: 1.0, desc_ce_weight: 0.0, eos_ce_weight: 1.0}"
ROLLOUT = "rollout_matching:\n" + PIPELINE % TEXT_CE
VALID = HEAD + ROLLOUT


def findings_of(tmp_path, text):
    file = tmp_path / "a.yaml"
    file.write_text(text, errors="surrogatepass")
    with pytest.raises(ConfigError) as caught:
        load_settings(file)
    return caught.value.findings


def test_the_unchanged_config_is_valid(tmp_path):
    (tmp_path / "a.yaml").write_text(VALID)
    load_settings(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        (VALID + "  rollout_infer_batch_size: four\n", "rollout_infer_batch_size", "decode_batch_size"),
        (
            VALID + "  vllm: {mode: server, server: {base_url: [http://a:1], group_port: [2]}}\n",
            "vllm.server.base_url",
            "",
        ),
        (VALID + "  rollout_backend: HF\n", "rollout_backend", "did you mean rollout_backend: hf?"),
        (VALID + "  vllm: {sync: {mode: adapter}}\n", "vllm.sync.mode", "enable_lora"),
        (
            VALID.replace(
                "diagnostics: []",
                "diagnostics: [{name: token_ce, enabled: true, weight: 1.0, channels: [B], config: "
                + TEXT_CE
                + "}]",
            ),
            "pipeline.diagnostics[0].name",
            "move the entry to objective",
        ),
        (VALID.replace("token_ce", "coord_diag").replace(TEXT_CE, "{}"), None, "move the entry to diagnostics"),
        (
            VALID.replace(TEXT_CE, TEXT_CE[:-1] + ", coord_w1_weight: 1.0}"),
            "pipeline.objective[0].config.coord_w1_weight",
            "unknown key",
        ),
        (VALID + "  pipelin: 3\n", "pipelin", "did you mean rollout_matching.pipeline?"),
        (HEAD + "vllm: {mode: colocate}\n" + ROLLOUT, "vllm", "did you mean rollout_matching.vllm?"),
        (
            VALID.replace("output_dir: runs", "output_dir: runs, train_batch_size: 3"),
            "training.train_batch_size",
            "",
        ),
        (
            VALID.replace("output_dir: runs", "output_dir: runs, foobar: 3"),
            "training.foobar",
            "docs/reference/config.md",
        ),
        (
            VALID.replace("output_dir: runs", "output_dir: runs, push_to_hub_token: hf_S"),
            "training.push_to_hub_token",
            "HF_TOKEN",
        ),
        (VALID.replace("rank: 8", "<<: 3"), "model.adapter.<<", "merge keys"),
        (VALID.replace("adapter: {rank: 8}", "adapter: lora"), "model.adapter", "write e.g. adapter: {alpha: 64"),
        (VALID + "  vllm: {server: [1]}\n", "vllm.server", "write a mapping"),
        (
            VALID.replace("- {name", "- token_ce\n      - {name"),
            "pipeline.objective[0]",
            "name: token_ce, config: {struct_ce_weight",
        ),
        (
            VALID + "  vllm: {server: {servers: [{base_url: http://a:PORT, group_port: 1}]}}\n",
            "vllm.server.servers[0].base_url",
            "http://127.0.0.1:8000",
        ),
    ],
)
def test_one_mistake_is_one_message(tmp_path, text, path, expected):
    findings = findings_of(tmp_path, text)
    messages = [str(finding) for finding in findings]
    relevant = [message for message in messages if "pipeline.objective: nothing would be" not in message]
    assert len(relevant) == 1, messages
    assert expected in relevant[0]
    if path is not None:
        assert findings[0].subject.endswith(path), messages
    assert all(finding.places for finding in findings)
    assert "hf_S" not in "".join(messages)


def test_a_setting_under_the_old_section_is_reported_where_it_was_written(tmp_path):
    old = "{vllm: {server: {base_url: x}}, decoding: {temperature: -1.0}, rollout_buffer: 1}"
    text = VALID.replace("train_jsonl: t.jsonl", f"train_jsonl: t.jsonl, extra: {{rollout_matching: {old}}}")
    findings = {finding.subject: finding for finding in findings_of(tmp_path, text)}
    section = "custom.extra.rollout_matching"
    assert {f"{section}.vllm", f"{section}.decoding", f"{section}.rollout_buffer"} == set(findings)
    assert findings[f"{section}.decoding"].places[0].line == 2
    assert findings[f"{section}.rollout_buffer"].problem == "removed"


@pytest.mark.parametrize(
    "value",
    [
        "!!int abc",
        "!!float abc",
        "!!bool maybe",
        "!!int {a: 1}",
        "!!str {a: 1}",
        "!!str [a]",
        "!foo bar",
        "9" * 5000,
        "[" * 1200,
        '"\\uD800"',
        "{? [a] : 1}",
        "{? {a: 1} : 1, ? {b: 1} : 2}",
        "1e999",
        "&a [*a]",
    ],
)
@pytest.mark.parametrize(
    "place", ["x: %s\n", "rollout_matching: %s\n", "rollout_matching: {decode_batch_size: %s}\n"]
)
def test_no_value_in_a_file_causes_a_traceback(tmp_path, value, place):
    for finding in findings_of(tmp_path, place % value):
        str(finding).encode()


@pytest.mark.parametrize("text", ['"\\uD800": 1\n', "!foo {a: 1}\n", "extends: " + "a" * 5000, "\x00", "a: b: c"])
def test_no_file_is_a_traceback(tmp_path, text):
    assert findings_of(tmp_path, text)


@pytest.mark.parametrize("key", ["a[b]", "a[", "a.b", "]", "model[0]", "training.packing"])
def test_a_key_that_looks_like_a_path_is_reported_at_its_line(tmp_path, key):
    finding = next(finding for finding in findings_of(tmp_path, f"{VALID}'{key}': 1\n") if finding.subject == key)
    assert finding.places[0].line == len(VALID.splitlines()) + 1


def test_all_unreadable_files_are_reported_at_once(tmp_path):
    (tmp_path / "bad.yaml").write_text("x: [\n")
    findings = findings_of(tmp_path, "extends: [no1.yaml, no2.yaml, bad.yaml]\nmodel: 1\nmodel: 2\n")
    assert len(findings) == 4


def test_extending_a_file_many_times_stays_fast(tmp_path):
    (tmp_path / "f0.yaml").write_text("model: {path: m}\n")
    for n in range(1, 40):
        (tmp_path / f"f{n}.yaml").write_text(f"extends: [f{n - 1}.yaml, f{n - 1}.yaml]\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(tmp_path / "f39.yaml")
    assert "custom" in str(caught.value)
