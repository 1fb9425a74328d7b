"""`coordexp report`: one page about run folders, and how certain the differences between them are.
`coordexp inspect`: single rollouts of a run, and why each token was trained as it was."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordexp.cli.console import err, need, need_page, out, progress, sanitize
from coordexp.errors import UserError, explain

if TYPE_CHECKING:
    from coordexp.evaluate.incomplete import QualityReport
    from coordexp.intervals import RateDifference
    from coordexp.pages.comparison import ComparisonResult
    from coordexp.pages.run_folder import RunGroup

MIN_WIDTH = 100  # columns that a table needs so that no number is cut
QUALITY = ("f1_50", "recall_50", "precision_50", "f1_50_any_class")  # rates that are printed; the page has all
BEHAVIOUR = ("duplicates", "truncated", "skipped", "stopped", "over_count")


def _need_share(share: tuple[float, float] | None) -> tuple[float, float] | None:
    if share is not None and not 0 < share[0] <= share[1] <= 1:
        raise UserError("--labelled-share is no interval of a share", "give two numbers, e.g. 0.57 0.67")
    return share


SHARE = "Of incomplete labels: the interval that `data audit` printed, e.g. 0.57 0.67."
LabelledShareOption = Annotated[tuple[float, float] | None, typer.Option(callback=_need_share, help=SHARE)]


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
            "--out", "-o", dir_okay=False, help="The page. Unset: RUN/report.html, or report.html if several."
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
            help="Where the held-out records are now. Unset: where run.json says.",
        ),
    ] = None,
    labelled_share: LabelledShareOption = None,
) -> None:
    """Make a page of curves, times and notes; for several runs, also settings that differ and paired intervals.

    Runs that differ only in seeds and names are one group: lines are means, bands lowest to highest.
    If labels are incomplete, --labelled-share estimates precision, recall and F1 against all objects.
    """
    from coordexp.pages.comparison import compare_groups, reason_not_to_compare
    from coordexp.pages.document import save_page
    from coordexp.pages.report import find_inspector_pages, render_report
    from coordexp.pages.run_folder import REPORT, group_runs, read_logged_run

    file = page_file or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    need_page(file)
    if at not in ("last", "none") and not at.isdecimal():
        raise UserError(
            f"--at {at}: not a step", "give last, none, or a number N for which RUN/evaluations/step-N.json exists"
        )
    step = int(at) if at.isdecimal() else None
    if len(runs) == 1 and (step is not None or data is not None or labelled_share is not None):
        raise UserError("--at, --data and --labelled-share compare runs", "give two or more, or leave them out")
    with progress("reading") as notify:
        logged = []
        for folder in runs:
            notify(folder.name)
            logged.append(read_logged_run(folder))
        groups = group_runs(logged)
    result: ComparisonResult | str | None  # or the reason why there is none
    result = "--at none was given" if at == "none" else reason_not_to_compare(groups)
    if result is None:
        need("hotcoco", extra="evaluate")
        with progress("comparing") as notify:
            result = compare_groups(groups, step, resamples, labelled_share, data, notify)
    with progress("drawing"):
        save_page(file, render_report(groups, result, find_inspector_pages(groups, file)))
    _print_report(groups, result)
    out.print(f"wrote {file}", markup=False)


def _print_report(groups: "Sequence[RunGroup]", result: "ComparisonResult | str") -> None:
    for group in groups:
        plural = "s" if len(group.runs) > 1 else ""
        words = f"{group.letter}  {group.name}: {len(group.runs)} run{plural}, seed{plural} {group.seeds}"
        out.print(sanitize(words), markup=False)
    if isinstance(result, str):
        if len(groups) > 1:
            err.print(sanitize(f"not compared: {result}"), markup=False, style="yellow")
    else:
        for comparison in result.comparisons:
            out.print()
            print_differences(comparison.rows, result.images, (comparison.base.letter, comparison.other.letter))
            if comparison.quality:
                print_quality(comparison.quality)
        for note in result.notes:
            err.print(sanitize(note), markup=False, style="yellow")
        out.print()


def print_differences(rows: "Sequence[RateDifference]", images: int, letters: Sequence[str] = "AB") -> None:
    """Print a table of rates. A row is bold if it has intervals and none of them contains 0."""
    from coordexp.pages.report import EVALUATED

    seeds = any(row.seed_interval for row in rows)
    heads = [f"{images} images", *letters, "difference", "95 % over images"]
    table = make_table(*heads, *(["95 % with seeds"] if seeds else []))
    for row in rows:
        if row.name in QUALITY + BEHAVIOUR:
            title = Text(EVALUATED[row.name][0])
            table.add_row(title, *row.describe(seeds), style="bold" if row.is_clear else "")
    print_wide(table)


def make_table(*heads: str) -> Table:
    """Return a table without rows, whose first column is for words and whose others are for numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold underline")
    for k, head in enumerate(heads):
        table.add_column(head, justify="right" if k else "left", no_wrap=True, max_width=None if k else 24)
    return table


