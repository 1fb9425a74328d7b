"""`Detector` and `predict --images`: with transformers, with a vLLM engine, and through a real server of vLLM that
serves a merged checkpoint, as docs/detector.md says. All three give the same boxes."""

import base64
import json
import os
import re
import shlex
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image

from coordexp import Detections, Detector
from coordexp.demo.scenes import SceneSettings, write_scenes
from coordexp.doctor import free_ports
from coordexp.errors import DataError, EngineError
from coordexp.families import load_model
from tests import zygote
from tests.command import run
from tests.integration.stage2_runs import Started, started

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/scenes-cpu/model"
PAGE = (ROOT / "docs/detector.md").read_text()
KEY = "a-secret-key"
START_S = 900  # for a server on a busy machine; otherwise it takes a minute

pytestmark = pytest.mark.timeout(START_S + 300)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six scenes as PNG files, a JPEG that is stored on its side, and two files that are not images."""
    folder = tmp_path_factory.mktemp("photos")
    write_scenes(folder / "s", SceneSettings(objects=(1, 3)), train=1, val=6, seed=8)
    scenes = sorted((folder / "s/images/val").iterdir())
    (folder / "photos").mkdir()
    for k, scene in enumerate(scenes):
        scene.rename(folder / f"photos/{k}.png")
    with Image.open(folder / "photos/0.png") as upright:
        stored = upright.convert("RGB").transpose(Image.Transpose.ROTATE_90)
    exif = stored.getexif()
    exif[0x0112] = 6
    stored.save(folder / "photos/turned.jpg", exif=exif, quality=95)
    with Image.open(folder / "photos/1.png") as plain:
        plain.convert("RGB").save(folder / "photos/kitchen.jpg", quality=95)
    (folder / "photos/notes.txt").write_text("not an image")
    (folder / "photos/broken.png").write_bytes(b"not an image")
    return folder / "photos"


def images_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name[0] in "012345kt")


@pytest.fixture(scope="module")
def detector() -> Detector:
    return Detector(MODEL, max_new_tokens=200)


def rounded(detections: Detections) -> list[Any]:
    return [(item.name, item.box, pytest.approx(item.score, abs=2e-3)) for item in detections]


def test_paths_images_and_batches_give_the_same_objects(detector, photos):
    files = images_of(photos)
    together = detector(files)
    assert sum(map(len, together)) >= 12 and {found.finish_reason for found in together} == {"stop"}
    assert detector([]) == []
    for path, expected in list(zip(files, together, strict=True))[:3]:
        assert isinstance(expected, Detections)
        with Image.open(path) as image:
            single = detector(image)
        assert [(item.name, item.box) for item in single] == [(item.name, item.box) for item in expected]
        assert rounded(single) == [(item.name, item.box, item.score) for item in expected]


def test_an_image_that_is_stored_on_its_side_is_answered_upright(detector, photos):
    upright, turned = detector([photos / "0.png", photos / "turned.jpg"])
    assert [item.name for item in turned] == [item.name for item in upright]
    for item, other in zip(turned, upright, strict=True):
        assert item.box == pytest.approx(other.box, abs=2.0)
    with Image.open(photos / "turned.jpg") as image:
        assert [item.box for item in detector(image)] == [item.box for item in turned]


def test_classes_and_expressions_are_asked_with_the_prompts_that_the_checkpoint_recorded(photos, tmp_path):
    """The prompt for classes is the one question that this model knows, so answers show which one was asked."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "coordexp.json").unlink()
    known = "Detect all objects."
    prompts = {"prompt": "Nonsense", "class_prompt": known, "expression_prompt": "More nonsense"}
    (folder / "coordexp.json").write_text(json.dumps(prompts | {"requests": ["classes", "expression"]}))
    other, image = Detector(folder, max_new_tokens=200), photos / "0.png"
    expected = Detector(MODEL, max_new_tokens=200)(image)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert other(image, classes=["red circle"]) == expected
        assert other(image, prompt=known) == expected
        assert other(image) != expected
        assert other(image, expression="the red circle") != expected


def test_a_model_that_was_not_trained_to_be_asked_for_classes_gives_a_warning_once(photos):
    detector = Detector(MODEL, max_new_tokens=4)
    with pytest.warns(UserWarning, match="was not trained to be asked for a list of classes") as shown:
        detector([photos / "0.png"] * 3, classes=["red circle"])
        detector(photos / "0.png", classes=["red circle"])
    assert len(shown) == 1 and shown[0].filename == __file__


