"""`coordexp report` as a person meets it: from run folders to a page and a table."""

import json
import os
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordexp.cli import app, main
from coordexp.evaluate import evaluate
from tests.unit.evaluate.scenes import crowd
from tests.unit.inspector.run_folders import (
    END,
    TERMS,
    evaluated,
    lines,
    manifest,
    settings,
    write_data,
    write_evaluation,
    write_run,
)

MANY = "a0: &a0 [1, 1]\n" + "".join(f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}]\n" for k in range(1, 40))


def run(*words):
    result = CliRunner().invoke(app, ["report", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result


def page_of(folder, *words):
    run(folder, *words)
    return (folder / "report.html").read_text()


def refusal(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, words)])
    told = capsys.readouterr().err
    assert ended.value.code == 1 and "Traceback" not in told
    return told


def compared_runs(folder, seeds=1):
    """Two groups that were evaluated on the same images; the second leaves out objects, more with each seed."""
    truth, answers = crowd(2)
    data = write_data(folder / "val.jsonl", truth)
    runs = []
    for group in ("base", "other"):
        for seed in range(seeds):
            path = folder / f"{group}-{seed}"
            left_out = 0 if group == "base" else seed + 1
            own = [replace(one, objects=one.objects[left_out:]) for one in answers]
            values = {"f1_50": evaluate(truth, own).flat()["f1_50"], "ap": 0.25 if group == "base" else 0.5}
            tree = settings(seed=seed, output_dir=str(path), learning_rate=1 if group == "base" else 2)
            write_run(path, [*lines(), evaluated(10, **values), END], tree, [manifest(data=data)])
            write_evaluation(path, 10, truth, own)
            runs.append(path)
    return runs


class Checked(HTMLParser):
    """Elements that are closed in order, and what they are."""

    VOID = frozenset({"meta", "link", "input", "br"})

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.links = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        if tag == "a":
            self.links.append(dict(attributes)["href"])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_run_becomes_one_page_beside_it(tmp_path):
    result = run(write_run(tmp_path / "one"))
    assert result.stdout.splitlines()[-1] == f"wrote {tmp_path / 'one' / 'report.html'}"
    text = (tmp_path / "one" / "report.html").read_text()
    assert Checked(text).seen.count("svg") > 5
    assert "http://" not in text and "https://" not in text and "default-src 'none'" in text


def test_terms_are_drawn_times_their_weight_and_add_up_to_the_loss(tmp_path):
    text = page_of(write_run(tmp_path / "one"))
    charts = json.loads(re.search(r'id="curves">(.*?)</script>', text)[1])["charts"]
    loss, struct, w1 = (
        charts[f"loss:{name}"][0]["v"][0] for name in ("loss", "token_ce/struct_ce", "coord_reg/w1")
    )
    assert loss == pytest.approx([a + b for a, b in zip(struct, w1, strict=True)], rel=1e-3)


def test_what_a_run_has_not_is_named_with_the_reason_and_not_drawn(tmp_path):
    text = page_of(write_run(tmp_path / "one", [*lines(rollouts=False), END]))
    assert "<b>Training answers: recall</b>: no step had rollouts" in text
    assert "<b>Packing</b>: training.packing is off" in text
    assert 'id="recall"' not in text


def test_a_chart_of_zeros_is_a_word(tmp_path):
    text = page_of(write_run(tmp_path / "one"))
    assert "0 throughout: looped." in text and "ends:looped" not in text


def test_a_loss_that_falls_far_can_be_seen_on_a_logarithmic_scale(tmp_path):
    far = page_of(write_run(tmp_path / "far"))
    near = page_of(write_run(tmp_path / "near", [{"step": k, "seconds": 1.0, "loss": 4.0 + k} for k in (1, 2)]))
    assert 'class="chart log"' in far and 'class="chart log"' not in near


def test_steps_without_rollouts_are_passed_over(tmp_path):
    text = page_of(write_run(tmp_path / "one", [*lines(every=3), END]))
    found = json.loads(re.search(r'id="curves">(.*?)</script>', text)[1])
    (recall,) = found["charts"]["recall:match/recall"]
    assert found["steps"][recall["x"]] == [3, 6, 9]


def test_a_run_that_goes_on_is_read_up_to_its_last_whole_line(tmp_path):
    text = page_of(write_run(tmp_path / "one", lines(7), end='{"step": 8, "lo'))
    assert "the last line is of step 7" in text


def test_a_run_that_has_logged_nothing_yet_has_a_page(tmp_path):
    text = page_of(write_run(tmp_path / "one", []))
    assert "no step was logged" in text and "<b>Loss</b>: no step was logged: the run has just begun" in text
    assert "<b>Training answers: recall</b>: no step was logged" in text


