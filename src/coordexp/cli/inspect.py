"""`coordexp inspect`: look at single rollouts of a run, and at why each token was trained as it was."""

from pathlib import Path
from typing import Annotated

import typer

from coordexp.cli.console import err, need, need_page, out, progress
from coordexp.errors import UserError, explain

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
        typer.Option(
            min=1,
            help="Most dumped examples on the page: the first step, the last, recurring images, then evenly.",
        ),
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
    need("PIL", extra="evaluate")
    if serve:
        if target is not None:
            raise UserError("--out and --serve cannot be combined", "leave one of them out")
        _serve(run, samples, PORT if port is None else port)
        return
    if port is not None:
        raise UserError("--port needs --serve", "add --serve, or leave --port out")
    _write(run, target, samples)


def _write(folder: Path, target: Path | None, samples: int) -> None:
    from coordexp.pages.document import save_page
    from coordexp.pages.rollouts import make_inspector_page
    from coordexp.pages.run_folder import INSPECTOR, REPORT, read_run

    target = target or folder / INSPECTOR
    need_page(target)
    run = read_run(folder)
    report = REPORT if (target.parent / REPORT).is_file() else None
    with progress(f"reading {folder}"):
        page = make_inspector_page(run, samples, report=report)
    save_page(target, page.html)
    if page.remarks:
        err.print(f"{len(page.remarks)} of {page.held} have no image, e.g. {page.remarks[0]}", markup=False)
        err.print("  paths are relative to where the run was started: go there, or put the images back")
    part = f"{page.held:,} of about {page.total:,}" if page.total > page.held else f"all {page.held:,}"
    out.print(f"wrote {target}: {part} dumped examples", markup=False)


def _serve(folder: Path, samples: int, port: int) -> None:
    from coordexp.pages.live import HOST, listen, make_live_pages
    from coordexp.pages.run_folder import read_run

    read_run(folder)  # so that a wrong folder is reported before the server starts
    with explain(OSError, f"cannot listen on {HOST}:{port}", "give another --port, or 0 for a free one"):
        server = listen(make_live_pages(folder, samples), port)
    with server:
        out.print(f"{folder} at http://{HOST}:{server.server_port}/  (Ctrl-C ends it)", markup=False)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            out.print("ended")