def test_predict_on_images_writes_what_the_detector_finds_with_pictures_and_a_page(detector, photos, tmp_path):
    out = tmp_path / "preds.json"
    more = ["--draw", tmp_path / "drawn", "--page", tmp_path / "page.html"]
    predict = ["predict", "--model", MODEL, "--max-new-tokens", 200, "--out", out]
    result = run(*predict, "--images", photos / "5.png", photos, *more)
    assert f"skipped {photos / 'notes.txt'}: its name does not end in" in result.output
    assert f"skipped {photos / 'broken.png'}: not a" in result.output
    files = [photos / "5.png", *(path for path in images_of(photos) if path.name != "5.png")]
    listed = json.loads((tmp_path / "preds.images.json").read_text())
    assert [(entry["id"], entry["file_name"]) for entry in listed["images"]] == [
        (k, str(path)) for k, path in enumerate(files, start=1)
    ]
    categories = {entry["name"]: entry["id"] for entry in listed["categories"]}
    expected = [
        entry for k, found in enumerate(detector(files), start=1) for entry in found.to_coco(k, categories)
    ]
    written = json.loads(out.read_text())
    assert [{**entry, "bbox": tuple(entry["bbox"])} | {"score": 0} for entry in written] == [
        entry | {"score": 0} for entry in expected
    ]
    assert [entry["score"] for entry in written] == pytest.approx([entry["score"] for entry in expected], abs=1e-4)
    drawn = sorted(path.name for path in (tmp_path / "drawn").iterdir())
    assert drawn == sorted(f"{k}-{path.stem}.png" for k, path in enumerate(files, start=1))
    page = (tmp_path / "page.html").read_text()
    assert f"all {len(files)} images, {len(written)} objects" in page

    labelled = run(*predict, "--data", photos.parent / "s/val.jsonl", code=1)
    assert "preds.images.json has the numbers of earlier predictions" in labelled.output