def test_a_loss_of_no_number_is_a_gap_and_a_cross(tmp_path):
    found = [line | ({"loss": None} if line["step"] == 5 else {}) for line in lines()]
    text = page_of(write_run(tmp_path / "one", found))
    assert 'class="broken"' in text and "loss was NaN or infinite in 1 line (step 5)" in text


def test_everything_from_the_run_is_written_as_text(tmp_path):
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    tree = settings(output_dir=evil, note=evil, run_name=evil)
    beginning = manifest(command=[evil], git={"commit": evil}, packages={evil: evil}, python=evil)
    beginning |= {"data": {evil: {"file": evil, "records": 1, "sha256": evil}}, "rollouts": {evil: evil}}
    beginning["objective"] = {"terms": [], "idle": {evil: evil}, "masked_desc": [evil]}
    found = [line | {"coord_diag/<img src=x>": 1.0, "parse/invalid/<b>": 1.0} for line in lines()]
    text = page_of(write_run(tmp_path / "<b>one", found, tree, [beginning]))
    seen = Checked(text).seen
    assert "img" not in seen and seen.count("script") == 2
    assert "&lt;img src=x onerror" in text


def test_secrets_in_settings_are_not_on_the_page(tmp_path):
    assert "very-secret" not in page_of(write_run(tmp_path / "one", tree=settings(hub_token="very-secret")))


def test_seeds_are_one_group_with_a_band(tmp_path):
    for seed in (1, 2, 3):
        found = [line | {"loss": line["loss"] + seed} for line in lines()]
        write_run(tmp_path / f"x-{seed}", [*found, END], settings(seed=seed, output_dir=f"x-{seed}"))
    file = tmp_path / "all.html"
    result = run(*(tmp_path / f"x-{seed}" for seed in (1, 2, 3)), "--out", file)
    assert "A  x: 3 runs, seeds 1, 2, 3" in result.stdout
    text = file.read_text()
    assert 'class="band"' in text and "(seeds: A 3); the band is from the lowest to the highest run" in text


def test_groups_differ_in_colour_dashes_and_marks(tmp_path):
    runs = compared_runs(tmp_path)
    file = tmp_path / "all.html"
    run(*runs, "--out", file)
    text = file.read_text()
    style = dict(re.findall(r"\.of-([A-H]) \{ (.*?) \}", text))
    assert len(set(style.values())) == 8
    assert 'class="of-A"' in text and 'class="of-B"' in text
    assert "<code>training.learning_rate</code></th><td>1</td><td>2</td>" in text


def test_the_table_and_the_page_tell_the_difference(tmp_path):
    runs = compared_runs(tmp_path)
    result = run(*runs, "--out", tmp_path / "all.html", "--resamples", 300)
    row = next(line for line in result.stdout.splitlines() if line.startswith("F1 "))
    truth, answers = crowd(2)
    assert f"{evaluate(truth, answers).flat()['f1_50']:.4f}" in row
    text = (tmp_path / "all.html").read_text()
    assert "300 times, as many images as there are (12)" in text
    assert '<th scope="row">AP</th><td>0.2500</td><td>0.5000</td>' in text and "AP has no interval" in text
    assert "nothing is said about other seeds" in text


def test_three_seeds_on_both_sides_have_an_interval_with_seeds(tmp_path):
    stdout = run(*compared_runs(tmp_path, seeds=3), "--out", tmp_path / "all.html", "--resamples", 200).stdout
    text = (tmp_path / "all.html").read_text()
    assert "95 % with seeds" in text and "95 % with seeds" in stdout
    images, seeds = re.search(r"^F1 .* (\S+ to \S+) +(\S+ to \S+) +\S+ %", stdout, re.M).groups()
    assert images != seeds and f"<td>{images}</td><td>{seeds}</td>" in text


def test_with_fewer_seeds_the_table_has_no_column_for_them(tmp_path):
    stdout = run(*compared_runs(tmp_path, seeds=2), "--out", tmp_path / "all.html", "--resamples", 200).stdout
    assert "95 % over images" in stdout and "with seeds" not in stdout


def test_the_first_group_is_the_baseline(tmp_path):
    base, other = compared_runs(tmp_path)
    values = []
    for pair in ((base, other), (other, base)):
        stdout = run(*pair, "--out", tmp_path / "all.html").stdout
        values.append(float(re.search(r"^F1 +\S+ +\S+ +(\S+)", stdout, re.M)[1]))
    assert values[0] == -values[1] != 0


