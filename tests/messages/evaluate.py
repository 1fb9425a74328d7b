"""Messages about predictions, and about what is evaluated."""

import json
from dataclasses import replace

from PIL import Image

from coordexp.detect.answering import make_record
from coordexp.detect.chat_server import normalise_url
from coordexp.detect.predicting import UnfinishedPredictions
from coordexp.detect.suggestions import SuggestionRules, suggest_labels, write_suggestions
from coordexp.evaluate import evaluate, read_predictions, read_results, write_predictions
from coordexp.evaluate.predictions import read_samples, write_samples
from tests.command import run
from tests.messages import provoke
from tests.unit.evaluate.scenes import BOX, FAR, answer, prediction, record

CAT = prediction("cat", BOX)
LINE = {"image_id": 1, "image": "a.png", "text": "{}", "finish_reason": "stop", "tokens": 3, "objects": []}
OBJECT = {"desc": "cat", "kind": "bbox_2d", "bins": list(BOX), "score": 0.5, "reason": None}
TRUTH = [(1, record(("cat", BOX), ("dog", FAR)))]


@provoke(
    *({"bins": None}, {"desc": None}, {"bins": (1, 2, 3)}, {"bins": (5, 5, 5, 9)}, {"bins": (5, 5, 1000, 9)}),
    {"score": float("nan")},
)
def a_predicted_object_with(folder, changes):
    replace(CAT, **changes)


@provoke({"image_id": 2}, {"score": None})
def an_answer_to_write_with(folder, changes):
    given = answer(prediction("cat", BOX, None)) if "score" in changes else answer(**changes)
    write_predictions(folder / "preds.json", [given], TRUTH)


def write(folder):
    write_predictions(folder / "preds.json", [answer(CAT, prediction("dog", FAR))], TRUTH)
    return folder / "preds.json"


def read_line(folder, line):
    write(folder).with_suffix(".answers.jsonl").write_text(f"\n{line}\n")
    read_predictions(folder / "preds.json", TRUTH)


@provoke("{", "[]", '{"image_id": 1}', f"{json.dumps(LINE)}\n{json.dumps(LINE)}")
def a_line_of_answers(folder, line):
    read_line(folder, line)


@provoke(
    *({"extra": 1}, {"image_id": -1}, {"image_id": True}, {"tokens": 1.5}, {"text": None}, {"objects": {}}),
    {"objects": [3]},
)
def an_answer_with(folder, changes):
    read_line(folder, json.dumps(LINE | changes))


@provoke({"kind": "box"}, {"bins": [1.0, 2, 3, 4]}, {"score": "high"}, {"bins": [9, 9, 1, 1]}, {"reason": 3})
def an_object_of_an_answer_with(folder, changes):
    read_line(folder, json.dumps(LINE | {"objects": [OBJECT | changes]}))


@provoke({"bbox": [1, 2, 3]}, {"area": 3})
def a_detection_with(folder, changes):
    detections = json.loads(write(folder).read_text())
    (folder / "preds.json").write_text(json.dumps([detections[0], detections[1] | changes]))
    read_predictions(folder / "preds.json", TRUTH)


@provoke("[{", "{}")
def a_file_of_detections(folder, text):
    write(folder).write_text(text)
    read_predictions(folder / "preds.json", TRUTH)


@provoke()
def detections_without_answers(folder):
    write(folder).with_suffix(".answers.jsonl").unlink()
    read_predictions(folder / "preds.json", TRUTH)


@provoke()
def files_of_two_runs(folder):
    write(folder).write_text("[]")
    read_predictions(folder / "preds.json", TRUTH)


@provoke({"prompt": "q"}, {"dedup": 0.9}, {"prompt": None, "model": None})
def unfinished_predictions_with_another(folder, changes):
    request = {"model": "m", "prompt": "p"}
    UnfinishedPredictions(folder / "preds.json", request).begin()
    UnfinishedPredictions(folder / "preds.json", request | changes).resume()


@provoke()
def predictions_that_were_interrupted(folder):
    unfinished = UnfinishedPredictions(folder / "preds.json", {"model": "m"})
    unfinished.begin()
    unfinished.add([answer()])
    unfinished.begin()


@provoke(((1,), (1, 7)), (tuple(range(1, 9)), (1,)), ((1,), (1, 1)), ((1, 1), (1,)))
def image_ids_of_truth_and_answers(folder, ids):
    evaluate([(k, record()) for k in ids[0]], [answer(image_id=k) for k in ids[1]])


@provoke(((), "b.png"), ((("cat", (5, 5, 5, 9)),), "a.png"), ((("cat", (9, 9, 5, 5)),), "a.png"))
def truth_that_does_not_fit(folder, truth):
    evaluate([(1, record(*truth[0], image=truth[1]))], [answer()])


