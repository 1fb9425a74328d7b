"""The rollout inspector: the dumped examples of a run, with their images and tokens, as one HTML page.

The body of the page is static, and its scripts write all data as text. Samples are JSON elements that are parsed
only when they are shown, so that a page with hundreds of them opens at once.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from coordexp.data import BINS
from coordexp.data.view import make_thumbnail
from coordexp.document import read_resource, render_document
from coordexp.dumps import FOLDER, NOT_A_DUMP
from coordexp.errors import DataError, explain
from coordexp.inspector.dumps import DumpedExample, choose_examples
from coordexp.inspector.run import RESOLVED, Run
from coordexp.inspector.sample import show_sample, summarise_sample
from coordexp.vocab import VocabularyError, VocabularyTable

SIDE = 640  # pixels of an image on the page, at most
STYLES = ("page.css", "image.css", "strip.css", "panels.css")
SCRIPTS = (
    *("elements.js", "data.js", "distribution.js", "image.js", "strip.js", "chart.js", "detail.js"),
    *("objects.js", "matrix.js", "steps.js", "head.js", "live.js", "page.js"),
)


class InspectorPage(NamedTuple):
    """A page, how many examples it holds, how many there are, and remarks on images that could not be shown."""

    html: str
    held: int
    total: int
    remarks: tuple[str, ...]


def make_inspector_page(
    run: Run, most: int, *, stamp: str | None = None, report: str | None = None
) -> InspectorPage:
    """Return a page with at most `most` examples. A served page has the `stamp` of the dumps it was made from.
    `report` is the address of the run's report, if there is one."""
    dumped, total = choose_examples(run.folder, most)
    objective = _read_objective(run)
    table = _read_table(run.folder / FOLDER)
    entries, samples = _read_samples(dumped, table, objective)
    index = {
        "run": run.name,
        "total": total,
        "stamp": stamp,
        "report": report,
        "target": objective.target,
        "pieces": collect_pieces((_list_ids(sample) for sample in samples), table),
        "coord0": table.first_coord,
        "samples": entries,
    }
    images = _add_images(entries, dumped, run.start_folder)
    remarks = tuple(entry["remark"] for entry in entries if entry["remark"])
    html = render_inspector(index, samples, images, live=stamp is not None)
    return InspectorPage(html, len(entries), total, remarks)


def render_inspector(
    index: dict[str, Any], samples: Iterable[dict[str, Any]], images: Mapping[str, str], *, live: bool = False
) -> str:
    """`samples` are in the order of the index. `images` are data URLs by the ids that the index uses."""
    data: dict[str, Any] = {"index": {**index, "live": live}}
    data.update((f"sample-{k}", sample) for k, sample in enumerate(samples))
    data.update(images)
    return render_document(
        f"Rollouts of {index['run']}",
        read_resource(__package__, "page/page.html"),
        styles=[read_resource(__package__, f"page/{name}") for name in STYLES],
        scripts=[read_resource(__package__, f"page/{name}") for name in SCRIPTS],
        data=data,
        live=live,
    )


@dataclass(frozen=True)
class InspectedObjective:
    """The parts of a run's settings that the page needs: the soft target over bins, if the loss has one; whether
    class names are left out of the loss; the folder of the images."""

    target: dict[str, Any] | None
    desc_is_masked: bool
    image_folder: Path


def _read_objective(run: Run) -> InspectedObjective:
    objective = run.latest_start.objective
    masked = "B" in (objective.masked_desc or ()) if objective else False
    problem = f"{run.folder / RESOLVED} does not have the form that a run writes"
    fix = "it was edited, or another program wrote it; give another run"
    with explain((KeyError, TypeError, AttributeError), problem, fix):  # settings are a tree of any shape
        pipeline = (run.settings.get("rollout_matching") or {}).get("pipeline") or {}
        data = Path(run.custom.get("train_jsonl") or "")
        return InspectedObjective(find_soft_target(pipeline.get("objective") or ()), masked, data.parent)