def test_predictions_that_do_not_come_to_what_was_logged_are_told(tmp_path):
    base, other = compared_runs(tmp_path)
    text = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(re.sub(r'"eval_f1_50": [0-9.]+', '"eval_f1_50": 0.123', text))
    assert "other-0 logged F1 0.1230 at step 10" in run(base, other, "--out", tmp_path / "a.html").stderr


def test_runs_of_other_data_are_not_compared_and_that_is_told(tmp_path):
    base, other = compared_runs(tmp_path)
    (about,) = json.loads((other / "run.json").read_text())
    about["data"]["val"]["sha256"] = "0" * 64
    (other / "run.json").write_text(json.dumps([about]))
    result = run(base, other, "--out", tmp_path / "all.html")
    assert "not compared: the runs were evaluated on different data" in result.stderr
    text = (tmp_path / "all.html").read_text()
    assert "Not compared: the runs were evaluated on different data" in text and 'class="forest"' not in text


def test_a_run_without_evaluations_is_not_compared_and_that_is_told(tmp_path):
    base, _ = compared_runs(tmp_path)
    other = write_run(tmp_path / "none", tree=settings(learning_rate=9))
    result = run(base, other, "--out", tmp_path / "all.html")
    assert "not compared: none has no evaluation" in result.stderr


def test_data_that_is_gone_or_changed_is_an_error_with_two_ways_out(tmp_path, capsys):
    runs = compared_runs(tmp_path)
    (tmp_path / "val.jsonl").rename(tmp_path / "moved.jsonl")
    told = refusal(capsys, *runs, "--out", tmp_path / "a.html")
    assert "val.jsonl: no such file" in told and "--data FILE" in told and "--at none" in told
    run(*runs, "--out", tmp_path / "a.html", "--data", tmp_path / "moved.jsonl")
    run(*runs, "--out", tmp_path / "a.html", "--at", "none")
    with (tmp_path / "moved.jsonl").open("a") as file:
        file.write("\n")
    told = refusal(capsys, *runs, "--out", tmp_path / "a.html", "--data", tmp_path / "moved.jsonl")
    assert "its hash is" in told and "the file has changed" in told


def test_relative_data_is_found_from_where_the_run_was_started(tmp_path, monkeypatch):
    runs = compared_runs(tmp_path)
    for path in runs:
        (about,) = json.loads((path / "run.json").read_text())
        about["data"]["val"]["file"] = "val.jsonl"
        (path / "run.json").write_text(json.dumps([about]))
        text = (path / "resolved.yaml").read_text().replace(str(path), path.name)
        (path / "resolved.yaml").write_text(text)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run(*runs)
    assert 'class="forest"' in (tmp_path / "elsewhere" / "report.html").read_text()


def test_evaluations_of_different_steps_are_told_with_the_last_shared(tmp_path, capsys):
    base, other = compared_runs(tmp_path)
    write_evaluation(base, 20, *crowd(2))
    result = run(base, other, "--out", tmp_path / "a.html")
    assert "different steps (A 20; B 10); --at 10 compares all" in result.stderr
    assert "different steps" not in run(base, other, "--out", tmp_path / "a.html", "--at", "10").stderr
    told = refusal(capsys, base, other, "--out", tmp_path / "a.html", "--at", "20")
    assert "no evaluation at step 20\n  there is one at 10" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--out", "page.txt"], "--out page.txt: the suffix is .txt"),
        (["--out", "page"], "the suffix is missing"),
        (["--at", "best"], "--at best: not a step"),
    ],
)
def test_what_cannot_be_done_is_said_with_the_way_out(tmp_path, capsys, words, told):
    found = refusal(capsys, write_run(tmp_path / "one"), *words)
    assert told in found and "\n  " in found