@provoke(
    *({"image_id": 77}, {"image_id": "none"}, {"bbox": [1, 2, 3]}, {"bbox": [1, 2, -3, 4]}, {"score": None}),
    {"segmentation": {"size": [1, 1], "counts": "1"}},
)
def a_result_of_another_detector_with(folder, changes):
    result = {"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4], "score": 0.5} | changes
    (folder / "results.json").write_text(json.dumps([result]))
    (folder / "val.jsonl").write_text(f"{TRUTH[0][1].as_json()}\n")
    return run("evaluate", "--data", folder / "val.jsonl", "--preds", folder / "results.json", code=1).output


@provoke()
def results_that_name_an_image_of_two_folders(folder):
    truth = [(k, replace(record(("cat", BOX)), image=f"{name}/x.png")) for k, name in ((1, "a"), (2, "b"))]
    (folder / "results.json").write_text('[{"image_id": "x", "category_id": 1, "bbox": [1, 2, 3, 4], "score": 1}]')
    read_results(folder / "results.json", truth)


@provoke(*(([1, 2, 4], 4, [1]), ([1], 1, [1, 7]), ([1], 1, [7]), ([1, 1], 1, [1]), (None, 4, [1])))
def samples(folder, written):
    numbers, count, image_ids = written
    write(folder)
    if numbers:
        write_samples(folder / "preds.json", [replace(answer(CAT), sample=k) for k in numbers])
    read_samples(folder / "preds.json", count, image_ids)


@provoke({"image": "c.png"}, {"score": None})
def answers_for_suggestions_with(folder, changes):
    given = answer(prediction("cat", BOX, None)) if "score" in changes else answer(**changes)
    suggest_labels(TRUTH, [given], SuggestionRules(iou=0.5, other_iou=0.7))


@provoke(
    *({"classes": ["cup"], "expression": "the cup"}, {"classes": []}, {"classes": ["cup", "cup"]}),
    *({"expression": " "}, {"prompt": "Where are {classes}?"}),
)
def a_request_to_the_detector(folder, words):
    make_record("a.png", (64, 48), **words)


@provoke(*("127.0.0.1:8000", "file:///etc/passwd", "http://me:word@host", "http://host:port"))
def the_address_of_a_chat_server(folder, url):
    normalise_url(url)


@provoke(
    ["--images", "IMAGE", "--data", "DATA"],
    [],
    ["IMAGE"],
    *(["--data", "DATA", *more] for more in (["IMAGE"], ["--classes", "cup"], ["--expression", "the cup"])),
    *(["--data", "DATA", name, value] for name, value in (("--dedup", "0"), ("--dedup", "1.5"), ("--seed", "0"))),
    *(["--data", "DATA", name, value] for name, value in (("--stop-bias", "nan"), ("--temperature", "0.7"))),
    *(["--data", "DATA", "--samples", "2", *more] for more in (["--temperature", "0"], ["--top-p", "1.1"])),
    ["--data", "DATA", "--top-p", "0.9"],
    ["--images", "IMAGE", "--classes", "cup", "--expression", "it"],
    ["--images", "IMAGE", "--classes", " , "],
    ["--images", "IMAGE", "--server", "http://h", "--backend", "vllm"],
    ["--images", "IMAGE", "--served-model", "mine"],
    ["--images", "IMAGE", "--page", "page.txt"],
    ["--images", "IMAGE", "IMAGE"],  # all is right, but there is no model
)
def predicting(folder, words):
    Image.new("RGB", (64, 48)).save(folder / "a.png")
    (folder / "val.jsonl").write_text("{}")
    paths = {"IMAGE": str(folder / "a.png"), "DATA": str(folder / "val.jsonl")}
    given = ["predict", "--model", str(folder), "--out", str(folder / "preds.json")]
    result = run(*given, *(paths.get(word, word) for word in words), code=1)
    return result.output


@provoke(
    *(
        words.split()
        for words in ("--iou 0", "--other-iou 1.5", "--batch 4", "--samples 2", "--resume", "--model .")
    )
)
def suggesting(folder, words):
    (folder / "val.jsonl").write_text("".join(f"{line.as_json()}\n" for _, line in TRUTH))
    files = ["--data", folder / "val.jsonl", "--preds", write(folder), "--out", folder / "out"]
    result = run("data", "suggest", *files, *words, code=1)
    assert not (folder / "out").exists()
    return result.output


@provoke()
def completing_without_decisions_or_a_score(folder):
    write_suggestions(folder / "s.jsonl", [])
    (folder / "val.jsonl").write_text(f"{TRUTH[0][1].as_json()}\n")
    files = ["--data", folder / "val.jsonl", "-s", folder / "s.jsonl", "--out", folder / "new.jsonl"]
    return run("data", "complete", *files, code=1).output
