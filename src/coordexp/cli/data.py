"""`coordexp data`: import and export data, find and leave out what is wrong with it, split it, look at it,
complete its labels, and estimate how many are missing."""

import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from coordexp.cli import data_audit, data_export, data_import, data_suggest
from coordexp.cli.check import SetOption, use_local_model
from coordexp.cli.console import (
    JsonOption,
    need,
    need_new_file,
    need_page,
    out,
    print_findings,
    print_json,
    progress,
    sanitize,
)
from coordexp.config import load_settings
from coordexp.errors import UserError

if TYPE_CHECKING:
    from coordexp.config import Settings
    from coordexp.data.doctor import DataReport
    from coordexp.data.doctor.examine import CountTokens, ReadImage, TokenCount

SHOWN_CLASSES = 10
RARE = 10  # classes with fewer objects are rare

app = typer.Typer(
    help="Import, check, clean, split, thin, export, look at, complete and audit data.", no_args_is_help=True
)
app.command("import")(data_import.import_)
app.command("export")(data_export.export)
app.command("suggest")(data_suggest.suggest)
app.command("complete")(data_suggest.complete)
app.command("audit")(data_audit.audit)


ImagesOption = Annotated[
    Literal["head", "decode", "skip"],
    typer.Option(help="Read the header of each image (fast), decode all pixels, or skip images."),
]
FileArgument = Annotated[
    Path, typer.Argument(exists=True, dir_okay=False, help="A JSONL file of records.", show_default=False)
]


@app.command("doctor")
def doctor(
    file: FileArgument,
    images: ImagesOption = "head",
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="The config of a run on FILE: count the tokens of its examples, for global_max_length.",
        ),
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    shard: Annotated[
        str | None, typer.Option(help="Read only a part of the file, 0/16 to 15/16, unless that is finished.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", "-o", file_okay=False, help="With --shard: a folder. `shards merge` reports on it."),
    ] = None,
) -> None:
    """Find broken lines, images and shapes, wrong formats and duplicates. Exits 1 if there are errors."""
    if overrides and config is None:
        raise UserError("--set has no effect without --config", "add --config, or leave it out")
    if (shard is None) != (folder is None):
        raise UserError("--shard and --out belong together", "give both, or none for a report on the whole file")
    need_image_reader(images)
    from coordexp.data.doctor import examine

    count_tokens, max_length = None, None
    if config is not None:
        need("torch", "transformers", extra="train")
        with progress("loading"):
            settings = use_local_model(load_settings(config, overrides=overrides or ())).settings
            count_tokens = _make_counter(settings, file)
            max_length = settings.global_max_length
    options: dict[str, Any] = {"look": _image_reader(images), "count_tokens": count_tokens}
    options |= {"max_length": max_length, "processes": _processors()}
    with progress(f"reading {file}") as show:
        options["notify"] = lambda share: show(f"{share:.0%}")
        if shard is not None and folder is not None:
            from coordexp.data import RecordFile
            from coordexp.data.doctor.shards import examine_shard
            from coordexp.data.shards import Shard

            request = {"data": RecordFile(file).sha256, "images": images, "max_length": max_length}
            request |= {
                name: str(value) for name, value in (("config", config), ("overrides", overrides)) if value
            }
            part = Shard.parse(shard)
            is_new = examine_shard(file, folder, part, request, **options)
            out.print(f"shard {part} in {folder}{'' if is_new else ': it was finished before'}", markup=False)
            return
        report = examine(file, **options)
    show_report(report, max_length, as_json)


def show_report(report: "DataReport", max_length: int | None, as_json: bool) -> None:
    """Print a report, and exit with 1 if there are errors."""
    if as_json:
        print_json(str(report.file), report.findings, _describe_data(report))
    else:
        _print_report(report, max_length)
    raise typer.Exit(1 if report.errors else 0)


@app.command("clean")
def clean_file(
    file: FileArgument,
    target: Annotated[Path, typer.Option("--out", "-o", help="A new JSONL file.", show_default=False)],
    images: ImagesOption = "head",
) -> None:
    """Write a file without the records and objects that the doctor calls errors, and say what was dropped.

    Repeated objects are dropped too. Image paths stay the same, so the new file belongs in the folder of
    the old one. A file that is suspect as a whole, e.g. with boxes as x, y, width, height, is refused.
    """
    need_image_reader(images)
    _need_sibling(file, target)
    from coordexp.data.doctor.clean import clean

    with progress(f"reading {file}") as show:
        cleaned, dropped = clean(
            file,
            target,
            look=_image_reader(images),
            notify=lambda share: show(f"{share:.0%}"),
            processes=_processors(),
        )
    for kind in dropped:
        line = Text("dropped", style="red").append(f" {kind.count:>9,}  {kind.problem}  ", style="default")
        out.print(line.append(sanitize(str(kind.places[0])), style="dim"))
    changed = f", {cleaned.changed:,} of them with fewer objects" if cleaned.changed else ""
    out.print(f"wrote {target}: {cleaned.records:,} records{changed}, {cleaned.objects:,} objects", markup=False)


