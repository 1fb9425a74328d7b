"""`coordexp report` as a user runs it: from run folders to a page and a table."""

import json
import re
import time
from dataclasses import replace

import pytest
import yaml

from coordexp.data import open_data
from coordexp.evaluate import evaluate, read_predictions
from coordexp.pages.report import list_loss_plots
from coordexp.pages.run_folder import group_runs
from coordexp.train.folder import fingerprint
from tests.command import run
from tests.unit.evaluate.scenes import crowd, prediction
from tests.unit.pages.reader import Reader
from tests.unit.pages.run_folders import (
    END,
    evaluation_line,
    lines,
    make_run,
    manifest,
    settings,
    write_data,
    write_evaluation,
    write_run,
)

MANY = "a0: &a0 [1, 1]\n" + "".join(f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}]\n" for k in range(1, 40))


def page_of(folder, *arguments):
    run("report", folder, *arguments)
    return (folder / "report.html").read_text()


def write_two_groups(folder, seeds=1):
    """Write two groups that were evaluated on the same images. The second misses objects, more with each seed."""
    truth, answers = crowd(2)
    folder.mkdir(exist_ok=True)
    data = write_data(folder / "val.jsonl", truth)
    runs = []
    for group in ("base", "other"):
        for seed in range(seeds):
            path = folder / f"{group}-{seed}"
            left_out = 0 if group == "base" else seed + 1
            predicted = [replace(answer, objects=answer.objects[left_out:]) for answer in answers]
            values = {
                "f1_50": evaluate(truth, predicted).metrics()["f1_50"],
                "ap": 0.25 if group == "base" else 0.5,
            }
            tree = settings(seed=seed, output_dir=str(path), learning_rate=1 if group == "base" else 2)
            write_run(path, [*lines(), evaluation_line(10, **values), END], tree, [manifest(data=data)])
            write_evaluation(path, 10, truth, predicted)
            runs.append(path)
    return runs


def test_a_run_becomes_one_page_beside_it(tmp_path):
    result = run("report", write_run(tmp_path / "one"))
    assert result.stdout.splitlines()[-1] == f"wrote {tmp_path / 'one' / 'report.html'}"
    text = (tmp_path / "one" / "report.html").read_text()
    assert len(Reader(text).all("svg")) > 5
    assert "http://" not in text and "https://" not in text and "default-src 'none'" in text


def test_terms_are_drawn_times_their_weight_and_add_up_to_the_loss():
    run = make_run()
    loss, *terms = (plot.read(run).values for plot in list_loss_plots(group_runs([run]))[:-1])
    assert len(terms) == 2 and sum(terms) == pytest.approx(loss)


def test_a_chart_of_zeros_is_mentioned_and_not_drawn(tmp_path):
    text = page_of(write_run(tmp_path / "one"))
    assert "0 throughout: looped" in text and "<b>looped</b>" not in text


def test_a_run_that_has_logged_nothing_yet_has_a_page(tmp_path):
    text = page_of(write_run(tmp_path / "one", []))
    assert "no step was logged" in text and text.count("Nothing was logged.") == 3


def test_a_loss_that_is_not_a_number_is_a_gap_and_a_cross(tmp_path):
    logged = [line | ({"loss": None} if line["step"] == 5 else {}) for line in lines()]
    text = page_of(write_run(tmp_path / "one", logged))
    assert 'class="broken"' in text and "loss was NaN or infinite in 1 line (step 5)" in text


def test_everything_from_the_run_is_written_as_text(tmp_path):
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    tree = settings(output_dir=evil, note=evil, run_name=evil)
    start = manifest(command=[evil], git={"commit": evil}, packages={evil: evil}, python=evil)
    start |= {"data": {evil: {"file": evil, "records": 1, "sha256": evil}}, "rollouts": {evil: evil}}
    start["objective"] = {"terms": [], "idle": {evil: evil}, "masked_desc": [evil]}
    logged = [line | {"coord_diag/<img src=x>": 1.0, "parse/invalid/<b>": 1.0} for line in lines()]
    text = page_of(write_run(tmp_path / "<b>one", logged, tree, [start]))
    assert not Reader(text).all("img") and not Reader(text).all("script")
    assert "&lt;b&gt;one" in text