def find_soft_target(objective: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the target over bins that the loss on rollouts uses; None without one."""
    for module in objective:
        config = module["config"]
        if module["name"] == "coord_reg" and module["enabled"] and module["weight"] and "B" in module["channels"]:
            if not config["soft_ce_weight"] and not config["w1_weight"]:
                continue
            names = {"sigma": "target_sigma", "truncate": "target_truncate", "temperature": "temperature"}
            return {name: config[key] for name, key in names.items()}
    return None


def _list_ids(sample: dict[str, Any]) -> list[int]:
    """Return the ids that the page shows: those of the strip, and tokens that should be unlikely."""
    return [*sample["tokens"]["ids"], *sample["unlikely"].values()]


def collect_pieces(sequences: Iterable[Sequence[int]], table: VocabularyTable) -> dict[str, str]:
    """Return the visible text of every token that is not a coordinate, by its id."""
    first = table.first_coord
    ids = {id for sequence in sequences for id in sequence if not first <= id < first + BINS}
    known = len(table.pieces)
    return {str(id): make_visible(table.pieces[id]) if id < known else f"<id {id}>" for id in sorted(ids)}


def make_visible(piece: bytes) -> str:
    """Return the text of a token, with escapes for characters that cannot be seen."""
    try:
        text = piece.decode()
    except UnicodeDecodeError:  # a part of a character
        return "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in piece)
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _read_table(folder: Path) -> VocabularyTable:
    file = folder / "tokenizer.json"
    try:
        return _read_cached_table(folder, file.stat().st_mtime_ns if file.is_file() else 0)
    except VocabularyError as error:  # its fix is meant for training
        raise DataError(error.problem, "copy the tokenizer.json of the run's model there") from error


@functools.lru_cache(maxsize=1)  # a served page is made again and again
def _read_cached_table(folder: Path, modified: int) -> VocabularyTable:
    return VocabularyTable.from_folder(folder)


def _read_samples(
    dumped: Sequence[DumpedExample], table: VocabularyTable, objective: InspectedObjective
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the entries of the index, and the full samples."""
    seen = Counter[str]()
    entries, samples = [], []
    for example in dumped:
        content, trained = example.content, example.trained
        with explain(NOT_A_DUMP, f"{example.where}: not a dumped example"):
            place, path = content["place"], content["picture"]["path"]
            id = f"{place['step'] + 1}.{place['micro']}.{place['record']}"
            seen[id] += 1  # a record can occur twice in one step, when a new epoch begins
            name = {"id": id if seen[id] == 1 else f"{id}.{seen[id]}"}
            origin = {"image": _shorten_path(path, objective.image_folder), "followed": example.followed}
            entries.append({**name, **origin, **summarise_sample(content, trained)})
            samples.append(
                {**name, **show_sample(content, trained, table, desc_is_masked=objective.desc_is_masked)}
            )
    return entries, samples


def _add_images(
    entries: Sequence[dict[str, Any]], dumped: Sequence[DumpedExample], root: Path | None
) -> dict[str, str]:
    """Return the images by id, one per file. Add to each entry the id of its image, or a remark why it has
    none."""
    images: dict[str, str] = {}
    known: dict[str, dict[str, Any]] = {}
    for entry, example in zip(entries, dumped, strict=True):
        path = example.content["picture"]["path"]
        if path not in known:
            url, remark = _load_image(path, root)
            id = f"picture-{len(known)}" if url else None
            known[path] = {"picture": id, "remark": remark}
            images |= {id: url} if id and url else {}
        entry |= known[path]
    return images


def _load_image(path: str, root: Path | None) -> tuple[str | None, str | None]:
    """Return a data URL, or a remark why there is none. Relative paths are tried from here and from where the run
    was started."""
    try:
        file = Path(path)
        file = root / file if root is not None and not file.is_file() else file
        return _load_thumbnail(str(file), file.stat().st_mtime_ns), None
    except (OSError, ValueError) as error:  # ValueError: a text that cannot be a path
        return None, f"image not shown: {getattr(error, 'strerror', None) or error}; {path}"


@functools.lru_cache(maxsize=512)
def _load_thumbnail(path: str, modified: int) -> str:
    return make_thumbnail(Path(path), SIDE)


def _shorten_path(path: str, root: Path) -> str:
    return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else path
