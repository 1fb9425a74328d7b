"""`coordexp data export`: write records as COCO, YOLO or tasks of Label Studio, for other tools."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordexp.cli.console import need_new_file, out, progress
from coordexp.errors import UserError

if TYPE_CHECKING:
    from coordexp.data.export import ExportReport

app = typer.Typer(help="Convert a JSONL file of records to other formats.", no_args_is_help=True)

RecordsArgument = Annotated[
    Path, typer.Argument(exists=True, dir_okay=False, help="A JSONL file of records.", show_default=False)
]
ImagesOption = Annotated[
    Path | None,
    typer.Option(exists=True, file_okay=False, help="The folder that image names are relative to. Unset: FILE's."),
]


@app.command("coco")
def coco(
    file: RecordsArgument,
    target: Annotated[Path, typer.Option("--out", "-o", help="A new JSON file.", show_default=False)],
    images: ImagesOption = None,
) -> None:
    """Write COCO instances, in pixels. Ids of images and categories are kept; others are numbered."""
    from coordexp.data.export import export_coco

    need_new_file(target)
    _export(export_coco, file, target, images)


@app.command("yolo")
def yolo(
    file: RecordsArgument,
    target: Annotated[Path, typer.Option("--out", "-o", help="A new folder.", show_default=False)],
    images: ImagesOption = None,
    val: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Held-out records.")] = None,
) -> None:
    """Write a folder with data.yaml, labels, and links to the images. YOLO has no ids of images."""
    from coordexp.data.export import export_yolo

    _export(partial(export_yolo, val=val), file, target, images)


def _export(write: "Callable[..., ExportReport]", file: Path, target: Path, images: Path | None) -> None:
    with progress(f"exporting {file}") as show:
        report = write(file, target, images or file.parent, show)
    counts = f"{report.images:,} images, {report.objects:,} objects, {report.classes:,} classes"
    out.print(f"wrote {target}: {counts}", markup=False)


@app.command("labelstudio")
def labelstudio(
    file: RecordsArgument,
    target: Annotated[Path, typer.Option("--out", "-o", help="A new JSON file of tasks.", show_default=False)],
    suggestions: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="suggestions.jsonl, to add as predictions."),
    ] = None,
    only_suggested: Annotated[
        bool, typer.Option("--only-suggested", help="Only the records that have suggestions.")
    ] = False,
    prefix: Annotated[
        str | None,
        typer.Option(help="The address of an image without its path. Unset: Label Studio's local storage."),
    ] = None,
    model_version: Annotated[
        str | None, typer.Option(help="The name of the model in Label Studio. Unset: coordexp.")
    ] = None,
) -> None:
    """Write tasks for Label Studio, and beside them its labelling config (.xml)."""
    from coordexp.data import RecordFile
    from coordexp.data.labelstudio import TaskSettings, write_tasks
    from coordexp.data.suggestions import read_suggestions

    if suggestions is None and (only_suggested or model_version is not None):
        option = "--only-suggested" if only_suggested else "--model-version"
        raise UserError(f"{option} has no effect without suggestions", "add --suggestions suggestions.jsonl")
    for path in (target, target.with_suffix(".xml")):
        need_new_file(path)
    default = TaskSettings()
    settings = TaskSettings(
        default.prefix if prefix is None else prefix, model_version or default.model_version, only_suggested
    )
    with progress(f"writing {target}"):
        suggested = () if suggestions is None else read_suggestions(suggestions).suggestions
        target.parent.mkdir(parents=True, exist_ok=True)
        counts = write_tasks(target, RecordFile(file), suggested, settings)
    out.print(
        f"wrote {target}: {counts.tasks:,} tasks, and {target.with_suffix('.xml')}: {len(counts.classes):,} "
        "classes",
        markup=False,
    )