@app.command("split")
def split_file(
    file: FileArgument,
    val: Annotated[float, typer.Option(help="The share of records to hold out (0.1), or their number (500).")],
    seed: Annotated[int, typer.Option(help="Another seed holds out other records.")] = 0,
) -> None:
    """Divide a file into FILE.train.jsonl and FILE.val.jsonl, beside it. Every class gives its share of records.

    The same file and seed give the same parts on every machine. Records with the same image stay together.
    """
    if val <= 0 or (val >= 1 and val != round(val)):
        raise UserError(f"--val {val:g} is neither a share below 1 nor a number of records", "give e.g. --val 0.1")
    train, held_out = (file.with_name(f"{file.stem}.{name}.jsonl") for name in ("train", "val"))
    for part in (train, held_out):
        need_new_file(part)
    from coordexp.data.split import split_records

    with progress(f"splitting {file}") as show:
        share, count = (val, None) if val < 1 else (None, round(val))
        report = split_records(file, train, held_out, share, count, seed, show)
    out.print(f"wrote {train}: {report.train:,} records", markup=False)
    out.print(f"wrote {held_out}: {report.held_out:,} records", markup=False)
    if report.repeated:
        out.print(f"{report.repeated:,} records have the image of an earlier one and are on its side")
    absent = [row for row in report.classes if not row.held_out]
    if absent:
        named = ", ".join(f"{sanitize(row.desc)} ({row.records:,})" for row in absent[:SHOWN_CLASSES])
        more = f" and {len(absent) - SHOWN_CLASSES:,} more" if len(absent) > SHOWN_CLASSES else ""
        out.print(Text(f"without a held-out record: {named}{more}", style="yellow"))


@app.command("thin")
def thin_file(
    file: FileArgument,
    remove: Annotated[float, typer.Option(help="The share of labels to remove, e.g. 0.5.")],
    target: Annotated[Path, typer.Option("--out", "-o", help="A new JSONL file.", show_default=False)],
    by: Annotated[
        Literal["object", "class", "size", "crowd"],
        typer.Option(help="Remove any objects, classes of an image, mostly small ones, or mostly in full images."),
    ] = "object",
    seed: Annotated[int, typer.Option(help="Another seed removes other labels.")] = 0,
) -> None:
    """Remove labels at random, to measure what training makes of incomplete ones. Every image keeps a label.

    The same file and seed give the same labels on every machine. Image paths stay the same, so the new file
    belongs in the folder of the old one.
    """
    if not 0 < remove < 1:
        raise UserError(f"--remove {remove:g} is no share of labels", "give e.g. --remove 0.5")
    _need_sibling(file, target)
    from coordexp.data.thin import thin

    with progress(f"thinning {file}") as show:
        thinned = thin(file, target, remove, by, seed, show)
    share = f"{thinned.removed / max(1, thinned.labels):.1%}"
    out.print(f"wrote {target} without {thinned.removed:,} of {thinned.labels:,} labels ({share})", markup=False)


def need_image_reader(images: str) -> None:
    if images != "skip":
        need("PIL", extra="evaluate")


def _image_reader(images: str) -> "ReadImage | None":
    """Return the function that reads the facts of an image file, or None if images are skipped."""
    from coordexp.data.images import read_image_facts

    return None if images == "skip" else partial(read_image_facts, decode=images == "decode")


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def _need_sibling(file: Path, target: Path) -> None:
    """Raise unless the target is a new file in the same folder: image paths are relative to it."""
    need_new_file(target)
    if target.parent.resolve() != file.parent.resolve():
        raise UserError(
            f"{target} is in another folder than {file}, to which the image paths are relative",
            f"give e.g. --out {file.with_name(target.name)}",
        )


@app.command("view")
def view(
    file: FileArgument,
    target: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.", show_default=False)],
    limit: Annotated[int, typer.Option(min=1, help="Records to show, from the start of the file.")] = 200,
    problems: Annotated[bool, typer.Option("--problems", help="Show only records with a problem.")] = False,
) -> None:
    """Write one HTML page with images, shapes and problems. It needs no server and loads nothing."""
    need("PIL", extra="train")
    from coordexp.pages.document import save_page
    from coordexp.pages.records import render_records, view_records

    need_page(target)
    with progress(f"reading {file}") as notify:
        viewed = list(
            view_records(file, limit, problems_only=problems, notify=lambda line: notify(f"line {line:,}"))
        )
        kind = "records with problems" if problems else "records"
        scope = f"{'the first' if len(viewed) == limit else 'all'} {len(viewed):,} {kind}"
        save_page(target, render_records(viewed, str(file), scope))
    out.print(f"wrote {target}: {scope}", markup=False)


