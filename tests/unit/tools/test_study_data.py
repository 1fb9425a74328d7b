"""The data of the study: which labels are missing, and that splits are disjoint."""

import pytest
from study_data import LESSONS, REGIMES, SIZES, make_lesson, make_scenes, thin_labels

from coordexp.data import Record, RecordFile, read_records
from coordexp.errors import UserError


def read(file) -> list[Record]:
    return [record for _, record in read_records(file)]


def count_objects(records: list[Record]) -> int:
    return sum(len(record.objects) for record in records)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "scenes"
    make_scenes(folder, SIZES["trial"])
    return folder


def test_regimes_share_images_and_only_training_lacks_labels(scenes):
    whole = read(scenes / "train.jsonl")
    for regime, settings in REGIMES.items():
        thinned = read(thin_labels(scenes, regime, 0))
        assert [record.image for record in thinned] == [record.image for record in whole]
        assert all(record.objects for record in thinned)
        share = count_objects(thinned) / count_objects(whole)
        assert share == pytest.approx(settings.labelled_share, abs=0.15)
    held_out = [record.image for name in ("val", "test") for record in read(scenes / f"{name}.jsonl")]
    assert len(set(held_out)) == len(held_out) == SIZES["trial"].held_out
    assert (scenes / RecordFile(scenes / "test.jsonl")[0].image).is_file()


def test_another_seed_removes_other_labels_and_the_same_one_the_same(scenes):
    first, second = (read(thin_labels(scenes, "missing-50", seed)) for seed in (0, 1))
    assert first != second
    file = thin_labels(scenes, "missing-50", 0)
    file.unlink()
    assert read(thin_labels(scenes, "missing-50", 0)) == first


def test_a_study_of_another_size_is_refused(scenes):
    with pytest.raises(UserError):
        make_scenes(scenes, SIZES["small"])


def test_the_base_learns_incomplete_labels_but_for_scenes_with_one_object(tmp_path):
    for name, lesson in LESSONS.items():
        make_lesson(tmp_path / name, lesson, scale=1e-3)
        whole, thinned = (count_objects(read(tmp_path / name / f"{part}.jsonl")) for part in ("train", "thinned"))
        assert (thinned == whole) == (name == "one")
    assert LESSONS["many"].seed != 21 and count_objects(read(tmp_path / "many/thinned.jsonl")) > 16
