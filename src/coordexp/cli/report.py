"""`coordexp report`: run folders as one page to look at, and how sure the differences between them are."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordexp.cli.console import err, need, out, printable, stop, telling
from coordexp.inspector.run import REPORT

if TYPE_CHECKING:
    from coordexp.inspector.report import Compared, Comparison, Examples, Group

NARROWEST = 100  # columns that a table needs; narrower, numbers would lose their digits
DATA = "Where the held-out records are now. Unset: where run.json says."
SHOWN = (
    "f1_50",
    "recall_50",
    "precision_50",
    "f1_50_any_class",
    "duplicates",
    "truncated",
    "early_stop",
    "over_count",
)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            file_okay=False,
            help="Run folders. The group of the first is the baseline.",
            show_default=False,
        ),
    ],
    page_file: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", dir_okay=False, help="The page. Unset: RUN/report.html, or report.html of several."
        ),
    ] = None,
    at: Annotated[
        str, typer.Option(help="Evaluations to compare: last, a step, or none for no comparison.")
    ] = "last",
    resamples: Annotated[int, typer.Option(min=100, help="Resamples of the bootstrap.")] = 2000,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            "-d",
            exists=True,
            dir_okay=False,
            help=DATA,
        ),
    ] = None,
) -> None:
    """Make a page of curves, times, settings and notes; of several runs, also paired intervals of differences.

    Runs that differ in seeds and names alone are one group: lines are means, bands lowest to highest.
    """
    file = _checked_file(page_file, runs)
    step = _checked_step(at)
    if len(runs) == 1 and (step is not None or data is not None):
        stop("--at and --data are for a comparison\n  give two runs or more, or leave them out")
    from coordexp.document import save
    from coordexp.inspector.report import dumped, grouped, read_logged, report_page

    with telling("reading") as tell:
        found = []
        for folder in runs:
            tell(folder.name)
            found.append(read_logged(folder))
        groups = grouped(found)
    result = _compare(groups, at, step, resamples, data)
    with telling("drawing"):
        links = dumped(groups, file)
        save(file, report_page(groups, result, links))
    _tell(groups, result, links)
    out.print(f"wrote {file}", markup=False)


def _checked_file(given: Path | None, runs: Sequence[Path]) -> Path:
    file = given or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    if file.suffix != ".html":
        stop(
            f"--out {file}: the suffix is {file.suffix or 'missing'}\n"
            "  the page is an HTML file; give a name like report.html"
        )
    return file


def _checked_step(at: str) -> int | None:
    if at in ("last", "none"):
        return None
    if not at.isdecimal():
        stop(f"--at {at}: not a step\n  give last, none, or a whole number of RUN/evaluations/step-N.json")
    return int(at)


def _compare(
    groups: "Sequence[Group]", at: str, step: int | None, resamples: int, data: Path | None
) -> "Compared | str":
    from coordexp.inspector.report import Request, compared, why_not

    if reason := "--at none was given" if at == "none" else why_not(groups):
        return reason
    need("hotcoco", extra="evaluate")

    with telling("comparing") as tell:
        return compared(groups, Request(step, resamples, data), tell)


def _tell(groups: "Sequence[Group]", result: "Compared | str", links: "Sequence[Examples]") -> None:
    from coordexp.inspector.report import way_to_inspect

    for group in groups:
        count = len(group.runs)
        words = (
            f"{group.letter}  {group.name}: {count} run{'s' if count > 1 else ''}, seed{'s' if count > 1 else ''} "
        )
        out.print(printable(words + group.seeds), markup=False)
    if isinstance(result, str):
        if len(groups) > 1:
            err.print(printable(f"not compared: {result}"), markup=False, style="yellow")
    else:
        _print(result)
    if without := [one for one in links if one.steps and not one.page]:
        out.print(f"dumped examples without a page: `{way_to_inspect(without)}` makes it", markup=False)


def _print(found: "Compared") -> None:
    wide = Console(width=max(out.width, NARROWEST), highlight=False)
    for one in found.comparisons:
        wide.print()
        wide.print(_table(one, found.images))
    for note in found.notes:
        err.print(printable(note), markup=False, style="yellow")
    out.print()


def _table(one: "Comparison", images: int) -> Table:
    """A row is bold when every interval that it has leaves out 0."""
    from coordexp.inspector.report.families import EVALUATED

    known = {row.name: row for row in one.rows}
    rows = [known[name] for name in SHOWN if name in known]
    seeds = any(row.with_seeds is not None for row in rows)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold underline")
    heads = [f"{images} images", one.base.letter, one.other.letter, "difference", "95 % over images"]
    for k, head in enumerate([*heads, *(["95 % with seeds"] if seeds else []), "same sign"]):
        table.add_column(head, justify="right" if k else "left", no_wrap=True)
    for row in rows:
        words = [f"{row.base:.4f}", f"{row.other:.4f}", f"{row.value:+.4f}", _interval(row.images)]
        words += [_interval(row.with_seeds)] if seeds else []
        words.append("-" if row.agreeing is None else f"{100 * row.agreeing:.1f} %")
        table.add_row(Text(EVALUATED[row.name][0]), *words, style="bold" if row.clear else "")
    return table


def _interval(interval: tuple[float, float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:+.4f} to {interval[1]:+.4f}"
