"""The inspector of a run: its dumped examples, their pictures and their tokens, put together for one page."""

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from coordexp.data import BINS
from coordexp.data.view.thumbnail import thumbnail
from coordexp.dump_files import FOLDER
from coordexp.errors import DataError
from coordexp.inspector.dumps import Dumped, choose
from coordexp.inspector.page import page
from coordexp.inspector.run import MANIFEST, RESOLVED, Run
from coordexp.inspector.sample import shown, summary
from coordexp.vocab import VocabularyError, VocabularyTable

SIDE = 640  # pixels of a picture in the page
Entry = dict[str, Any]


class Inspected(NamedTuple):
    """A page, how many examples it holds and of how many, and remarks on pictures that could not be shown."""

    text: str
    held: int
    total: int
    remarks: tuple[str, ...]


def inspector_page(run: Run, most: int, *, stamp: str | None = None, report: str | None = None) -> Inspected:
    """With at most `most` examples. A served page has a `stamp`: of what it was made from. `report` is the address
    of the run's report, if there is one."""
    dumped, total = choose(run.folder, most)
    about = _about(run)
    table = _table(run.folder / FOLDER)
    entries, samples = _read(dumped, table, about)
    index = {
        "run": run.name,
        "total": total,
        "stamp": stamp,
        "report": report,
        "target": about.target,
        "pieces": pieces((sample["tokens"]["ids"] for sample in samples), table),
        "coord0": table.first_coord,
        "samples": entries,
    }
    pictures = _with_pictures(entries, dumped, run.started_in)
    remarks = tuple(entry["remark"] for entry in entries if entry["remark"])
    return Inspected(page(index, samples, pictures, live=stamp is not None), len(entries), total, remarks)


@dataclass(frozen=True)
class About:
    """The soft target over bins, if the loss has one; whether class names are left out of the loss; the folder of
    the pictures."""

    target: dict[str, Any] | None
    desc_is_masked: bool
    pictures: Path


def _about(run: Run) -> About:
    try:
        pipeline = (run.settings.get("rollout_matching") or {}).get("pipeline") or {}
        objective = run.beginnings[-1].get("objective") or {}
        data = Path((run.settings.get("custom") or {}).get("train_jsonl") or "")
        masked = "B" in (objective.get("masked_desc") or ())
        return About(soft_target(pipeline.get("objective") or ()), masked, data.parent)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise DataError(
            f"{run.folder / RESOLVED} or {MANIFEST} is not what a run writes ({error!r})\n"
            "  they were changed, or are of another program; give another run"
        ) from error


def soft_target(objective: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The target over bins that the loss of rollouts has; None without one."""
    for module in objective:
        config = module["config"]
        if module["name"] == "coord_reg" and module["enabled"] and module["weight"] and "B" in module["channels"]:
            if not config["soft_ce_weight"] and not config["w1_weight"]:
                continue
            names = {"sigma": "target_sigma", "truncate": "target_truncate", "temperature": "temperature"}
            return {name: config[key] for name, key in names.items()}
    return None


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
    file = folder / "tokenizer.json"
    try:
        return _known_table(folder, file.stat().st_mtime_ns if file.is_file() else 0)
    except VocabularyError as error:
        raise DataError(f"{error}\n  copy the tokenizer.json of the run's model there") from error


@functools.lru_cache(maxsize=1)  # a served page is made again and again
def _known_table(folder: Path, changed: int) -> VocabularyTable:
    return VocabularyTable.from_folder(folder)


def _read(dumped: Sequence[Dumped], table: VocabularyTable, about: About) -> tuple[list[Entry], list[Entry]]:
    """Of each example what the list says of it, and all that is shown of it."""
    seen = Counter[str]()
    entries, samples = [], []
    for one in dumped:
        try:
            place, path = one.whole["place"], one.whole["picture"]["path"]
            id = f"{place['step'] + 1}.{place['micro']}.{place['record']}"
            seen[id] += 1  # a record can come twice in one step, when the data begins anew
            named = {"id": id if seen[id] == 1 else f"{id}.{seen[id]}"}
            own = {"image": _short(path, about.pictures), "followed": one.followed}
            entries.append({**named, **own, **summary(one.whole, one.trained)})
            samples.append({**named, **shown(one.whole, one.trained, table, desc_is_masked=about.desc_is_masked)})
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{one.where}: not a dumped example ({error!r})") from error
    return entries, samples


def _with_pictures(entries: Sequence[Entry], dumped: Sequence[Dumped], root: Path | None) -> dict[str, str]:
    """The pictures by id, one for each file. Each entry gets the id of its own, or a remark why there is none."""
    found: dict[str, str] = {}
    known: dict[str, Entry] = {}
    for entry, one in zip(entries, dumped, strict=True):
        path = one.whole["picture"]["path"]
        if path not in known:
            address, remark = _picture(path, root)
            id = f"picture-{len(known)}" if address else None
            known[path] = {"picture": id, "remark": remark}
            found |= {id: address} if id and address else {}
        entry |= known[path]
    return found


def _picture(path: str, root: Path | None) -> tuple[str | None, str | None]:
    """As a data address, or why there is none. It is looked for from here, and from where the run was started."""
    try:
        file = Path(path)
        file = root / file if root is not None and not file.is_file() else file
        return _thumbnail(str(file), file.stat().st_mtime_ns), None
    except (OSError, ValueError) as error:  # the latter for what can be no path
        return None, f"picture not shown: {getattr(error, 'strerror', None) or error}; {path}"


@functools.lru_cache(maxsize=512)
def _thumbnail(path: str, changed: int) -> str:
    return thumbnail(Path(path), SIDE)


def _short(path: str, root: Path) -> str:
    """Without the folder of the data."""
    return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else path
