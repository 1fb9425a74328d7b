"""`coordexp data`: import data, find what is wrong with it, and look at it."""

import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from coordexp.cli import data_import
from coordexp.cli.console import JsonOption, need, need_page, out, print_findings, print_json, progress, sanitize
from coordexp.errors import UserError

if TYPE_CHECKING:
    from coordexp.data.doctor import DataReport
    from coordexp.data.doctor.examine import CountTokens

SHOWN_CLASSES = 10
RARE = 10  # classes with fewer objects are rare

app = typer.Typer(help="Import, check and look at training data.", no_args_is_help=True)
app.add_typer(data_import.app, name="import")


FileArgument = Annotated[
    Path, typer.Argument(exists=True, dir_okay=False, help="A JSONL file of records.", show_default=False)
]


@app.command("doctor")
def doctor(
    file: FileArgument,
    images: Annotated[
        Literal["head", "decode", "skip"],
        typer.Option(help="Read the header of each image (fast), decode all pixels, or skip images."),
    ] = "head",
    model: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="A folder with tokenizer.json, to count tokens."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens that an answer may have. Needs --model.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find broken lines, images and shapes, wrong formats and duplicates. Exits 1 if there are errors."""
    if max_length is not None and model is None:
        raise UserError("--max-length needs a tokenizer to count tokens with", "add --model DIR")
    if images != "skip":
        need("PIL", extra="train")
    from coordexp.data.doctor import examine
    from coordexp.data.images import read_image_facts

    look = None if images == "skip" else partial(read_image_facts, decode=images == "decode")
    count_tokens = None if model is None else _token_counter(model)
    with progress(f"reading {file}") as show:

        def show_share(share: float) -> None:
            show(f"{share:.0%}")

        report = examine(
            file,
            look=look,
            count_tokens=count_tokens,
            max_length=max_length,
            notify=show_share,
            processes=len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1,
        )
    if as_json:
        print_json(str(report.file), report.findings, _describe_data(report))
    else:
        _print_report(report)
    raise typer.Exit(1 if report.errors else 0)


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
    from coordexp.pages.records import read_cards, render_records

    need_page(target)
    with progress(f"reading {file}") as notify:
        cards = list(read_cards(file, limit, problems_only=problems, notify=lambda line: notify(f"line {line:,}")))
        kind = "records with problems" if problems else "records"
        scope = f"{'the first' if len(cards) == limit else 'all'} {len(cards):,} {kind}"
        save_page(target, render_records(cards, str(file), scope))
    out.print(f"wrote {target}: {scope}", markup=False)


def _token_counter(folder: Path) -> "CountTokens":
    """Return a function that counts the tokens of an answer with the tokenizer in `folder`."""
    from coordexp.correction.segment import count_answer_tokens
    from coordexp.vocab import VocabularyTable

    return partial(count_answer_tokens, table=VocabularyTable.from_folder(folder))


def _describe_data(report: "DataReport") -> dict[str, Any]:
    """Return the statistics of the file, for `--json`."""
    return {
        "records": report.records,
        "objects": report.objects,
        "classes": dict(report.classes.counts.most_common()),
        "objects_of_uncounted_classes": report.classes.uncounted,
        "sides_in_bins": {
            "median": report.sizes.median,
            "histogram": [
                {"from": low, "below": high, "objects": count} for low, high, count in report.sizes.histogram
            ],
        },
        "tokens": report.tokens and asdict(report.tokens),
    }


def _print_report(report: "DataReport") -> None:
    print_findings(report.findings, out)
    _print_classes(report)
    _print_sizes(report)
    if report.tokens:
        tokens = report.tokens
        out.print(
            f"tokens per answer: median {tokens.median:,}, 95 % up to {tokens.p95:,}, "
            f"longest {tokens.longest:,}; {tokens.per_object:.1f} per object (image and prompt come on top)"
        )
    warnings = sum(finding.severity == "warning" for finding in report.findings)
    errors = len(report.findings) - warnings
    verdict = Text(f"{report.file}: {report.records:,} records, {report.objects:,} objects: ", style="bold")
    verdict.append(_count_kinds(errors, "error"), style="red" if errors else "green")
    verdict.append(", ").append(_count_kinds(warnings, "warning"), style="yellow" if warnings else "green")
    out.print(verdict)


def _print_classes(report: "DataReport") -> None:
    counts = report.classes.counts
    if not counts:
        return
    rare = sum(count < RARE for count in counts.values())
    more = f", {report.classes.uncounted:,} objects of other classes" if report.classes.uncounted else ""
    out.print(Text(f"classes: {len(counts):,}, {rare:,} of them with fewer than {RARE} objects{more}"))
    _print_bars([(sanitize(desc), count) for desc, count in counts.most_common(SHOWN_CLASSES)], report.objects)


def _print_sizes(report: "DataReport") -> None:
    if report.sizes.median is not None:
        out.print(f"sides of objects, in bins: median {report.sizes.median}")
        rows = [(f"{low} to {high - 1}", count) for low, high, count in report.sizes.histogram]
        _print_bars(rows, report.objects)


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
