"""The rollout inspector: the dumped examples of a run, with their images and tokens, as one HTML page.

A long run dumps more than a page can hold. Steps are chosen evenly and include the first and the last.

The body of the page is static, and its scripts write all data as text. Samples are JSON elements that are parsed
only when they are shown, so that a page with hundreds of them opens at once.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from coordexp.answers.table import VocabularyTable
from coordexp.data import BINS
from coordexp.data.addresses import is_url, join_address, parse_address
from coordexp.dumps import FOLDER, FORMAT, NOT_A_DUMP, TRACE_FORMAT, read_table, step_files, trace_file
from coordexp.errors import DataError, explain
from coordexp.files import read_json_lines
from coordexp.pages.cards import explain_missing_image, make_thumbnail
from coordexp.pages.curves import NOT_WRITTEN_BY_A_RUN
from coordexp.pages.document import render_page
from coordexp.pages.rollout_sample import show_sample, summarise_sample
from coordexp.pages.run_folder import RESOLVED, Run

KINDS = {
    "true": "true shape of a match",
    "matched": "matched",
    "missed": "missed",
    "extra": "extra",
    "duplicate": "duplicate, removed",
    "removed": "extra, removed",
    "agreed": "agreed, added",
}
FILTERS = {"missed": "with misses", "extra": "with extra", "invalid": "with invalid", "truncated": "truncated"}
SIDE = 640  # pixels of an image on the page, at most
PLACE = ("step", "micro", "record")
_read_table = functools.lru_cache(maxsize=1)(read_table)  # a served page is made again and again
SCRIPTS = (
    "common.js",
    "rollouts_data.js",
    "rollouts_image.js",
    "rollouts_tokens.js",
    "rollouts_objects.js",
    "rollouts.js",
)
T = TypeVar("T")


@dataclass(frozen=True)
class DumpedExample:
    """One line of a dump file. `trained` is the trace of its training, None if it was not trained yet."""

    where: str  # file and line
    content: dict[str, Any]
    trained: dict[str, Any] | None

    @property
    def time(self) -> tuple[int, int]:
        """Step and micro-step."""
        return int(self.content["place"]["step"]), int(self.content["place"]["micro"])


def choose_examples(run: Path, most: int) -> tuple[list[DumpedExample], int]:
    """Return at most `most` examples in the order of steps, and approximately how many there are."""
    files = list(step_files(run / FOLDER).values())
    if not files:
        raise DataError(
            f"{run} has no dumped examples",
            "a run with rollouts writes them to RUN/dumps (stage2.dump_every); one on the ground truth has none",
        )
    of_first = len(list(_read_examples(files[0])))
    read_files = _spread(files, max(1, most // max(1, of_first)))
    read = [example for file in read_files for example in _read_examples(file)]
    total = len(read) if len(read_files) == len(files) else len(files) * of_first
    chosen = sorted(_spread(read, most), key=attrgetter("time"))
    return chosen, max(total, len(chosen))


def _spread(items: list[T], most: int) -> list[T]:
    """Return at most `most` items, evenly spaced, including the first and the last."""
    if len(items) <= most:
        return items
    if most < 2:
        return items[-1:] if most else []
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def _read_examples(file: Path) -> Iterator[DumpedExample]:
    traces = _read_traces(file.with_name(trace_file(file.name)))
    for number, content in enumerate(read_json_lines(file)):
        where = f"{file}, line {number + 1}"
        if content.get("format") != FORMAT:
            raise DataError(f"{where}: a dump of format {content.get('format')}; this version reads {FORMAT}")
        place = content.get("place")
        if not isinstance(place, dict) or not all(isinstance(place.get(name), int) for name in PLACE):
            raise DataError(f"{where}: not a dumped example (its place has no {', '.join(PLACE)})")
        yield DumpedExample(where, content, traces.get(number))


def _read_traces(file: Path) -> dict[int, dict[str, Any]]:
    """Return the traces by the number of the example."""
    traces = {}
    for number, line in enumerate(read_json_lines(file), start=1):
        if line.get("format") != TRACE_FORMAT or not isinstance(line.get("example"), int):
            raise DataError(f"{file}, line {number}: not a trace of format {TRACE_FORMAT}")
        traces[line["example"]] = line
    return traces


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
    problem = f"{run.folder / RESOLVED} does not have the form that a run writes"
    with explain((KeyError, TypeError, AttributeError), problem, NOT_WRITTEN_BY_A_RUN):  # a tree of any shape
        target = find_soft_target(run.settings)
    table, objective = _read_table(run.folder / FOLDER), run.latest_start.objective
    desc_is_masked = objective is not None and "B" in (objective.masked_desc or ())
    entries, samples = _read_samples(dumped, table, _find_image_folder(run), desc_is_masked=desc_is_masked)
    images = _add_images(entries, dumped, run.start_folder)
    index = {
        "stamp": stamp,
        "kinds": KINDS,
        "target": target,
        "pieces": collect_pieces(samples, table),
        "coord0": table.first_coord,
        "samples": entries,
    }
    held = len(entries)
    html = render_page(
        "rollouts.html",
        title=f"Rollouts of {run.name}",
        styles=("page.css", "rollouts.css"),
        scripts=SCRIPTS,
        data={"index": index, **{f"sample-{k}": sample for k, sample in enumerate(samples)}, **images},
        live=stamp is not None,
        run=run.name,
        kinds=KINDS,
        filters=[
            ("", f"all ({held:,})"),
            *((name, f"{words} ({sum(bool(e[name]) for e in entries):,})") for name, words in FILTERS.items()),
        ],
        scope=f"{f'{held:,} of ' if held < total else ''}{total:,} answer{'' if total == 1 else 's'}",
        report=report,
    )
    return InspectorPage(html, held, total, tuple(entry["remark"] for entry in entries if entry["remark"]))


def find_soft_target(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the target over bins that the loss on rollouts uses; None without one."""
    pipeline = (settings.get("rollout_matching") or {}).get("pipeline") or {}
    for module in pipeline.get("objective") or ():
        config = module["config"]
        is_used = module["name"] == "coord_reg" and module["enabled"] and module["weight"]
        if is_used and "B" in module["channels"] and (config["soft_ce_weight"] or config["w1_weight"]):
            names = {"sigma": "target_sigma", "truncate": "target_truncate", "temperature": "temperature"}
            return {name: config[key] for name, key in names.items()}
    return None