def test_a_folder_that_is_no_run_s_is_named(tmp_path, capsys):
    assert "not the folder of a run" in refusal(capsys, tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("run.json", "[]", "an empty list"),
        ("run.json", "[3]", r"[0]: 3 is not an object"),
        ("run.json", '[{"data": {"val": {"file": 1}}}]', "[0].data.val: file 1 is not"),
        ("run.json", '[{"objective": {"terms": [{"term": "a"}]}}]', "[0].objective.terms[0]: weight None"),
        ("resolved.yaml", "training: [1]", "training: [1] is not an object"),
        ("metrics.jsonl", "{\n", "line 1: not JSON"),
        ("metrics.jsonl", '{"step": -1}\n', "step -1 is not"),
        ("metrics.jsonl", '{"step": 1, "x": 1%s}\n' % ("0" * 400), "line 1: x 1000"),
        ("metrics.jsonl", '{"step": 1, "loss": -1e308}\n', "line 1: loss -1e+308 is not a number"),
        ("metrics.jsonl", '{"step": 1, "x": %s\n' % ("[" * 200_000), "line 1: not JSON"),
        ("metrics.jsonl", '{"step": 1, "x": %s%s}\n' % ("[" * 300, "]" * 300), "line 1: x [[[[[["),
        ("run.json", "[" * 200_000, "run.json: cannot be read"),
        ("run.json", "[%s%s]" % ('{"a":' * 300 + "1", "}" * 300), "[0]: more than 64 objects and lists inside"),
        ("resolved.yaml", "[" * 3000, "resolved.yaml: cannot be read"),
        ("resolved.yaml", "a: &a\n  b: *a\n", "resolved.yaml: more than 64 objects and lists inside"),
        ("resolved.yaml", MANY, "resolved.yaml: more than 100,000 values"),
        ("servers.jsonl", '{"event": "sync"}\n', "servers.jsonl, line 1: servers None is not what a run writes"),
    ],
)
def test_files_that_no_run_writes_are_named(tmp_path, capsys, file, text, told):
    folder = write_run(tmp_path / "one")
    (folder / file).write_text(text)
    assert told in refusal(capsys, folder)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"command": 3}, ": command 3"),
        ({"command": [3]}, ": command [3]"),
        ({"files": 3}, ": files 3"),
        ({"packages": [3]}, ": packages [3]"),
        ({"objective": {"terms": [], "masked_desc": 3}}, ".objective: masked_desc 3"),
        ({"objective": {"terms": [], "masked_desc": [3]}}, ".objective: masked_desc [3]"),
        ({"objective": {"terms": [], "idle": [3]}}, ".objective: idle [3]"),
        ({"objective": {"terms": [TERMS[0] | {"channels": [1]}]}}, ".objective.terms[0]: channels [1]"),
        ({"objective": {"terms": [TERMS[0] | {"divided_by": [1]}]}}, ".objective.terms[0]: divided_by [1]"),
        ({"objective": {"terms": [TERMS[0] | {"weight": 1e300}]}}, ".objective.terms[0]: weight 1e+300"),
    ],
)
def test_a_manifest_that_no_run_writes_is_named_with_the_place(tmp_path, capsys, changes, told):
    folder = write_run(tmp_path / "one", beginnings=[manifest(**changes)])
    assert f"run.json: [0]{told} is not what a run writes" in refusal(capsys, folder)


@pytest.mark.parametrize("step", [None, -1.0])
def test_times_that_are_none_are_named_as_absent(tmp_path, step):
    found = {"step": 1, "loss": 1.0, "seconds": None, "time/step": step}
    assert "<b>Where the time goes</b>: no step was timed" in page_of(write_run(tmp_path / "one", [found]))


def test_a_run_given_twice_is_refused(tmp_path, capsys):
    folder = write_run(tmp_path / "one")
    assert "given twice" in refusal(capsys, folder, tmp_path / "." / "one", "--out", tmp_path / "a.html")


def test_dumped_steps_lead_into_the_inspector_as_the_log_counts(tmp_path):
    folder = write_run(tmp_path / "a run")
    (folder / "dumps").mkdir()
    for step in (0, 4):
        (folder / "dumps" / f"step-{step:06}.jsonl").write_text("")
    result = run(folder)
    assert f"`coordexp inspect '{folder}'` makes it" in result.stdout
    text = (folder / "report.html").read_text()
    assert f"<code>coordexp inspect &#x27;{folder}&#x27;</code>" in text and "inspect.html" not in text
    (folder / "inspect.html").write_text("")
    (tmp_path / "pages").mkdir()
    run(folder, "--out", tmp_path / "pages" / "r.html")
    links = Checked((tmp_path / "pages" / "r.html").read_text()).links
    assert "../a%20run/inspect.html#step=1" in links and "../a%20run/inspect.html#step=5" in links


def test_ten_thousand_steps_are_a_small_page_in_seconds(tmp_path):
    some = {f"coord_diag/{k}": 0.1 * k for k in range(60)}
    found = [line | some | {"loss": 5.0 + (step % 7)} for step, line in enumerate(lines(10_000))]
    folder = write_run(tmp_path / "long", [*found, evaluated(10_000, f1_50=0.5)])
    since = time.process_time()
    text = page_of(folder)
    assert time.process_time() - since < 5
    assert len(text) < 3_000_000
    assert "A point stands for 50 steps" in text


def test_the_page_has_no_path_that_only_this_machine_has_but_those_given(tmp_path, monkeypatch):
    write_run(tmp_path / "one", tree=settings(output_dir="one"))
    monkeypatch.chdir(tmp_path)
    run("one")
    assert str(tmp_path) not in (tmp_path / "one" / "report.html").read_text()
    assert os.fspath(Path.home()) not in (tmp_path / "one" / "report.html").read_text()
