"""`coordexp data import`: COCO, LVIS, YOLO or labelme to a JSONL file, and an account of what was left out."""

from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from coordexp.cli.console import need, out, printable, stop, telling

if TYPE_CHECKING:
    from coordexp.data.importers import Rules, SourceImage, Tally

    Reader = Callable[[Rules, Tally], Iterator[SourceImage]]

app = typer.Typer(help="Other formats to a JSONL file of records, in pixels.", no_args_is_help=True)


class Shapes(StrEnum):
    auto = "auto"
    poly = "poly"
    box = "box"


class Multipart(StrEnum):
    largest = "largest"
    box = "box"
    each = "split"
    drop = "drop"


class Crowd(StrEnum):
    drop = "drop"
    keep = "keep"


class Empty(StrEnum):
    keep = "keep"
    drop = "drop"


class Missing(StrEnum):
    refuse = "refuse"
    keep = "keep"
    drop = "drop"


class Outside(StrEnum):
    clip = "clip"
    drop = "drop"
    refuse = "refuse"


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
    Shapes,
    typer.Option(
        "--geometry",
        help="auto: the polygon where there is a segmentation, else the box. poly or box: only these.",
    ),
]
MultipartOption = Annotated[
    Multipart,
    typer.Option(help="An object of several polygons: its largest, its box, one object each, or nothing."),
]
CrowdOption = Annotated[Crowd, typer.Option(help="Annotations of a crowd.")]
EmptyOption = Annotated[Empty, typer.Option(help="Images without objects.")]
MissingOption = Annotated[
    Missing,
    typer.Option(
        help="Image files that are not there. refuse: stop if they are more than half. keep: write their records "
        "all the same. drop: leave their records out, and stop if they are more than half."
    ),
]
OutsideOption = Annotated[Outside, typer.Option(help="Objects that leave their image.")]
ToleranceOption = Annotated[
    float,
    typer.Option(
        min=0.0, help="Pixels by which a polygon may move to save vertices; outlines of masks have many."
    ),
]


def _instances(name: str, about: str) -> None:
    """A command for each of the two formats that are COCO's instances, with the same options."""

    @app.command(name, help=about)
    def command(
        annotations: AnnotationsArgument,
        images: ImagesOption,
        target: OutOption,
        geometry: ShapesOption = Shapes.auto,
        multipart: MultipartOption = Multipart.largest,
        crowd: CrowdOption = Crowd.drop,
        empty: EmptyOption = Empty.keep,
        outside: OutsideOption = Outside.clip,
        tolerance: ToleranceOption = 0.0,
        missing: MissingOption = Missing.refuse,
    ) -> None:
        from coordexp.data.importers import Rules, read_coco, read_lvis

        read = {"coco": read_coco, "lvis": read_lvis}[name]
        rules = Rules(
            geometry.value,
            multipart.value,
            crowd.value,
            empty.value,
            missing.value,
            outside.value,
            tolerance,
        )
        _import(lambda rules, tally: read(annotations, images, rules, tally, _size), target, rules)


_instances("coco", "COCO instances: boxes, polygons, masks.")
_instances("lvis", "LVIS instances. --images is the folder that holds train2017 and val2017.")


@app.command("yolo")
def yolo(
    labels: LabelsArgument,
    images: ImagesOption,
    target: OutOption,
    names: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="data.yaml or classes.txt. Without it, the one in the folder of labels or up to two above.",
        ),
    ] = None,
    geometry: ShapesOption = Shapes.auto,
    empty: EmptyOption = Empty.keep,
    outside: OutsideOption = Outside.clip,
    tolerance: ToleranceOption = 0.0,
) -> None:
    """YOLO text files: boxes or polygons in units of the image."""
    need("PIL", extra="train")
    from coordexp.data.importers import Rules, read_yolo

    rules = Rules(geometry=geometry.value, empty=empty.value, outside=outside.value, tolerance=tolerance)
    _import(lambda rules, tally: read_yolo(labels, images, names, tally, _size), target, rules)


@app.command("labelme")
def labelme(
    labels: LabelsArgument,
    target: OutOption,
    images: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="The folder of images, if not where the labels say."),
    ] = None,
    geometry: ShapesOption = Shapes.auto,
    multipart: MultipartOption = Multipart.largest,
    empty: EmptyOption = Empty.keep,
    outside: OutsideOption = Outside.clip,
    tolerance: ToleranceOption = 0.0,
    missing: MissingOption = Missing.refuse,
) -> None:
    """labelme JSON files: rectangles, polygons and circles (as polygons)."""
    from coordexp.data.importers import Rules, read_labelme

    rules = Rules(
        geometry.value,
        multipart.value,
        empty=empty.value,
        missing=missing.value,
        outside=outside.value,
        tolerance=tolerance,
    )
    _import(lambda rules, tally: read_labelme(labels, images, tally, _size), target, rules)


def _size(path: Path) -> tuple[int, int]:
    need("PIL", extra="train")
    from coordexp.data.images import image_size

    return image_size(path)


def _import(reader: "Reader", target: Path, rules: "Rules") -> None:
    from coordexp.data.importers import SourceError, Tally, write_records

    if target.exists():
        stop(f"{target} exists\n  give another file, or remove it")
    tally = Tally()
    with telling("importing") as tell:
        try:
            write_records(reader(rules, tally), target, rules, tally, lambda done: tell(f"{done:,} images"))
        except (SourceError, OSError) as error:
            stop(f"{error}\nnothing was written")
    _print_tally(tally)
    out.print(f"wrote {target}: {tally.images:,} images, {tally.objects:,} objects", markup=False)


def _print_tally(tally: "Tally") -> None:
    """A table of lines that no pipe folds."""
    if not tally.entries:
        out.print("nothing was dropped or changed")
        return
    styles = {"dropped": "red", "changed": "yellow", "noted": "dim"}
    wide = max(len(entry.reason) for entry in tally.entries)
    out.print(Text(f"{'':<8} {'count':>9}  {'what':<{wide}}  first", style="bold"))
    for entry in tally.entries:
        line = Text(f"{entry.effect:<8}", style=styles[entry.effect])
        line.append(f" {entry.count:>9,}  {entry.reason:<{wide}}  ", style="default")
        out.print(line.append(printable(entry.first), style="dim"))
