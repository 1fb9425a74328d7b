"""`coordexp data import`: convert other formats to a JSONL file, and list what was left out."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from coordexp.cli.console import need, need_new_file, out, progress, refuse_without_effect, sanitize, shorten
from coordexp.cli.shards import PartOption, run_shards
from coordexp.errors import UserError
from coordexp.extensions import find_extensions, load_extension
from coordexp.files import RELATIVE_PATHS, describe_missing

if TYPE_CHECKING:
    from coordexp.data.importers import ImportCounts, Rules, SourceImage
    from coordexp.data.shards import Manifest

# The options of each format, besides those that all of them have.
OPTIONS = {
    "coco": {"images", "multipart", "crowd", "missing", "ask"},
    "lvis": {"images", "multipart", "crowd", "missing", "ask"},
    "yolo": {"images", "split", "names"},
    "labelme": {"images", "multipart", "missing"},
    "labelstudio": {"images", "key", "missing"},
    "webdataset": {"shard", "names", "boxes", "multipart", "crowd"},
    "parquet": {"shard", "names", "boxes", "multipart", "crowd", "key"},
    "tsv": {"shard", "names", "boxes", "multipart", "crowd"},
}
PACKED = ("webdataset", "parquet", "tsv")
OF_EXTENSIONS = {"multipart", "crowd", "missing"}
OF_ALL = {"geometry", "empty", "outside", "tolerance"}


def import_(
    context: typer.Context,
    form: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT",
            help=f"{', '.join(OPTIONS)}, or the format of an installed package.",
            show_default=False,
        ),
    ],
    source: Annotated[
        str,
        typer.Argument(
            help="coco, lvis, labelstudio: the JSON file. labelme, yolo: the folder of labels; yolo also "
            "data.yaml. webdataset, parquet, tsv: a file, a folder, or a quoted pattern, also below s3://.",
            show_default=False,
        ),
    ],
    target: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="A new JSONL file; for webdataset, parquet and tsv, a folder.", show_default=False
        ),
    ],
    images: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="The folder of images; lvis: that with train2017 and val2017. yolo: not for data.yaml. labelme: "
            "unset, as the labels say.",
        ),
    ] = None,
    geometry: Annotated[
        Literal["auto", "poly", "box"],
        typer.Option(help="auto: the polygon if there is a segmentation, else the box. poly or box: only these."),
    ] = "auto",
    multipart: Annotated[
        Literal["largest", "box", "split", "drop"],
        typer.Option(
            help="For an object of several polygons: the largest, their box, one object each, or nothing."
        ),
    ] = "largest",
    crowd: Annotated[Literal["drop", "keep"], typer.Option(help="Annotations of a crowd.")] = "drop",
    empty: Annotated[Literal["keep", "drop"], typer.Option(help="Images without objects.")] = "keep",
    outside: Annotated[
        Literal["clip", "drop", "refuse"], typer.Option(help="Objects that extend beyond their image.")
    ] = "clip",
    tolerance: Annotated[
        float,
        typer.Option(
            min=0.0, help="Pixels by which a polygon may move to save vertices; outlines of masks have many."
        ),
    ] = 0.0,
    missing: Annotated[
        Literal["refuse", "keep", "drop"],
        typer.Option(
            help="Image files that do not exist: write their records (refuse, keep) or not (drop). All but keep "
            "stop if they are more than half."
        ),
    ] = "refuse",
    ask: Annotated[
        Literal["all", "classes"],
        typer.Option(
            help="coco, lvis: what a record asks for: all objects, or a list of the classes that it has."
        ),
    ] = "all",
    split: Annotated[
        Literal["train", "val", "test"] | None, typer.Option(help="yolo: the split of data.yaml. Unset: train.")
    ] = None,
    names: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="yolo: data.yaml or classes.txt. Unset: the one in the folder of labels, or up to two above. "
            "webdataset, parquet, tsv: the same, for classes that are numbers.",
        ),
    ] = None,
    key: Annotated[
        str,
        typer.Option(
            help="labelstudio: the key of the image in the data of a task. parquet: the column of images."
        ),
    ] = "image",
    boxes: Annotated[
        Literal["xywh", "xyxy"] | None,
        typer.Option(help="webdataset, parquet: what the numbers of a bbox are. COCO has xywh. tsv: unset, xyxy."),
    ] = None,
    shard: PartOption = None,
) -> None:
    """Convert another format to a JSONL file of records, in pixels.

    coco, lvis: instances: boxes, polygons, masks.

    yolo: text files: boxes or polygons in units of the image.

    labelme: JSON files: rectangles, polygons and circles (as polygons).

    labelstudio: the JSON export: rectangles and polygons of the latest annotation of each task.

    webdataset, tsv: tars, or the TSV of Rex-Omni; images stay in them. parquet: as of Hugging Face's datasets;
    images are copied to tars.
    """
    added = find_extensions("importers", taken=frozenset(OPTIONS))
    if form not in OPTIONS and form not in added:
        known = ", ".join([*OPTIONS, *added])
        raise UserError(f"{form} is not a format that can be imported", f"use one of these: {known}")
    refuse_without_effect(context, form, OF_ALL | OPTIONS.get(form, OF_EXTENSIONS))
    from coordexp.data import importers

    boxes = "xyxy" if form == "tsv" and boxes is None else boxes
    rules = importers.Rules(geometry, multipart, crowd, empty, missing, outside, tolerance, ask, boxes)
    if form in PACKED:
        need("PIL", extra="train")
        classes = None if names is None else importers.read_classes(names)
        sources = importers.find_sources(source, form)
        job = importers.ImportJob(form, sources, target, rules, classes, key)
        print_records(run_shards(job, shard, "importing"), target)
        return
    tally, path = importers.ImportCounts(), Path(source)
    if not path.exists():
        raise UserError(describe_missing(source), RELATIVE_PATHS)
    match form:
        case "coco" | "lvis":
            read = importers.read_coco if form == "coco" else importers.read_lvis
            found = read(path, _need_images(images), rules, tally)
        case "yolo":
            need("PIL", extra="train")
            path, folder, names = _find_yolo(path, images, names, split)
            found = importers.read_yolo(path, folder, names, tally)
        case "labelme":
            found = importers.read_labelme(path, images, tally)
        case "labelstudio":
            found = importers.read_labelstudio(path, _need_images(images), key, tally)
        case _:
            found = load_extension(added[form])(path, tally)
    _import(path, found, target, rules, tally)


def _need_images(folder: Path | None) -> Path:
    if folder is None:
        raise UserError("the folder of images is missing", "add --images FOLDER")
    return folder


def _find_yolo(
    labels: Path, images: Path | None, names: Path | None, split: str | None
) -> tuple[Path, Path, Path | None]:
    """Return the folders of labels and images, and the file with the names of the classes."""
    from coordexp.data.importers import find_split

    if labels.is_dir() == (images is None) or (images and split):
        problem = "--images belongs to a folder of labels, and --split to data.yaml"
        raise UserError(problem, "give LABELS --images FOLDER, or data.yaml --split val")
    if images is not None:
        return labels, images, names
    return *find_split(labels, split or "train"), names or labels


def _import(
    source: Path, images: "Iterator[SourceImage]", target: Path, rules: "Rules", tally: "ImportCounts"
) -> None:
    """Write the images of a source to a new file, and print what was dropped or changed. `tally` is filled by
    reading them."""
    from coordexp.data.importers import write_records

    need_new_file(target)
    with progress("importing") as show:
        try:
            write_records(images, target, rules, tally, show)
        except (UserError, OSError) as error:  # the user may wonder how much of the file is there
            is_about_source = isinstance(error, UserError) and not str(error).startswith(str(source))
            where = f"{source}: " if is_about_source else ""
            raise UserError(f"nothing was written: {where}{shorten(str(error))}") from error
    _print_tally(tally, target)


def print_records(manifests: "Sequence[Manifest]", target: Path) -> None:
    """Print how many records an import or export has written to a folder or a file, and what it left out."""
    from coordexp.data.importers import ImportCounts

    tally = ImportCounts()
    for manifest in manifests:
        tally.add_dict(manifest.counts, manifest.data)
    _print_tally(tally, target)


def _print_tally(tally: "ImportCounts", target: Path) -> None:
    """Print one line per reason for which something was dropped, changed or noted, and what was written."""
    styles = {"dropped": "red", "changed": "yellow", "noted": "dim"}
    width = max((len(entry.reason) for entry in tally.entries), default=0)
    head = f"{'':<8} {'count':>9}  {'what':<{width}}  first" if width else "nothing was dropped or changed"
    out.print(Text(head, style="bold" if width else ""))
    for entry in tally.entries:
        line = Text(f"{entry.effect:<8}", style=styles[entry.effect])
        line.append(f" {entry.count:>9,}  {entry.reason:<{width}}  ", style="default")
        out.print(line.append(sanitize(entry.first), style="dim"))
    out.print(f"wrote {target}: {tally.images:,} images, {tally.objects:,} objects", markup=False)
