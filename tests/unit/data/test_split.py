"""Splitting a file: shares, classes, seeds, and repeated images."""

import hashlib
import random

from coordexp.data import Record, RecordObject, read_records
from tests.command import run
from tests.unit.data.test_export import write_records

COMMON, RARE = ["person", "car", "tree"], ["otter", "harp"]


def record(k, descs):
    objects = tuple(RecordObject(desc, "bbox_2d", (1.0, 1.0, 9.0, 9.0)) for desc in descs)
    return Record(f"{k}.png", 64, 64, "pixel", objects)


def make_file(folder, count=400):
    rng = random.Random(1)
    records = []
    for k in range(count):
        descs = [rng.choice(COMMON) for _ in range(rng.randint(0, 4))]
        if k % 40 == 7:  # the rare classes are in 10 of 400 records each
            descs.append(RARE[k // 40 % 2] if count < 400 else RARE[0])
        if k % 40 == 8:
            descs.append(RARE[1])
        records.append(record(k, descs))
    return write_records(folder / "all.jsonl", records)


def split(file, *words, code=0):
    result = run("data", "split", file, *words, code=code)
    return result, file.with_name("all.train.jsonl"), file.with_name("all.val.jsonl")


def descs(file):
    return [{item.desc for item in record.objects} for _, record in read_records(file)]


def test_every_class_gives_its_share_and_no_record_is_lost(tmp_path):
    file = make_file(tmp_path)
    _, train, val = split(file, "--val", 0.1)
    lines = file.read_text().splitlines()
    both = [train.read_text().splitlines(), val.read_text().splitlines()]
    assert [len(part) for part in both] == [360, 40]
    assert sorted(both[0] + both[1]) == sorted(lines)
    for part in both:
        assert part == [line for line in lines if line in set(part)]  # in the order of the file
    for rare in RARE:
        assert sum(rare in found for found in descs(val)) == 1
    for common in COMMON:
        share = sum(common in found for found in descs(val)) / sum(common in found for found in descs(file))
        assert 0.05 < share < 0.15


def test_the_same_seed_gives_the_same_files_and_another_seed_others(tmp_path):
    digests = []
    for k, seed in enumerate((0, 0, 1)):
        folder = tmp_path / str(k)
        folder.mkdir()
        _, _, val = split(make_file(folder), "--val", 0.1, "--seed", seed)
        digests.append(hashlib.sha256(val.read_bytes()).hexdigest())
    assert digests[0] == digests[1] != digests[2]
    # On every machine: this is what the first release wrote.
    assert digests[0].startswith(EXPECTED)


EXPECTED = "9a8649429a020a89"


def test_records_with_the_same_image_stay_together(tmp_path):
    records = [record(k // 4, ["car"]) for k in range(400)]
    result, train, val = split(write_records(tmp_path / "all.jsonl", records), "--val", 0.25)
    assert "300" in result.output
    images = [{record.image for _, record in read_records(part)} for part in (train, val)]
    assert not images[0] & images[1]
    assert len(descs(val)) == 100  # a quarter of the records, and not one for each of them


def test_records_of_one_image_cannot_be_divided(tmp_path):
    file = write_records(tmp_path / "all.jsonl", [record(0, ["car"]) for _ in range(10)])
    _, train, val = split(file, "--val", 0.2, code=1)
    assert not train.exists() and not val.exists()


def test_questions_are_divided_too(tmp_path):
    file = tmp_path / "all.jsonl"
    lines = [f'{{"question": "What is {k}?", "answer": "{k}"}}' for k in range(100)]
    file.write_text("\n".join(lines) + "\n")
    _, train, val = split(file, "--val", 0.1)
    assert len(val.read_text().splitlines()) == 10
    assert sorted((train.read_text() + val.read_text()).splitlines()) == sorted(lines)


def test_lines_are_copied_as_they_are(tmp_path):
    file = make_file(tmp_path, 20)
    lines = [line.replace('"pixel"', '  "pixel"') for line in file.read_text().splitlines()]
    file.write_text("\n\n".join(lines) + "\r\n")
    _, train, val = split(file, "--val", 5)
    assert sorted((train.read_text() + val.read_text()).splitlines()) == sorted(lines)
