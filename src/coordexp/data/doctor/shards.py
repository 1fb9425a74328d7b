"""The data doctor in shards: each writes the facts about its parts of the file, one line of JSON per part. Joined,
they give the report about the whole file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coordexp.data.doctor.examine import DataReport, Facts, conclude, cut_parts, read_facts
from coordexp.data.shards import Manifest, Shard, make_shard, result_path
from coordexp.files import write_whole


def examine_shard(path: Path, folder: Path, shard: Shard, request: dict[str, Any], **options: Any) -> bool:
    """Write the facts about a shard of a file and return True, or False if it was finished before. `request` is
    what decides the facts. `options` are those of `read_facts`."""
    parts = cut_parts(path, shard)

    def write(result: Path) -> dict[str, int]:
        lines, counts = list[str](), {"lines": 0, "records": 0, "objects": 0}
        for count, facts in read_facts(path, parts=parts, **options):
            lines.append(f"{json.dumps([count, _encode(facts), _encode(facts.suspicions)])}\n")
            for name, number in (("lines", count), ("records", facts.records), ("objects", facts.objects)):
                counts[name] += number
        write_whole(result, "".join(lines))
        return counts

    place = (shard.number, shard.count, parts[0][0], parts[-1][1], str(path))
    return make_shard(folder, Manifest("doctor", *place, request), write)


def merge_facts(folder: Path, manifests: list[Manifest]) -> DataReport:
    """Return the report about the whole file. `manifests` are those of `read_finished`."""
    return conclude(Path(manifests[0].data), _read_facts(folder, manifests))


def _read_facts(folder: Path, manifests: list[Manifest]) -> Iterator[tuple[int, Facts]]:
    for manifest in manifests:
        with result_path(folder, Shard(manifest.shard, manifest.shards), "doctor").open("rb") as file:
            for line in file:
                count, values, suspicions = json.loads(line)
                facts = Facts()
                _decode(facts, values)
                _decode(facts.suspicions, suspicions)
                yield count, facts


def _encode(counts: object) -> dict[str, Any]:
    """Return the numbers, lists and dicts of an object for JSON. The keys of dicts may be tuples."""
    return {
        name: list(value.items()) if isinstance(value, dict) else value
        for name, value in vars(counts).items()
        if name != "suspicions"
    }


def _decode(target: object, values: dict[str, Any]) -> None:
    """Set the attributes of a new object to what `_encode` returned."""
    for name, value in values.items():
        empty = vars(target)[name]
        if isinstance(empty, dict):
            pairs = ((tuple(key) if isinstance(key, list) else key, item) for key, item in value)
            value = type(empty)(dict(pairs))
        setattr(target, name, value)
