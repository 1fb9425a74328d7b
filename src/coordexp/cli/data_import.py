"""`coordexp data import`: convert COCO, LVIS, YOLO, labelme or Label Studio to a JSONL file, and list
what was left out."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from coordexp.cli.console import need, need_new_file, out, progress, sanitize, shorten
from coordexp.errors import UserError
from coordexp.extensions import find_extensions, load_extension

if TYPE_CHECKING:
    from coordexp.data.importers import ImportCounts, Rules, SourceImage

app = typer.Typer(help="Convert other formats to a JSONL file of records, in pixels.", no_args_is_help=True)


AnnotationsArgument = Annotated[
    Path, typer.Argument(exists=True, dir_okay=False, help="The JSON file of annotations.", show_default=False)
]
LabelsArgument = Annotated[
    Path, typer.Argument(exists=True, file_okay=False, help="The folder of labels.", show_default=False)
]
ImagesOption = Annotated[
    Path, typer.Option("--images", exists=True, file_okay=False, help="The folder of images.", show_default=False)
]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="A new JSONL file.", show_default=False)]
ShapesOption = Annotated[
    Literal["auto", "poly", "box"],
    typer.Option(
        "--geometry", help="auto: the polygon if there is a segmentation, else the box. poly or box: only these."
    ),
]
MultipartOption = Annotated[
    Literal["largest", "box", "split", "drop"],
    typer.Option(help="For an object of several polygons: the largest, their box, one object each, or nothing."),
]
CrowdOption = Annotated[Literal["drop", "keep"], typer.Option(help="Annotations of a crowd.")]
EmptyOption = Annotated[Literal["keep", "drop"], typer.Option(help="Images without objects.")]
MissingOption = Annotated[
    Literal["refuse", "keep", "drop"],
    typer.Option(
        help="Image files that do not exist. refuse: stop if they are more than half. keep: write their records "
        "anyway. drop: leave their records out, and stop if they are more than half."
    ),
]
OutsideOption = Annotated[
    Literal["clip", "drop", "refuse"], typer.Option(help="Objects that extend beyond their image.")
]
AskOption = Annotated[
    Literal["all", "classes"],
    typer.Option(help="What a record asks for: all objects, or a list of the classes that it has."),
]
ToleranceOption = Annotated[
    float,
    typer.Option(
        min=0.0, help="Pixels by which a polygon may move to save vertices; outlines of masks have many."
    ),
]


def _add_instances_command(name: str, summary: str) -> None:
    """Add a command for COCO or LVIS, which share one format and the same options."""

    @app.command(name, help=summary)
    def command(
        annotations: AnnotationsArgument,
        images: ImagesOption,
        target: OutOption,
        geometry: ShapesOption = "auto",
        multipart: MultipartOption = "largest",
        crowd: CrowdOption = "drop",
        empty: EmptyOption = "keep",
        outside: OutsideOption = "clip",
        tolerance: ToleranceOption = 0.0,
        missing: MissingOption = "refuse",
        ask: AskOption = "all",
    ) -> None:
        from coordexp.data.importers import ImportCounts, Rules, read_coco, read_lvis

        read = {"coco": read_coco, "lvis": read_lvis}[name]
        rules = Rules(geometry, multipart, crowd, empty, missing, outside, tolerance, ask)
        tally = ImportCounts()
        _import(annotations, read(annotations, images, rules, tally, _size), target, rules, tally)


_add_instances_command("coco", "Import COCO instances: boxes, polygons, masks.")
_add_instances_command("lvis", "Import LVIS instances. --images is the folder with train2017 and val2017.")


@app.command("yolo")
def yolo(
    labels: Annotated[
        Path, typer.Argument(exists=True, help="The folder of labels, or data.yaml.", show_default=False)
    ],
    target: OutOption,
    images: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="The folder of images, for a folder of labels."),
    ] = None,
    split: Annotated[
        Literal["train", "val", "test"] | None, typer.Option(help="The split of data.yaml. Unset: train.")
    ] = None,
    names: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="data.yaml or classes.txt. Unset: the one in the folder of labels, or up to two folders above.",
        ),
    ] = None,
    geometry: ShapesOption = "auto",
    empty: EmptyOption = "keep",
    outside: OutsideOption = "clip",
    tolerance: ToleranceOption = 0.0,
) -> None:
    """Import YOLO text files: boxes or polygons in units of the image."""
    need("PIL", extra="train")
    from coordexp.data.importers import ImportCounts, Rules, find_split, read_yolo

    if labels.is_dir() == (images is None) or (images and split):
        problem = "--images belongs to a folder of labels, and --split to data.yaml"
        raise UserError(problem, "give LABELS --images FOLDER, or data.yaml --split val")
    if images is None:
        names = names or labels
        labels, images = find_split(labels, split or "train")
    rules = Rules(geometry=geometry, empty=empty, outside=outside, tolerance=tolerance)
    tally = ImportCounts()
    _import(labels, read_yolo(labels, images, names, tally, _size), target, rules, tally)


@app.command("labelme")
def labelme(
    labels: LabelsArgument,
    target: OutOption,
    images: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="The folder of images. Unset: as the labels say."),
    ] = None,
    geometry: ShapesOption = "auto",
    multipart: MultipartOption = "largest",
    empty: EmptyOption = "keep",
    outside: OutsideOption = "clip",
    tolerance: ToleranceOption = 0.0,
    missing: MissingOption = "refuse",
) -> None:
    """Import labelme JSON files: rectangles, polygons and circles (as polygons)."""
    from coordexp.data.importers import ImportCounts, Rules, read_labelme

    rules = Rules(geometry, multipart, "drop", empty, missing, outside, tolerance)
    tally = ImportCounts()
    _import(labels, read_labelme(labels, images, tally, _size), target, rules, tally)


@app.command("labelstudio")
def labelstudio(
    annotations: AnnotationsArgument,
    images: ImagesOption,
    target: OutOption,
    key: Annotated[str, typer.Option(help="The key of the image in the data of a task.")] = "image",
    geometry: ShapesOption = "auto",
    empty: EmptyOption = "keep",
    outside: OutsideOption = "clip",
    tolerance: ToleranceOption = 0.0,
    missing: MissingOption = "refuse",
) -> None:
    """Import Label Studio's JSON export: rectangles and polygons of the latest annotation of each task."""
    from coordexp.data.importers import ImportCounts, Rules, read_labelstudio

    rules = Rules(geometry, empty=empty, missing=missing, outside=outside, tolerance=tolerance)
    tally = ImportCounts()
    _import(annotations, read_labelstudio(annotations, images, key, tally, _size), target, rules, tally)


