"""Write a data file without what the doctor calls an error: records that cannot be used, and single objects of the
others. Lines that stay whole are copied byte by byte. A record that loses an object no longer states that all
objects of its class are labelled (`exhaustive`), nor asks for the class if it has no other object of it: the right
answer would be empty, although the image shows one.

A problem of the file as a whole, such as boxes that are x, y, width and height, cannot be mended by leaving
something out. Nothing is written then.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from coordexp.data.doctor.checks import KINDS, Problem, Suspicions
from coordexp.data.doctor.examine import CheckedLine, ReadImage, check_lines, cut_parts, read_parts
from coordexp.data.records import Record
from coordexp.errors import DataError, Finding, Place
from coordexp.files import write_parts
from coordexp.tasks import ignore

# Problems of one object for which the object is left out, besides errors: the doctor advises to remove it.
REMOVED_WARNINGS = frozenset({"duplicate-object"})
NO_OBJECTS = "record all of whose objects were dropped"
NO_CLASSES = "record that asks only for classes whose objects were dropped"
Removal = tuple[str, int, str]  # what was dropped, the line, and the detail


@dataclass
class Cleaned:
    """Counts of what stays of a part of a file, or of the whole, and what was dropped. Lines are numbered from
    1 in each part. `changed` are the records that lost some of their objects."""

    records: int = 0
    objects: int = 0
    changed: int = 0
    text: bytearray = field(default_factory=bytearray)
    removals: list[Removal] = field(default_factory=list)
    suspicions: Suspicions = field(default_factory=Suspicions)


def clean(
    path: Path,
    target: Path,
    *,
    look: ReadImage | None = None,
    notify: Callable[[float], None] = ignore,
    processes: int = 1,
) -> tuple[Cleaned, list[Finding]]:
    """Write the records and objects of a file that can be used to `target`. Return their counts, and what was
    dropped, with its count and first place. `look` reads the facts of an image file; without it, image files are
    not opened. `notify` is called with the share of the file that has been read. Raise DataError, and write
    nothing, if the whole file is suspect."""

    def clean_part(lines: Sequence[bytes]) -> Cleaned:
        part = Cleaned()
        for line in check_lines(lines, path.parent, look):
            _add_line(part, line)
        return part

    whole, counts, firsts, before = Cleaned(), Counter[str](), dict[str, Place](), 0
    with write_parts(target) as write:
        for lines, part in read_parts(path, cut_parts(path), clean_part, processes, notify):
            write(part.text)
            for what, line, detail in part.removals:
                counts[what] += 1
                firsts.setdefault(what, Place(str(path), before + line, detail))
            whole.records += part.records
            whole.objects += part.objects
            whole.changed += part.changed
            whole.suspicions.merge(part.suspicions)
            before += lines
        for problem in whole.suspicions.problems():
            if (kind := KINDS[problem.code]).severity == "error":
                raise DataError(f"{path}: {kind.problem}: {problem.detail}; nothing was written", kind.fix)
        if not whole.records:
            raise DataError(
                f"{path}: no record would be left, so nothing was written", "see `coordexp data doctor`"
            )
    ranked = sorted(counts, key=lambda what: (-counts[what], what))
    return whole, [Finding("note", "", what, count=counts[what], places=(firsts[what],)) for what in ranked]


def _add_line(part: Cleaned, line: CheckedLine) -> None:
    """Add a record without the objects that have a problem, unless it has one as a whole."""
    record, text = line.record, line.text
    if isinstance(record, Record):
        part.suspicions.add(record)
    problems = [problem for problem in line.problems if _is_removed(problem)]
    removals = [(KINDS[problem.code].problem, line.number, problem.detail) for problem in problems]
    if unusable := [k for k, problem in enumerate(problems) if problem.index is None]:
        part.removals.append(removals[unusable[0]])
        return
    assert record is not None  # a broken line is a problem as a whole
    if isinstance(record, Record) and problems:
        removed: dict[int | None, Problem] = {}  # the first problem of each object
        for problem, removal in zip(problems, removals, strict=True):
            if removed.setdefault(problem.index, problem) is problem:
                part.removals.append(removal)
        record = _leave_out(record, removed)
        if not record.objects or record.classes == ():
            what = NO_CLASSES if record.objects else NO_OBJECTS
            part.removals.append((what, line.number, repr(record.image)))
            return
        part.changed += 1
        text = record.as_json().encode(errors="backslashreplace")
    part.text += text.rstrip(b"\n") + b"\n"
    part.records += 1
    part.objects += len(record.objects) if isinstance(record, Record) else 0


def _leave_out(record: Record, removed: Mapping[int | None, Problem]) -> Record:
    """Return the record without these objects, and without their classes where it states or asks for them. A
    repeated object is no loss. The classes of the result may be empty."""
    objects = tuple(item for k, item in enumerate(record.objects) if k not in removed)
    lost = {
        item.desc
        for k, item in enumerate(record.objects)
        if k in removed and removed[k].code not in REMOVED_WARNINGS
    }
    gone = lost - {item.desc for item in objects}
    classes = record.classes and tuple(desc for desc in record.classes if desc not in gone)
    exhaustive = record.exhaustive and tuple(desc for desc in record.exhaustive if desc not in lost)
    return replace(record, objects=objects, classes=classes, exhaustive=exhaustive)


def _is_removed(problem: Problem) -> bool:
    return KINDS[problem.code].severity == "error" or problem.code in REMOVED_WARNINGS
