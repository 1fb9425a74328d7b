"""`coordexp data doctor`: what is wrong with a file of records, and what it is made of."""

import json
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from coordexp.cli.console import need, out, printable, stop, telling

if TYPE_CHECKING:
    from coordexp.data.doctor import Finding, Report
    from coordexp.data.doctor.measures import CountTokens

SHOWN_CLASSES = 10
RARE = 10  # objects


class Images(StrEnum):
    head = "head"
    decode = "decode"
    skip = "skip"


FileArgument = Annotated[
    Path, typer.Argument(exists=True, dir_okay=False, help="A JSONL file of records.", show_default=False)
]


def doctor(
    file: FileArgument,
    images: Annotated[
        Images, typer.Option(help="Read the head of each image (fast), decode every pixel, or skip them.")
    ] = Images.head,
    model: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="A folder with tokenizer.json, to count tokens."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens that an answer may have. Needs --model.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find broken lines, images and shapes, wrong formats and duplicates. Exits 1 when there are errors."""
    if max_length is not None and model is None:
        stop("--max-length needs the tokenizer that counts\n  add --model DIR")
    if images is not Images.skip:
        need("PIL", extra="train")
    from coordexp.data.doctor import examine
    from coordexp.data.images import image_facts

    look = None if images is Images.skip else partial(image_facts, decode=images is Images.decode)
    count_tokens = None if model is None else _token_counter(model)
    with telling(f"reading {file}") as tell:
        report = examine(
            file,
            look=look,
            count_tokens=count_tokens,
            max_length=max_length,
            tell=lambda share: tell(f"{share:.0%}"),
        )
    if as_json:
        typer.echo(json.dumps(_object(report), indent=2))
    else:
        _print(report)
    raise typer.Exit(1 if report.errors else 0)


def _token_counter(folder: Path) -> "CountTokens":
    """Return a function that counts the tokens of an answer with the tokenizer in `folder`."""
    from coordexp.correction.serialise import count_answer_tokens
    from coordexp.vocab import VocabularyTable

    return partial(count_answer_tokens, table=VocabularyTable.from_folder(folder))


def _object(report: "Report") -> dict[str, Any]:
    tokens = report.tokens
    return {
        "file": str(report.file),
        "ok": not report.errors,
        "records": report.records,
        "objects": report.objects,
        "findings": [
            {
                "code": finding.code,
                "severity": finding.kind.severity,
                "problem": finding.kind.problem,
                "fix": finding.kind.fix,
                "count": finding.count,
                "examples": [{"line": example.line, "detail": example.detail} for example in finding.examples],
            }
            for finding in report.findings
        ],
        "classes": dict(report.classes.counts.most_common()),
        "objects_of_uncounted_classes": report.classes.uncounted,
        "sides_in_bins": {
            "median": report.sizes.median,
            "histogram": [
                {"from": low, "below": high, "objects": count} for low, high, count in report.sizes.histogram
            ],
        },
        "tokens": tokens
        and {
            "records": tokens.records,
            "per_object": round(tokens.per_object, 1),
            "median": tokens.median,
            "p95": tokens.high,
            "longest": tokens.longest,
        },
    }


def _print(report: "Report") -> None:
    for finding in report.findings:
        _print_finding(finding, report.file)
    _print_classes(report)
    _print_sizes(report)
    if report.tokens:
        count = report.tokens
        out.print(
            f"tokens per answer: median {count.median:,}, 95 % up to {count.high:,}, longest {count.longest:,}; "
            f"{count.per_object:.1f} an object (image and prompt come on top)"
        )
    warnings = sum(finding.kind.severity == "warning" for finding in report.findings)
    errors = len(report.findings) - warnings
    verdict = Text(f"{report.file}: {report.records:,} records, {report.objects:,} objects: ", style="bold")
    verdict.append(_many(errors, "kind of error", "kinds of errors"), style="red" if errors else "green")
    verdict.append(", ").append(
        _many(warnings, "kind of warning", "kinds of warnings"), style="yellow" if warnings else "green"
    )
    out.print(verdict)


def _print_finding(finding: "Finding", file: Path) -> None:
    error = finding.kind.severity == "error"
    line = Text(finding.kind.severity, style="bold red" if error else "bold yellow")
    line.append(f" {finding.code}: ", style="bold").append(finding.kind.problem)
    if finding.examples[0].line is not None:
        line.append(f" ({finding.count:,})")
    out.print(line)
    out.print(Text(f"  {finding.kind.fix}", style="green"))
    for example in finding.examples:
        place = "" if example.line is None else f"{file}:{example.line}: "
        out.print(Text(f"  {place}{printable(example.detail)}", style="dim"))


def _print_classes(report: "Report") -> None:
    counts = report.classes.counts
    if not counts:
        return
    rare = sum(count < RARE for count in counts.values())
    more = f", {report.classes.uncounted:,} objects of still others" if report.classes.uncounted else ""
    out.print(Text(f"classes: {len(counts):,}, {rare:,} of them with fewer than {RARE} objects{more}"))
    _print_bars([(printable(desc), count) for desc, count in counts.most_common(SHOWN_CLASSES)], report.objects)


def _print_sizes(report: "Report") -> None:
    if report.sizes.median is not None:
        out.print(f"sides of objects, in bins: median {report.sizes.median}")
        rows = [(f"{low} to {high - 1}", count) for low, high, count in report.sizes.histogram]
        _print_bars(rows, report.objects)


def _print_bars(rows: list[tuple[str, int]], total: int) -> None:
    wide = min(32, max(cell_len(name) for name, _ in rows))
    for name, count in rows:
        bar = Text(f"  {set_cell_size(name, wide)} {count:>9,} {count / total:>6.1%} ")
        out.print(bar.append("#" * round(30 * count / total), style="cyan"))


def _many(count: int, one: str, more: str) -> str:
    return f"no {more.removeprefix('kinds of ')}" if not count else f"{count} {one if count == 1 else more}"