def _make_counter(settings: "Settings", file: Path) -> "CountTokens":
    """Return a function that counts the tokens of examples as a run makes them of the records of the file: with
    the prompts of its data set, if that has its own."""
    from coordexp.answers.formats import load_format
    from coordexp.data import Questions
    from coordexp.files import match_files
    from coordexp.rollout.lengths import ExampleCounter
    from coordexp.rollout.prompt import PromptBuilder, load_processor  # these import torch

    custom, folder = settings.custom, Path(settings.model.path)
    own = [
        data
        for data, names in zip(custom.train_data, custom.train_sets.values(), strict=False)
        if any(path.resolve() == file.resolve() for name in names for path in match_files(name))
    ]
    questions = Questions.of(custom, own[0] if own else None)
    prompts = PromptBuilder(load_processor(folder, settings.model.image_limits), questions.of_run)
    answers = load_format(folder, custom.answer_format, order=custom.object_field_order)
    return ExampleCounter(answers, prompts, questions)


def _describe_data(report: "DataReport") -> dict[str, Any]:
    """Return the statistics of the file, for `--json`."""
    facts = report.facts
    return {
        "records": facts.records,
        "questions": facts.questions,
        "objects": facts.objects,
        "classes": dict(facts.classes.most_common()),
        "objects_of_uncounted_classes": facts.uncounted,
        "sides_in_bins": {
            "median": report.median_side,
            "histogram": [{"from": low, "below": high, "objects": count} for low, high, count in report.histogram],
        },
        "tokens": report.tokens and asdict(report.tokens),
        "example_tokens": report.examples and asdict(report.examples),
    }


def _print_report(report: "DataReport", max_length: int | None) -> None:
    facts, classes = report.facts, report.facts.classes
    print_findings(report.findings)
    if classes:
        rare = sum(count < RARE for count in classes.values())
        more = f", {facts.uncounted:,} objects of other classes" if facts.uncounted else ""
        out.print(Text(f"classes: {len(classes):,}, {rare:,} of them with fewer than {RARE} objects{more}"))
        _print_bars([(sanitize(desc), count) for desc, count in classes.most_common(SHOWN_CLASSES)], facts.objects)
    if report.median_side is not None:
        out.print(f"sides of objects, in bins: median {report.median_side}")
        _print_bars([(f"{low} to {high - 1}", count) for low, high, count in report.histogram], facts.objects)
    if tokens := report.tokens:
        per_object = f"; {tokens.per_object:.1f} per object" if facts.objects else ""
        out.print(f"tokens per answer: {_format_lengths(tokens)}{per_object}")
    if examples := report.examples:
        more = f"; global_max_length is {max_length:,}" if max_length else ""
        out.print(f"tokens per example, with prompt and image: {_format_lengths(examples)}{more}")
    warnings = sum(finding.severity == "warning" for finding in report.findings)
    errors = len(report.findings) - warnings
    questions = f" ({facts.questions:,} of them questions)" if facts.questions else ""
    contents = f"{facts.records:,} records{questions}, {facts.objects:,} objects"
    verdict = Text(f"{report.file}: {contents}: ", style="bold")
    verdict.append(_count_kinds(errors, "error"), style="red" if errors else "green")
    verdict.append(", ").append(_count_kinds(warnings, "warning"), style="yellow" if warnings else "green")
    out.print(verdict)


def _format_lengths(tokens: "TokenCount") -> str:
    return f"median {tokens.median:,}, 95 % up to {tokens.p95:,}, longest {tokens.longest:,}"


def _print_bars(rows: list[tuple[str, int]], total: int) -> None:
    width = min(32, max(cell_len(name) for name, _ in rows))
    for name, count in rows:
        bar = Text(f"  {set_cell_size(name, width)} {count:>9,} {count / total:>6.1%} ")
        out.print(bar.append("#" * round(30 * count / total), style="cyan"))


def _count_kinds(count: int, noun: str) -> str:
    """Return for example `no errors`, `1 kind of error` or `2 kinds of errors`."""
    if not count:
        return f"no {noun}s"
    return f"1 kind of {noun}" if count == 1 else f"{count} kinds of {noun}s"
