"""Messages about run folders that are shown as pages."""

import json
import shutil

from coordexp.pages.rollouts import choose_examples
from tests.command import run
from tests.messages import provoke
from tests.unit.pages.run_folders import TERMS, manifest, write_dumped_run, write_run

FIRST = "dumps/step-000000.jsonl"
NO_MORE = json.dumps({"format": 1, "place": {"step": 0, "micro": 0, "record": 0}})


@provoke(
    ("run.json", None),
    ("run.json", "{}"),
    ("run.json", "[1]"),
    ("resolved.yaml", "a: [b"),
    ("resolved.yaml", "custom: 3"),
    ("dumps/tokenizer.json", None),
    ("dumps/tokenizer.json", "{"),
    (FIRST, "{}\n"),
    (FIRST, '{"format": 1}\n'),
    (FIRST, f"{NO_MORE}\n"),
    (FIRST, "broken\n"),
    (FIRST, "[]\n"),
)
def inspecting_a_run_with(folder, spoilt):
    template = folder.parent / "dumped run"  # of all these cases
    if not template.exists():
        write_dumped_run(template, steps=(0,))
    copy = shutil.copytree(template, folder / "demo")
    name, content = spoilt
    if content is None:
        (copy / name).unlink()
    else:
        (copy / name).write_text(content)
    return run("inspect", copy, code=1).output


@provoke(["--out", "page.pdf"], ["--port", "9"], ["--serve", "--out", "page.html"])
def inspecting(folder, options):
    return run("inspect", folder, *options, code=1).output


@provoke()
def a_run_without_dumps(folder):
    choose_examples(folder, 9)


@provoke(
    *(("run.json", text) for text in ("[]", "[3]", '[{"data": {"val": {"file": 1}}}]')),
    ("resolved.yaml", "training: [1]"),
    *(("metrics.jsonl", text) for text in ("{\n", '{"step": -1}\n', '{"step": 1, "loss": -1e308}\n')),
)
def reporting_a_run_with(folder, spoilt):
    (write_run(folder / "one") / spoilt[0]).write_text(spoilt[1])
    return run("report", folder / "one", code=None).output


@provoke(
    *({"command": [3]}, {"objective": {"terms": [TERMS[0] | {"weight": 1e300}]}}),
    {"objective": {"terms": [{"term": "a"}]}},
)
def reporting_a_run_whose_manifest_has(folder, changes):
    write_run(folder / "one", starts=[manifest(**changes)])
    return run("report", folder / "one", code=None).output


@provoke(
    *(["--out", "page.txt"], ["--out", "page"], ["--at", "best"]),
    *(["--labelled-share", *share] for share in (["0.5", "0.7"], ["0.7", "0.5"])),
)
def reporting(folder, options):
    return run("report", write_run(folder / "one"), *options, code=1).output


@provoke()
def reporting_a_folder_that_is_not_a_run(folder):
    return run("report", folder, code=1).output
