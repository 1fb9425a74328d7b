"""The inspector of a run: its dumped examples, their pictures and their tokens, put together for one page."""

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from coordexp.data import BINS
from coordexp.data.view.thumbnail import thumbnail
from coordexp.errors import DataError
from coordexp.inspector.dumps import FOLDER, Dumped, choose
from coordexp.inspector.page import page
from coordexp.inspector.run import Run
from coordexp.inspector.sample import shown, summary
from coordexp.vocab import VocabularyError, VocabularyTable

SIDE = 640  # pixels of a picture in the page
Entry = dict[str, Any]


def inspector_page(run: Run, most: int, *, stamp: str | None = None, report: str | None = None) -> str:
    """With at most `most` examples. A served page has a `stamp`: of what it was made from. `report` is the address
    of the run's report, if there is one."""
    dumped, total = choose(run.folder, most)
    table = _table(run.folder / FOLDER)
    entries, samples = _read(run, dumped, table)
    index = {
        "run": run.name,
        "total": total,
        "live": stamp is not None,
        "stamp": stamp,
        "report": report,
        "target": soft_target(run),
        "pieces": pieces((sample["tokens"]["ids"] for sample in samples), table),
        "coord0": table.first_coord,
        "samples": entries,
    }
    return page(index, samples, _with_pictures(entries, dumped), live=stamp is not None)


def soft_target(run: Run) -> dict[str, Any] | None:
    """The target over the bins that the run's objective has on rollouts; None without one."""
    pipeline = (run.settings.get("rollout_matching") or {}).get("pipeline") or {}
    for module in pipeline.get("objective") or ():
        if module["name"] == "coord_reg" and module["enabled"] and "B" in module["channels"]:
            config = module["config"]
            return {
                "sigma": config["target_sigma"],
                "truncate": config["target_truncate"],
                "temperature": config["temperature"],
            }
    return None


def desc_is_masked(run: Run) -> bool:
    """Whether the objective leaves class names of rollouts out."""
    return "B" in run.beginnings[-1].get("objective", {}).get("masked_desc", ()) if run.beginnings else False


def pieces(strips: Iterable[Sequence[int]], table: VocabularyTable) -> dict[str, str]:
    """The text of every token that is no coordinate, with what cannot be seen written out."""
    first = table.first_coord
    ids = {id for strip in strips for id in strip if not first <= id < first + BINS}
    known = len(table.pieces)
    return {str(id): visible(table.pieces[id]) if id < known else f"<id {id}>" for id in sorted(ids)}


def visible(piece: bytes) -> str:
    try:
        text = piece.decode()
    except UnicodeDecodeError:  # a part of a character
        return "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in piece)
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _table(folder: Path) -> VocabularyTable:
    try:
        return VocabularyTable.from_folder(folder)
    except VocabularyError as error:
        raise DataError(f"{error}\n  copy the tokenizer.json of the run's model there") from error


def _read(run: Run, dumped: Sequence[Dumped], table: VocabularyTable) -> tuple[list[Entry], list[Entry]]:
    """Of each example what the list says of it, and all that is shown of it."""
    root = Path((run.settings.get("custom") or {}).get("train_jsonl") or "").parent
    masked, seen = desc_is_masked(run), Counter[str]()
    entries, samples = [], []
    for one in dumped:
        try:
            place, path = one.whole["place"], one.whole["picture"]["path"]
            id = f"{place['step']}.{place['micro']}.{place['record']}"
            seen[id] += 1  # a record can come twice in one step, when the data begins anew
            named = {"id": id if seen[id] == 1 else f"{id}.{seen[id]}"}
            own = {"image": _short(path, root), "followed": one.followed}
            entries.append({**named, **own, **summary(one.whole, one.trained)})
            samples.append({**named, **shown(one.whole, one.trained, table, desc_is_masked=masked)})
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{one.where}: not a dumped example ({error!r})") from error
    return entries, samples


def _with_pictures(entries: Sequence[Entry], dumped: Sequence[Dumped]) -> dict[str, str]:
    """The pictures by id, one for each file. Each entry gets the id of its own, or a remark why there is none."""
    found: dict[str, str] = {}
    known: dict[str, Entry] = {}
    for entry, one in zip(entries, dumped, strict=True):
        path = one.whole["picture"]["path"]
        if path not in known:
            address, remark = _picture(path)
            id = f"picture-{len(known)}" if address else None
            known[path] = {"picture": id, "remark": remark}
            found |= {id: address} if id and address else {}
        entry |= known[path]
    return found


def _picture(path: str) -> tuple[str | None, str | None]:
    """As a data address, or why there is none."""
    try:
        return _thumbnail(path, Path(path).stat().st_mtime_ns), None
    except OSError as error:
        return None, f"picture not shown: {error.strerror or error}; {path}"


@functools.lru_cache(maxsize=512)  # a served page is made again and again
def _thumbnail(path: str, changed: int) -> str:
    return thumbnail(Path(path), SIDE)


def _short(path: str, root: Path) -> str:
    """Without the folder of the data."""
    return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else path
