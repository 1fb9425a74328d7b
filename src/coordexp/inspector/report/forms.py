"""The form of what a run writes, field by field. DataError with file and place for anything else, so that what is
behind a check needs no second look."""

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

from coordexp.errors import DataError

LARGEST = 1e100  # of a number, so that sums and products of a page's numbers stay numbers
DEEPEST = 64  # of objects and lists in each other
WIDEST = 100_000  # values at one depth; a few aliases of YAML can stand for any number of them

Is = Callable[[Any], bool]


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**53


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and -LARGEST <= value <= LARGEST


def is_list_of(of: Is) -> Is:
    return lambda value: isinstance(value, list) and all(of(one) for one in value)


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def either(*ways: Is) -> Is:
    return lambda value: any(of(value) for of in ways)


def is_none(value: Any) -> bool:
    return value is None


def check_form(value: Any, needed: Mapping[str, Is], where: str, also: Mapping[str, Is] | None = None) -> None:
    """An object with every field of `needed`; those of `also` may be null or not there."""
    if not isinstance(value, dict):
        raise _unlike(where, f"{reprlib.repr(value)} is not an object")
    wrong = [name for name, fits in needed.items() if name not in value or not fits(value[name])]
    wrong += [name for name, fits in (also or {}).items() if value.get(name) is not None and not fits(value[name])]
    for name in wrong[:1]:
        raise _unlike(where, f"{name} {reprlib.repr(value.get(name))} is not what a run writes")


def check_depth(value: Any, where: str) -> None:
    """Objects and lists in each other come to an end, and soon."""
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        level = [one for each in level for one in _inside(each)]
        if not level:
            return
        if len(level) > WIDEST:
            raise _unlike(where, f"more than {WIDEST:,} values")
    raise _unlike(where, f"more than {DEEPEST} objects and lists inside of each other")


def logged_number(value: Any, where: str) -> float:
    """nan for null, and for what JSON has no number for. DataError for all that cannot be drawn."""
    if value is None or (type(value) is float and not math.isfinite(value)):
        return math.nan
    if not is_number(value):
        raise DataError(
            f"{where} {reprlib.repr(value)} is not a number up to {LARGEST:g}\n"
            "  the file was changed, or is of another program; give another run"
        )
    return float(value)


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _unlike(where: str, problem: str) -> DataError:
    return DataError(f"{where}: {problem}\n  the file was changed, or is of another program; give another run")