def print_wide(table: Table) -> None:
    Console(width=max(out.width, MIN_WIDTH), highlight=False).print(table)


def print_quality(quality: "QualityReport") -> None:
    out.print(Text(quality.title, style="bold"))
    for name, cells in quality.rows.items():
        out.print(f"  {name:<10} {'   '.join(cells)}", markup=False)
    if quality.note:
        out.print(Text(f"note: {quality.note}", style="yellow"))
    out.print(Text(quality.conclusion, style="bold"))


PORT = 8421


def inspect(
    run: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="The folder of a run.", show_default=False)
    ],
    target: Annotated[
        Path | None, typer.Option("--out", "-o", help="The HTML file to write. Unset: RUN/inspect.html.")
    ] = None,
    samples: Annotated[
        int,
        typer.Option(min=1, help="Most dumped examples on the page: the first step, the last, and others evenly."),
    ] = 200,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the pages to this machine while the run goes on.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help=f"With --serve. Unset: {PORT}. 0: a free one.")
    ] = None,
) -> None:
    """Write one HTML page with dumped rollouts: images, tokens with their roles, matches and losses.

    The page needs no server and loads nothing. With --serve, it and the report are served on 127.0.0.1 instead.
    """
    from coordexp.pages.document import save_page
    from coordexp.pages.rollouts import make_inspector_page
    from coordexp.pages.run_folder import INSPECTOR, REPORT, read_run

    need("PIL", extra="evaluate")
    if serve and target is not None:
        raise UserError("--out and --serve cannot be combined", "leave one of them out")
    if port is not None and not serve:
        raise UserError("--port needs --serve", "add --serve, or leave --port out")
    target = target or run / INSPECTOR
    need_page(target)
    logged = read_run(run)  # so that a wrong folder is reported before a server starts
    if serve:
        _serve(run, samples, PORT if port is None else port)
        return
    report = REPORT if (target.parent / REPORT).is_file() else None
    with progress(f"reading {run}"):
        page = make_inspector_page(logged, samples, report=report)
    save_page(target, page.html)
    if page.remarks:
        err.print(f"{len(page.remarks)} of {page.held} have no image, e.g. {page.remarks[0]}", markup=False)
        err.print("  paths are relative to where the run was started: go there, or put the images back")
    part = f"{page.held:,} of about {page.total:,}" if page.total > page.held else f"all {page.held:,}"
    out.print(f"wrote {target}: {part} dumped examples", markup=False)


def _serve(folder: Path, samples: int, port: int) -> None:
    from coordexp.pages.live import HOST, listen

    with explain(OSError, f"cannot listen on {HOST}:{port}", "give another --port, or 0 for a free one"):
        server = listen(folder, samples, port)
    with server:
        out.print(f"{folder} at http://{HOST}:{server.server_port}/  (Ctrl-C ends it)", markup=False)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            out.print("ended")
