"""Any record survives the way to Label Studio and back, up to a thousandth of a pixel."""

import json

from hypothesis import given
from hypothesis import strategies as st

from coordexp.data import BINS, Geometry, Record, is_degenerate
from coordexp.data.importers import ImportCounts, Rules, read_labelstudio
from coordexp.data.importers.labelstudio import to_task
from coordexp.data.importers.shape import convert_object
from coordexp.data.records import SPACES, RecordObject
from coordexp.detect.suggestions import to_record_object

BIN = st.integers(0, BINS - 1)
DESCS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)
SIDES = st.integers(4, 4000)  # a bin is at least four thousandths of a pixel, to which the importer rounds
IDS = st.none() | st.integers(0, 2**31)


@st.composite
def geometries(draw):
    if draw(st.booleans()):
        (x1, x2), (y1, y2) = (sorted(draw(st.lists(BIN, min_size=2, max_size=2, unique=True))) for _ in range(2))
        return Geometry("bbox_2d", (x1, y1, x2, y2))
    vertices = st.lists(st.tuples(BIN, BIN), min_size=3, max_size=8, unique=True)
    return draw(
        vertices.map(lambda points: Geometry("poly", tuple(value for point in points for value in point))).filter(
            lambda shape: not is_degenerate(*shape)
        )
    )


@st.composite
def records(draw):
    """Return a record and suggestions for it. The objects of a class have the same category_id."""
    ids = draw(st.dictionaries(DESCS, IDS, min_size=1, max_size=4))
    empty = Record("deep/ä b?.png", draw(SIDES), draw(SIDES), draw(st.sampled_from(SPACES)), (), draw(IDS))

    def objects(most):
        pairs = draw(st.lists(st.tuples(st.sampled_from(sorted(ids)), geometries()), max_size=most))
        return tuple(to_record_object(desc, shape, empty, ids[desc]) for desc, shape in pairs)

    record = Record(empty.image, empty.width, empty.height, empty.space, objects(5), empty.image_id)
    return record, [(k, item, 0.5) for k, item in enumerate(objects(3), 1)]


def bring_back(task, folder):
    """Return the only image of an exported task, as the importer reads it."""
    (folder / "tasks.json").write_text(json.dumps([task]))
    counts = ImportCounts()
    (image,) = read_labelstudio(folder / "tasks.json", folder, "image", counts)
    items = [
        item
        for source in image.objects
        for item in convert_object(source, (image.width, image.height), Rules(), counts)
    ]
    return image, items, counts


def has_same_shape(item: RecordObject, original: RecordObject, record: Record) -> bool:
    pairs = zip(item.coords, record.in_pixels(original), strict=True)
    return item.kind == original.kind and all(abs(a - b) < 0.00051 for a, b in pairs)


@given(records())
def test_labels_come_back_as_they_were_and_a_copied_prediction_has_the_suggestions_too(
    tmp_path_factory, given_record
):
    record, suggested = given_record
    task = to_task(record, suggested, "", "coordexp")
    copied = task | ({"annotations": [{"result": task["predictions"][0]["result"]}]} if suggested else {})
    suggestions = tuple(item for _, item, _ in suggested)
    for exported, expected in ((task, record.objects), (copied, (*record.objects, *suggestions))):
        image, items, _ = bring_back(exported, tmp_path_factory.getbasetemp())
        assert (image.width, image.height, image.image_id) == (record.width, record.height, record.image_id)
        assert image.path.name == "ä b?.png"
        names, wanted = ([(item.desc, item.category_id) for item in side] for side in (items, expected))
        assert names == wanted
        assert all(has_same_shape(*pair, record) for pair in zip(items, expected, strict=True))
