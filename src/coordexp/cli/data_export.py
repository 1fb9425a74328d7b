"""`coordexp data export`: write records for other tools, or with their images into large files."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from coordexp.cli.console import need, need_new_file, out, progress, refuse_without_effect
from coordexp.cli.data_import import print_records
from coordexp.cli.shards import PartOption, run_shards
from coordexp.errors import UserError

# The options of each format, besides --out.
OPTIONS = {
    "coco": {"images"},
    "yolo": {"images", "val"},
    "labelstudio": {"suggestions", "only_suggested", "prefix", "model_version"},
    "webdataset": {"shard", "seed"},
    "parquet": {"shard"},
}
Format = Literal["coco", "yolo", "labelstudio", "webdataset", "parquet"]


def export(
    context: typer.Context,
    form: Annotated[Format, typer.Argument(metavar="FORMAT", show_default=False)],
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="A JSONL file of records.", show_default=False)
    ],
    target: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="A new JSON file; for yolo, webdataset and parquet, a folder.", show_default=False
        ),
    ],
    images: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="coco, yolo: the folder that image names are relative to. Unset: FILE's.",
        ),
    ] = None,
    val: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="yolo: held-out records.")] = None,
    suggestions: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="labelstudio: suggestions.jsonl, to add as predictions."),
    ] = None,
    only_suggested: Annotated[
        bool, typer.Option("--only-suggested", help="labelstudio: only the records that have suggestions.")
    ] = False,
    prefix: Annotated[
        str | None,
        typer.Option(
            help="labelstudio: the address of an image without its path. Unset: Label Studio's local storage."
        ),
    ] = None,
    model_version: Annotated[
        str | None, typer.Option(help="labelstudio: the name of the model in Label Studio. Unset: coordexp.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="webdataset: another seed gives another order.")] = 0,
    shard: PartOption = None,
) -> None:
    """Convert a JSONL file of records to another format.

    coco: instances, in pixels. Ids of images and categories are kept; others are numbered.

    yolo: a folder with data.yaml, labels, and links to the images. YOLO has no ids of images.

    labelstudio: tasks, and beside them the labelling config (.xml).

    webdataset: tars with images and records in random order, and files of records with addresses into them.

    parquet: files with images, as Hugging Face's datasets read them. Both have 10,000 images per file.
    """
    refuse_without_effect(context, form, OPTIONS[form])
    if form in ("webdataset", "parquet"):
        need("PIL", extra="train")
        from coordexp.data import RecordFile
        from coordexp.data.pack import ExportJob

        job = ExportJob(form, RecordFile(file), target, seed)
        print_records(run_shards(job, shard, f"exporting {file}"), target)
        return
    if suggestions is None and (only_suggested or model_version is not None):
        option = "--only-suggested" if only_suggested else "--model-version"
        raise UserError(f"{option} has no effect without suggestions", "add --suggestions suggestions.jsonl")
    for path in {"coco": [target], "yolo": [], "labelstudio": [target, target.with_suffix(".xml")]}[form]:
        need_new_file(path)
    with progress(f"exporting {file}") as show:
        if form == "labelstudio":
            from coordexp.data import RecordFile
            from coordexp.data.importers.labelstudio import write_tasks
            from coordexp.detect.suggestions import join_records, read_suggestions

            given = {"prefix": prefix, "model_version": model_version, "only_suggested": only_suggested}
            options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
            records = RecordFile(file)
            suggested = () if suggestions is None else read_suggestions(suggestions).suggestions
            joined = join_records(map(records.read_with_image_id, range(len(records))), suggested)
            rows = ((record, [(item.id, item.item, item.score) for item in own]) for record, own in joined)
            tasks, classes = write_tasks(target, rows, **options)
            counts = f"{tasks:,} tasks, and {target.with_suffix('.xml')}: {classes:,} classes"
        else:
            from coordexp.data.export import export_coco, export_yolo

            write = export_coco if form == "coco" else partial(export_yolo, val=val)
            report = write(file, target, images or file.parent, show)
            counts = f"{report.images:,} images, {report.objects:,} objects, {report.classes:,} classes"
    out.print(f"wrote {target}: {counts}", markup=False)