def test_secrets_in_settings_are_not_on_the_page(tmp_path):
    folders = [tmp_path / name for name in ("one", "other")]
    for k, folder in enumerate(folders):
        write_run(folder, tree=settings(output_dir=str(folder), learning_rate=k, hub_token=f"very-secret-{k}"))
    text = page_of(*folders, "--out", folders[0] / "report.html")
    assert "training.learning_rate" in text and "very-secret" not in text


def test_seeds_are_one_group_with_a_band(tmp_path):
    for seed in (1, 2, 3):
        logged = [line | {"loss": line["loss"] + seed} for line in lines()]
        write_run(tmp_path / f"x-{seed}", [*logged, END], settings(seed=seed, output_dir=f"x-{seed}"))
    file = tmp_path / "all.html"
    result = run("report", *(tmp_path / f"x-{seed}" for seed in (1, 2, 3)), "--out", file)
    assert "A  x: 3 runs, seeds 1, 2, 3" in result.stdout
    text = file.read_text()
    assert 'class="band"' in text and "the band is from the lowest to the highest run" in text


def test_the_table_and_the_page_show_the_difference(tmp_path):
    runs = write_two_groups(tmp_path)
    result = run("report", *runs, "--out", tmp_path / "all.html", "--resamples", 300)
    row = next(line for line in result.stdout.splitlines() if line.startswith("F1 "))
    truth, answers = crowd(2)
    assert f"{evaluate(truth, answers).metrics()['f1_50']:.4f}" in row
    text = (tmp_path / "all.html").read_text()
    assert "300 times, as many images as there are (12)" in text
    assert '<th scope="row">AP</th><td>0.2500</td><td>0.5000</td>' in text and "AP has no interval" in text
    assert "nothing can be said about other seeds" in text


def test_with_incomplete_labels_no_f1_or_precision_is_called_better_or_worse(tmp_path):
    judged = {}
    for labels in ("complete", "incomplete"):
        runs = write_two_groups(tmp_path / labels)
        truth, answers = crowd(2)
        noise = tuple(prediction("ghost", (20 * k, 980, 20 * k + 9, 990)) for k in range(6))
        noisy = [replace(answer, objects=answer.objects[::2] + noise) for answer in answers]
        write_evaluation(runs[1], 10, truth, noisy)
        for run_folder in runs:
            tree = yaml.safe_load((run_folder / "resolved.yaml").read_text())
            tree["custom"]["val_labels"] = labels
            (run_folder / "resolved.yaml").write_text(yaml.safe_dump(tree))
        run("report", *runs, "--out", tmp_path / "report.html", "--resamples", 300)
        text = (tmp_path / "report.html").read_text()
        rows = re.findall(r'<tr class="row (?:better|worse)"><th scope="row">([^<]+)</th>', text)
        judged[labels] = set(rows)
        assert ("custom.val_labels" in text.partition("Compared on the same images")[2]) == (
            labels == "incomplete"
        )
    assert {"F1", "precision", "recall"} <= judged["complete"]
    assert "recall" in judged["incomplete"]
    assert not [name for name in judged["incomplete"] if name.startswith(("F1", "precision", "over"))]