def make_adapter(folder: Path) -> Path:
    """Write a checkpoint with a LoRA adapter whose update changes the answers a little."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoProcessor

    torch.manual_seed(0)
    targets = r".*language_model.*\.(q_proj|v_proj)"
    settings = LoraConfig(r=4, lora_alpha=4, target_modules=targets, init_lora_weights=False)
    adapted = get_peft_model(load_model(MODEL, dtype="float32"), settings)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            weight.data.mul_(0.5)
    adapted.save_pretrained(folder)
    AutoProcessor.from_pretrained(MODEL).save_pretrained(folder)
    (folder / "coordexp.json").write_bytes((MODEL / "coordexp.json").read_bytes())
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(MODEL)}))
    return folder


def documented(language: str) -> list[str]:
    """Return the blocks of docs/detector.md after its title "Serve a model"."""
    _, _, section = PAGE.partition("## Serve a model")
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class ServedModel:
    """A folder in which the commands of the page were run, and the address of the server."""

    folder: Path
    url: str
    predict: str  # the last command of the page
    server: Started

    @property
    def model(self) -> Path:
        return self.folder / "merged"

    def wait(self) -> None:
        """Wait until the server answers."""
        while not is_healthy(self.url):
            assert self.server.process.poll() is None and self.server.seconds < START_S, self.server.shown[-3000:]
            time.sleep(0.5)


@pytest.fixture(scope="module")
def served(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    """Merge an adapter and serve the result, with the commands of docs/detector.md, in float32 on a free port. The
    community build of vLLM for CPUs has no working `vllm` command, so its module is run. A test waits for the
    server itself, because another engine may start at the same time."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "photos").symlink_to(photos)
    make_adapter(folder / "runs/lora/checkpoint-200")
    (block,) = documented("bash")
    merge, serve, predict = block.strip().splitlines()
    done = zygote.run(["-m", *shlex.split(merge)], cwd=folder)
    assert done.returncode == 0, done.stderr
    # Published checkpoints recommend sampling and penalties here, which vLLM applies to requests that say nothing.
    recommended = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.5}
    file = folder / "merged/generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | recommended))
    (port,) = free_ports(1)
    command, name, *options = shlex.split(serve.replace("8000", str(port)).removeprefix("vllm "))
    assert (command, name) == ("serve", "merged")
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "merged"), *options]
    words += ["--served-model-name", "merged", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"]
    url = f"http://127.0.0.1:{port}"
    variables = {"VLLM_API_KEY": KEY, "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with started(words, **variables) as run:
        yield ServedModel(folder, url, predict.replace("http://127.0.0.1:8000", url), run)
        run.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):  # it is killed then
            run.wait(60)


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.engine
def test_transformers_an_engine_and_a_server_find_the_same_objects(served, photos):
    files = images_of(photos)
    options: dict[str, Any] = {"max_new_tokens": 200, "batch": 4}
    expected = Detector(served.model, **options)(files)
    assert sum(map(len, expected)) >= 8
    base = Detector(MODEL, **options)(files)
    assert [found.text for found in base] != [found.text for found in expected], "the adapter changes nothing"

    with Detector(served.model, backend="vllm", **options) as local:
        engine = local(files)
    served.wait()
    remote = Detector(served.model, server=served.url, api_key=KEY, **options)
    assert KEY not in repr(vars(remote))
    with Image.open(files[0]) as image:
        answered = remote([image, *files[1:]])
    for other in (engine, answered):
        assert [found.text for found in other] == [found.text for found in expected]
        assert [(found.finish_reason, found.width, found.height) for found in other] == [
            (found.finish_reason, found.width, found.height) for found in expected
        ]
        for mine, theirs in zip(expected, other, strict=True):
            assert rounded(theirs) == [(item.name, item.box, item.score) for item in mine]


@pytest.mark.engine
def test_the_documented_commands_detect_through_the_server(served):
    served.wait()
    environment = os.environ | {"COORDEXP_API_KEY": KEY}
    done = zygote.run(["-m", *shlex.split(served.predict)], cwd=served.folder, env=environment)
    assert done.returncode == 0, done.stderr
    assert "objects in 8 images: preds.json" in done.stdout and KEY not in done.stdout + done.stderr
    (example,) = [text for text in documented("python") if "server=" in text]
    example = example.replace('"http://127.0.0.1:8000"', f'"{served.url}", api_key="{KEY}"')
    shown = zygote.run(["-c", example], cwd=served.folder, check=True).stdout
    answers = [json.loads(line) for line in (served.folder / "preds.answers.jsonl").read_text().splitlines()]
    (kitchen,) = [answer for answer in answers if answer["image"] == "photos/kitchen.jpg"]
    assert [line.split(" (")[0] for line in shown.splitlines()] == [item["desc"] for item in kitchen["objects"]]
    assert shown and (served.folder / "page.html").is_file()


@pytest.mark.engine
def test_the_server_samples_as_the_engine_would_and_refuses_a_wrong_key_and_another_tokenizer(
    served, photos, tmp_path
):
    served.wait()
    words = ["predict", "--model", served.model, "--images", photos / "0.png", "--server", served.url]
    words += ["--out", tmp_path / "preds.json", "--max-new-tokens", 200, "--samples", 2, "--temperature", 2]
    environment = {"COORDEXP_API_KEY": KEY}
    for name in ("a", "b"):
        words[words.index("--out") + 1] = tmp_path / f"{name}.json"
        run(*words, env=environment)
    first, second = ((tmp_path / f"{name}.samples.jsonl").read_text() for name in ("a", "b"))
    assert first == second and len({json.loads(line)["text"] for line in first.splitlines()}) == 2

    with pytest.raises(EngineError, match="refuses this key"):
        Detector(served.model, server=served.url, api_key="wrong")
    other = tmp_path / "other"  # a checkpoint whose processor makes other image tokens
    other.mkdir()
    for file in served.model.iterdir():
        if file.name != "processor_config.json":
            (other / file.name).symlink_to(file)
    config = json.loads((served.model / "processor_config.json").read_text())
    config["image_processor"]["size"]["longest_edge"] = 1024
    (other / "processor_config.json").write_text(json.dumps(config))
    message = r"0\.png: the engine's prompt .* is not the one that is trained on"
    with Detector(other, server=served.url, api_key=KEY) as detector, pytest.raises(DataError, match=message):
        detector(photos / "0.png")


@pytest.mark.engine
def test_other_clients_get_the_text_with_its_coordinates(served, photos):
    """The request that docs/detector.md shows, sent without our client."""
    served.wait()
    content = base64.b64encode((photos / "kitchen.jpg").read_bytes()).decode()
    shown = re.search(r'^    (\{"messages".*?1024\})$', PAGE, re.MULTILINE | re.DOTALL)
    assert shown is not None
    response = httpx.post(
        f"{served.url}/v1/chat/completions",
        json=json.loads(shown[1].replace("base64,...", f"base64,{content}")),
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=100,
        trust_env=False,
    )
    expected = Detector(served.model, max_new_tokens=200)(photos / "kitchen.jpg").text
    assert response.json()["choices"][0]["message"]["content"] == expected
    assert "<|coord_" in expected