def _find_image_folder(run: Run) -> Path:
    """Return the folder of the training data, which names of images are relative to. Data in several folders has
    none: the same name may be in each of them."""
    data = (run.latest_start.data or {}).get("train")
    folders = {path.parent for path in data.paths} if data else set()
    return folders.pop() if len(folders) == 1 else Path()


def collect_pieces(samples: Iterable[dict[str, Any]], table: VocabularyTable) -> dict[str, str]:
    """Return the visible text of every token that the page shows and that is not a coordinate, by its id."""
    first, known = table.first_coord, len(table.pieces)
    ids = {id for sample in samples for id in sample["tokens"]["ids"]}
    return {
        str(id): make_visible(table.pieces[id]) if id < known else f"<id {id}>"
        for id in sorted(ids)
        if not first <= id < first + BINS
    }


def make_visible(piece: bytes) -> str:
    """Return the text of a token, with escapes for characters that cannot be seen."""
    try:
        text = piece.decode()
    except UnicodeDecodeError:  # a part of a character
        return "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in piece)
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _read_samples(
    dumped: Sequence[DumpedExample], table: VocabularyTable, folder: Path, *, desc_is_masked: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the entries of the index, and the full samples. Names of images are relative to `folder`."""
    seen = Counter[str]()
    entries, samples = [], []
    for example in dumped:
        content, trained = example.content, example.trained
        with explain(NOT_A_DUMP, f"{example.where}: not a dumped example"):
            place, path = content["place"], content["picture"]["path"]
            id = f"{place['step'] + 1}.{place['micro']}.{place['record']}"
            seen[id] += 1  # a record can occur twice in one step, when a new epoch begins
            id = id if seen[id] == 1 else f"{id}.{seen[id]}"
            image = Path(path).relative_to(folder) if Path(path).is_relative_to(folder) else path
            entries.append({"id": id, "image": str(image)} | summarise_sample(content, trained))
            samples.append({"id": id, **show_sample(content, trained, table, desc_is_masked=desc_is_masked)})
    return entries, samples


def _add_images(
    entries: Sequence[dict[str, Any]], dumped: Sequence[DumpedExample], root: Path | None
) -> dict[str, str]:
    """Return the images by id, one per file. Add to each entry the id of its image, or a remark why it has none.
    Relative paths are tried from here and from `root`, where the run was started."""
    images: dict[str, str] = {}
    known: dict[str, dict[str, Any]] = {}
    for entry, example in zip(entries, dumped, strict=True):
        path = example.content["picture"]["path"]
        if path not in known:
            id = f"picture-{len(known)}"
            known[path] = {"picture": id, "remark": None}
            try:
                address = path
                if root is not None and not is_url(path) and not Path(parse_address(path).location).is_file():
                    address = join_address(root, path)
                modified = 0 if is_url(path) else Path(parse_address(address).location).stat().st_mtime_ns
                images[id] = _load_thumbnail(address, modified)
            except (OSError, ValueError) as error:  # ValueError: a text that cannot be a path
                known[path] = {"picture": None, "remark": f"{explain_missing_image(error)}; {path}"}
        entry |= known[path]
    return images


@functools.lru_cache(maxsize=512)  # a served page is made again and again
def _load_thumbnail(address: str, modified: int) -> str:
    return make_thumbnail(address, SIDE)