def test_a_labelled_share_adds_the_estimates_and_the_verdict_of_evaluate(tmp_path):
    runs, share = write_two_groups(tmp_path), ("--labelled-share", 0.5, 0.9)
    printed = run("report", *runs, *share, "--out", tmp_path / "all.html", "--resamples", 100).stdout
    preds = [word for path in runs for word in ("--preds", path / "evaluations/step-10.json")]
    evaluated = run("evaluate", "--data", tmp_path / "val.jsonl", *preds, *share).stdout
    estimates = evaluated[evaluated.index("estimated, against") :].strip()
    assert estimates in printed
    _, *rows, verdict = estimates.splitlines()
    text = (tmp_path / "all.html").read_text()
    assert len(rows) == 3 and verdict.startswith("B: ") and f">{verdict}</p>" in text
    for name, *cells in (re.split(" {2,}", row.strip().replace("f1", "F1")) for row in rows):
        assert f'<th scope="row">{name}</th>' + "".join(f"<td>{cell}</td>" for cell in cells) in text
    assert "custom.val_labels" in text and not re.search(r'(better|worse)"><th scope="row">(F1|precision)', text)


def test_the_settings_in_which_groups_differ_are_at_the_top(tmp_path):
    folders = [tmp_path / name for name in ("one", "other")]
    for k, folder in enumerate(folders):
        write_run(folder, tree=settings(output_dir=str(folder), key=f"<{k}>"))
    text = page_of(*folders, "--out", folders[0] / "report.html")
    assert "<code>training.key</code></th><td>&lt;0&gt;</td><td>&lt;1&gt;</td>" in text
    assert text.index('id="settings"') < text.index('id="loss"')
    assert 'id="settings"' not in page_of(folders[0])


def test_three_seeds_on_both_sides_have_an_interval_with_seeds_and_two_have_none(tmp_path):
    two, three = write_two_groups(tmp_path / "few", seeds=2), write_two_groups(tmp_path, seeds=3)
    few = run("report", *two, "--out", tmp_path / "few.html", "--resamples", 200)
    assert "95 % over images" in few.stdout and "with seeds" not in few.stdout
    stdout = run("report", *three, "--out", tmp_path / "all.html", "--resamples", 200).stdout
    text = (tmp_path / "all.html").read_text()
    assert "95 % with seeds" in text and "95 % with seeds" in stdout
    images, seeds = re.search(r"^F1 .* (\S+ to \S+) +(\S+ to \S+) *$", stdout, re.M).groups()
    assert images != seeds and f"<td>{images}</td><td>{seeds}</td>" in text


def test_runs_evaluated_on_different_data_are_not_compared_and_the_reason_is_given(tmp_path):
    base, other = write_two_groups(tmp_path)
    (start,) = json.loads((other / "run.json").read_text())
    start["data"]["val"]["sha256"] = "0" * 64
    (other / "run.json").write_text(json.dumps([start]))
    result = run("report", base, other, "--out", tmp_path / "all.html")
    assert "not compared: the runs were evaluated on different data" in result.stderr
    text = (tmp_path / "all.html").read_text()
    assert "Not compared: the runs were evaluated on different data" in text
    assert 'class="numbers forest"' not in text


def test_missing_or_changed_data_is_an_error_with_two_fixes(tmp_path):
    runs = write_two_groups(tmp_path)
    (tmp_path / "val.jsonl").rename(tmp_path / "moved.jsonl")
    message = run("report", *runs, "--out", tmp_path / "a.html", code=1).stderr
    assert "val.jsonl: no such file" in message and "--data FILE" in message and "--at none" in message
    run("report", *runs, "--out", tmp_path / "a.html", "--data", tmp_path / "moved.jsonl")
    run("report", *runs, "--out", tmp_path / "a.html", "--at", "none")
    with (tmp_path / "moved.jsonl").open("a") as file:
        file.write("\n")
    message = run("report", *runs, "--out", tmp_path / "a.html", "--data", tmp_path / "moved.jsonl", code=1).stderr
    assert "its hash is" in message and "the file has changed" in message


