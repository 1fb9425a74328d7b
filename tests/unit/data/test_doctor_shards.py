"""The doctor in shards gives the report of the whole file."""

import json

import pytest
from PIL import Image

from coordexp.data.doctor.examine import WHOLE, cut_parts
from tests.command import run


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A file with mistakes of many kinds, in parts of a few lines."""
    lines = []
    for k in range(60):
        Image.new("RGB", (40, 30), (k % 50, 0, 0)).save(tmp_path / f"{k}.png")
        name = f"{k}.png" if k % 17 else "0.png"
        box = [30, 20, 5, 6] if k % 11 == 3 else [1, 2, 20 + k % 9, 21]
        item = {"desc": ("cup", "Cup", "dög")[k % 3], "bbox_2d": box}
        if k % 6 == 5:
            item = {"desc": "cup", "poly": [1, 1, 20, 1, 20, 20]}
        size = {"width": 40, "height": 30, "space": "pixel"}
        lines.append(json.dumps({"image": name, **size, "objects": [item] * (1 + k % 2)}))
    lines[20] = "{broken"
    lines.insert(31, "")
    (tmp_path / "41.png").unlink()
    (tmp_path / "42.png").write_bytes(b"no image")
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(cut_parts, "__defaults__", (WHOLE, 600))
    return tmp_path / "d.jsonl"


@pytest.mark.parametrize(("images", "count"), [("head", 1), ("skip", 5), ("head", 40)])
def test_the_report_of_all_shards_is_that_of_the_whole_file(data, tmp_path, images, count):
    whole = run("data", "doctor", data, "--images", images, "--json", code=1)
    for number in reversed(range(count)):
        shard = ["--images", images, "--out", tmp_path / "out", "--shard", f"{number}/{count}"]
        run("data", "doctor", data, *shard)
    assert run("shards", "merge", tmp_path / "out", "--json", code=1).stdout == whole.stdout
    codes = {finding["subject"] for finding in json.loads(whole.stdout)["findings"]}
    assert {"broken-line", "duplicate-image", "desc-spelling", "mixed-shapes"} <= codes
    shown = run("shards", "merge", tmp_path / "out", code=1).stdout
    assert shown == run("data", "doctor", data, "--images", images, code=1).stdout
    run("shards", "merge", tmp_path / "out", "--out", tmp_path / "p.json", code=1)
    assert "it was finished before" in run("data", "doctor", data, *shard).output
    assert "images" in run("data", "doctor", data, *shard, "--images", "decode", code=1).output
