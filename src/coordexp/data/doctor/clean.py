"""Write a data file without what the doctor calls an error: records that cannot be used, and single objects of the
others. Lines that stay whole are copied byte by byte. A record that loses an object no longer states that all
objects of its class are labelled (`exhaustive`), nor asks for the class if it has no other object of it: the right
answer would be empty, although the image shows one.

A problem of the file as a whole, such as boxes that are x, y, width and height, cannot be mended by leaving
something out. Nothing is written then.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from coordexp.data.doctor.checks import KINDS, Problem, Suspicions, check_record
from coordexp.data.doctor.examine import ReadImage, look_at_image, read_parts
from coordexp.data.records import AnyRecord, Record, parse_any_record
from coordexp.errors import DataError, Place
from coordexp.files import write_parts
from coordexp.tasks import ignore

# Problems of one object for which the object is left out, besides errors: the doctor advises to remove it.
REMOVED_WARNINGS = frozenset({"duplicate-object"})
NO_OBJECTS = "record all of whose objects were dropped"
NO_CLASSES = "record that asks only for classes whose objects were dropped"
Removal = tuple[str, int, str]  # what was dropped, the line, and the detail


@dataclass(frozen=True)
class DroppedKind:
    """The records or objects that were dropped for one reason: how many, and the first place."""

    what: str
    count: int
    first: Place


@dataclass(frozen=True)
class CleanReport:
    """`changed` are the records that lost some of their objects."""

    records: int
    objects: int
    changed: int
    dropped: tuple[DroppedKind, ...]


@dataclass
class CleanPart:
    """The result of reading a part of a file. Lines are numbered from 1 in each part."""

    lines: int = 0
    records: int = 0
    objects: int = 0
    changed: int = 0
    text: bytearray = field(default_factory=bytearray)
    removals: list[Removal] = field(default_factory=list)
    suspicions: Suspicions = field(default_factory=Suspicions)

    def remove(self, problem: Problem) -> None:
        self.removals.append((KINDS[problem.code].problem, self.lines, problem.detail))


def clean(
    path: Path,
    target: Path,
    *,
    look: ReadImage | None = None,
    notify: Callable[[float], None] = ignore,
    processes: int = 1,
) -> CleanReport:
    """Write the records and objects of a file that can be used to `target`, and return what was dropped. `look`
    reads the facts of an image file; without it, image files are not opened. `notify` is called with the share of
    the file that has been read. Raise DataError, and write nothing, if the whole file is suspect."""
    reader = _PartCleaner(path.parent, look)
    whole, counts, firsts = CleanPart(), Counter[str](), dict[str, Place]()
    with write_parts(target) as write:
        for part in read_parts(path, reader.read, processes, notify):
            write(part.text)
            for what, line, detail in part.removals:
                counts[what] += 1
                firsts.setdefault(what, Place(str(path), whole.lines + line, detail))
            whole.lines += part.lines
            whole.records += part.records
            whole.objects += part.objects
            whole.changed += part.changed
            whole.suspicions.merge(part.suspicions)
        for problem in whole.suspicions.problems():
            if (kind := KINDS[problem.code]).severity == "error":
                raise DataError(f"{path}: {kind.problem}: {problem.detail}; nothing was written", kind.fix)
        if not whole.records:
            raise DataError(
                f"{path}: no record would be left, so nothing was written", "see `coordexp data doctor`"
            )
    ranked = sorted(counts, key=lambda what: (-counts[what], what))
    dropped = tuple(DroppedKind(what, counts[what], firsts[what]) for what in ranked)
    return CleanReport(whole.records, whole.objects, whole.changed, dropped)


@dataclass(frozen=True)
class _PartCleaner:
    folder: Path
    look: ReadImage | None

    def read(self, lines: Iterator[bytes]) -> CleanPart:
        part = CleanPart()
        for line in lines:
            part.lines += 1
            if line.strip():
                try:
                    record = parse_any_record(line)
                except ValueError as error:
                    part.remove(Problem("broken-line", str(error)))
                else:
                    self._add_record(part, record, line)
        return part

    def _add_record(self, part: CleanPart, record: AnyRecord, line: bytes) -> None:
        """Add a record without the objects that have a problem, unless it has one as a whole."""
        if isinstance(record, Record):
            part.suspicions.add(record)
        _, of_image = look_at_image(self.folder, record, self.look)
        problems = [problem for problem in (*of_image, *check_record(record)) if _is_removed(problem)]
        if unusable := [problem for problem in problems if problem.index is None]:
            part.remove(unusable[0])
            return
        if isinstance(record, Record) and problems:
            removed = {
                problem.index: problem for problem in reversed(problems)
            }  # the first problem of each object
            for problem in reversed(removed.values()):
                part.remove(problem)
            if len(removed) == len(record.objects):
                part.removals.append((NO_OBJECTS, part.lines, repr(record.image)))
                return
            record = _leave_out(record, removed)
            if record.classes == ():
                part.removals.append((NO_CLASSES, part.lines, repr(record.image)))
                return
            part.changed += 1
            line = record.as_json().encode(errors="backslashreplace")
        part.text += line.rstrip(b"\n") + b"\n"
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