def test_runs_evaluated_on_several_files_are_compared_if_no_file_has_changed(tmp_path):
    runs = write_two_groups(tmp_path)
    expected = run("report", *runs, "--out", tmp_path / "a.html", "--resamples", 300).stdout
    lines_of_data = (tmp_path / "val.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "val.jsonl").unlink()
    for name, part in (("0", lines_of_data[:5]), ("1", lines_of_data[5:])):
        (tmp_path / f"val-{name}.jsonl").write_text("".join(part))
    data = {"val": fingerprint(open_data([[tmp_path / "val-0.jsonl", tmp_path / "val-1.jsonl"]]))}
    for path in runs:
        (start,) = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps([start | {"data": data}]))
    assert run("report", *runs, "--out", tmp_path / "a.html", "--resamples", 300).stdout == expected
    message = run("report", *runs, "--out", tmp_path / "a.html", "--data", tmp_path / "val-0.jsonl", code=1).stderr
    assert "val-0.jsonl: its hash is" in message
    with (tmp_path / "val-1.jsonl").open("a") as file:
        file.write("\n")
    assert "val-1.jsonl: its hash is" in run("report", *runs, "--out", tmp_path / "a.html", code=1).stderr


def test_runs_that_were_evaluated_on_the_same_part_of_the_records_are_compared_on_it(tmp_path):
    runs = write_two_groups(tmp_path)
    truth, _ = crowd(2)
    answers = [read_predictions(path / "evaluations/step-10.json", truth)[::2] for path in runs]
    for path, part in zip(runs, answers, strict=True):
        write_evaluation(path, 10, truth, part)
    run("report", *runs, "--out", tmp_path / "a.html", "--resamples", 300)
    assert f"as many images as there are ({len(answers[0])})" in (tmp_path / "a.html").read_text()
    write_evaluation(runs[1], 10, truth, answers[1][1:])
    message = run("report", *runs, "--out", tmp_path / "a.html", code=1).stderr
    assert "which are not the same" in message and "custom.eval_samples" in message


def test_evaluations_of_different_steps_are_reported_with_the_last_shared_step(tmp_path):
    base, other = write_two_groups(tmp_path)
    write_evaluation(base, 20, *crowd(2))
    result = run("report", base, other, "--out", tmp_path / "a.html")
    assert "different steps (A 20; B 10); --at 10 compares all" in result.stderr
    assert "different steps" not in run("report", base, other, "--out", tmp_path / "a.html", "--at", "10").stderr
    message = run("report", base, other, "--out", tmp_path / "a.html", "--at", "20", code=1).stderr
    assert "no evaluation at step 20\n  there is one at 10" in message


@pytest.mark.parametrize(
    ("file", "text"),
    [
        *(("resolved.yaml", text) for text in (MANY, "a: &a\n  b: *a\n", "[" * 1200)),
        *(("run.json", text) for text in ("[" * 200_000, "[%s%s]" % ('{"a":' * 300 + "1", "}" * 300))),
        *(("metrics.jsonl", f'{{"step": 1, "x": {text}\n') for text in ("[" * 200_000, "1" + "0" * 400 + "}")),
    ],
)
def test_a_file_that_could_exhaust_its_reader_is_reported_with_its_name(tmp_path, file, text):
    folder = write_run(tmp_path / "one")
    (folder / file).write_text(text)
    assert file in run("report", folder, code=1).stderr


def test_the_page_of_the_inspector_is_linked_from_where_the_report_is(tmp_path):
    folder = write_run(tmp_path / "a run")
    (folder / "inspect.html").write_text("")
    (tmp_path / "pages").mkdir()
    run("report", folder, "--out", tmp_path / "pages" / "r.html")
    links = [link["href"] for link in Reader((tmp_path / "pages" / "r.html").read_text()).all("a")]
    assert links == ["../a%20run/inspect.html"]


def test_ten_thousand_steps_make_a_small_page_within_seconds(tmp_path):
    metrics = {f"coord_diag/{k}": 0.1 * k for k in range(60)}
    logged = [line | metrics | {"loss": 5.0 + (step % 7)} for step, line in enumerate(lines(10_000))]
    folder = write_run(tmp_path / "long", [*logged, evaluation_line(10_000, f1_50=0.5)])
    since = time.process_time()
    text = page_of(folder)
    assert time.process_time() - since < 5
    assert len(text) < 3_000_000
    assert "A point stands for 167 steps" in text