def _add_extension_command(entry: EntryPoint) -> None:
    """Add a command for a format that another package reads."""

    @app.command(entry.name, help=f"Import with {entry.value}.")
    def command(
        source: Annotated[Path, typer.Argument(exists=True, help="What to import.", show_default=False)],
        target: OutOption,
        geometry: ShapesOption = "auto",
        multipart: MultipartOption = "largest",
        crowd: CrowdOption = "drop",
        empty: EmptyOption = "keep",
        outside: OutsideOption = "clip",
        tolerance: ToleranceOption = 0.0,
        missing: MissingOption = "refuse",
    ) -> None:
        from coordexp.data.importers import ImportCounts, Rules

        rules = Rules(geometry, multipart, crowd, empty, missing, outside, tolerance)
        tally = ImportCounts()
        _import(source, load_extension(entry)(source, tally), target, rules, tally)


_OWN = frozenset({"coco", "lvis", "yolo", "labelme", "labelstudio"})
for _entry in find_extensions("importers", taken=_OWN).values():
    _add_extension_command(_entry)


def _size(path: Path) -> tuple[int, int]:
    """Return the width and height of an image file."""
    need("PIL", extra="train")
    from coordexp.data.images import read_image_size

    return read_image_size(path)


def _import(
    source: Path, images: "Iterator[SourceImage]", target: Path, rules: "Rules", tally: "ImportCounts"
) -> None:
    """Write the images of a source to a new file, and print what was dropped or changed. `tally` is filled by
    reading them."""
    from coordexp.data.importers import write_records

    need_new_file(target)
    with progress("importing") as show:

        def show_count(done: int) -> None:
            show(f"{done:,} images")

        try:
            write_records(images, target, rules, tally, show_count)
        except (UserError, OSError) as error:  # the user may wonder how much of the file is there
            is_about_source = isinstance(error, UserError) and not str(error).startswith(str(source))
            where = f"{source}: " if is_about_source else ""
            raise UserError(f"nothing was written: {where}{shorten(str(error))}") from error
    _print_tally(tally)
    out.print(f"wrote {target}: {tally.images:,} images, {tally.objects:,} objects", markup=False)


def _print_tally(tally: "ImportCounts") -> None:
    """Print one line per reason for which something was dropped, changed or noted."""
    if not tally.entries:
        out.print("nothing was dropped or changed")
        return
    styles = {"dropped": "red", "changed": "yellow", "noted": "dim"}
    width = max(len(entry.reason) for entry in tally.entries)
    out.print(Text(f"{'':<8} {'count':>9}  {'what':<{width}}  first", style="bold"))
    for entry in tally.entries:
        line = Text(f"{entry.effect:<8}", style=styles[entry.effect])
        line.append(f" {entry.count:>9,}  {entry.reason:<{width}}  ", style="default")
        out.print(line.append(sanitize(entry.first), style="dim"))
