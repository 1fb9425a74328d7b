"""Which requests are accepted, and which images they may name."""

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from coordexp.servers.answering import AllowedImages, sampling_fields, split_request
from coordexp.servers.protocol import NEUTRAL, InferRequest, Refusal, RequestConfig


def encoded(kind: str, size: tuple[int, int] = (5, 4)) -> str:
    data = io.BytesIO()
    Image.new("RGB", size, "red").save(data, kind)
    return base64.b64encode(data.getvalue()).decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for name in ("in/a.png", "out.png"):
        Image.new("RGB", (5, 4)).save(tmp_path / name)
    (tmp_path / "in/link.png").symlink_to(tmp_path / "out.png")
    return tmp_path


@pytest.mark.scenario("R40.C2", on="pure")
@pytest.mark.parametrize("kind", ["png", "jpeg"])  # a JPEG in base64 begins with a slash, like a path
@pytest.mark.parametrize("before", ["", "data:image/x;base64,"])
def test_an_image_may_be_sent_as_base64(kind, before):
    assert AllowedImages(()).open(before + encoded(kind)).decode().size == (5, 4)


@pytest.mark.scenario("R40.C2", on="pure")
def test_an_image_may_be_below_an_allowed_folder_and_nowhere_else(folder):
    allowed = AllowedImages(((folder / "in").resolve(),))
    assert allowed.open(str(folder / "in/a.png")).decode().size == (5, 4)
    for name in ("out.png", "in/../out.png", "in/link.png", "in/../../../../etc/passwd", "nothing.png"):
        with pytest.raises(Refusal, match="only reads images below"):
            allowed.open(str(folder / name))
    with pytest.raises(Refusal, match="not a readable image"):
        allowed.open(str(folder / "in/nothing.png"))
    with pytest.raises(Refusal) as error:
        allowed.open("/" + "a/" * 10**5 + "b.png")
    assert len(error.value.problem) < 1000, "a refusal quotes the beginning of a path"


@pytest.mark.parametrize(
    "source",
    [
        *("/proc/self/environ", "/proc/self/fd/1", "/proc/self/root/etc/passwd", "//etc/passwd", "/dev/zero"),
        *("~/x.png", "./x.png", "..", "." * 5000, "a/" * 2000 + "x.png", "\udcff.png", "\\\\host\\x.png"),
    ],
)
def test_no_path_leads_out_of_the_allowed_folders(folder, source):
    with pytest.raises(Refusal):
        AllowedImages(((folder / "in").resolve(),)).open(source)


@pytest.mark.scenario("R40.C2", on="pure")
@pytest.mark.parametrize("source", ["http://127.0.0.1/a.png", "https://x/a", "file:///etc/passwd", "ftp://x/y"])
def test_an_image_url_is_not_read_unless_it_is_allowed(source):
    """A deviation (D34): the specification allows all URLs."""
    with pytest.raises(Refusal) as error:
        AllowedImages((Path("/"),)).open(source)
    assert error.value.status == 400 and error.value.fix


@pytest.mark.parametrize("source", ["", "AAAA", "%%%%", "data:image/png;base64,", "data:image/png;base64,!"])
def test_a_source_that_is_not_an_image_is_refused_with_a_reason(source):
    with pytest.raises(Refusal) as error:
        AllowedImages(()).open(source)
    assert error.value.status == 400 and len(error.value.problem) < 200


def request(content: object, images: list[str], **more: object) -> InferRequest:
    return InferRequest.model_validate(
        {"messages": [{"role": "user", "content": content}], "images": images, **more}
    )


def test_a_tag_in_the_text_or_a_part_of_the_content_stands_for_an_image():
    conversation = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    assert split_request(request("<image>What?", ["a.png"])) == (conversation, ["a.png"])
    inline = [{"type": "image", "image": "b.png"}, {"type": "text", "text": "What?"}]
    assert split_request(request(inline, [])) == (conversation, ["b.png"])
    assert split_request(request("Hello", [])) == (
        [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        [],
    )


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (("<image>", []), "name 1 images, and 0 came along"),
        (("text", ["a.png"]), "name 0 images, and 1 came along"),
        (("<image><image>", ["a.png", "b.png"]), "at most one is served"),
        (([{"type": "video", "video": "x"}], []), "neither text nor image"),
    ],
)
def test_images_and_their_tags_must_agree(message, problem):
    with pytest.raises(Refusal, match=problem):
        split_request(request(*message))


NOT_SERVED = {"audios": ["x"], "videos": ["x"], "tools": ["x"], "objects": {"ref": ["x"]}, "add_eos": "auto"}


@pytest.mark.parametrize("name", NOT_SERVED)
def test_fields_that_are_not_served_are_refused_and_not_ignored(name):
    with pytest.raises(Refusal, match=name):
        split_request(request("<image>", ["a.png"], **{name: NOT_SERVED[name]}))


def test_a_sampling_field_that_is_not_set_is_the_models_own():
    defaults = {"temperature": 0.7, "top_p": 0.8, "max_tokens": 3}
    assert sampling_fields(RequestConfig(), defaults) == {"temperature": 0.7, "top_p": 0.8}
    assert sampling_fields(RequestConfig(temperature=0.0, top_k=5), defaults) == {
        "temperature": 0.0,
        "top_p": 0.8,
        "top_k": 5,
    }


@pytest.mark.parametrize("name", ["\0.png", "a\ud800.png", "loop/x.png"])
def test_a_source_that_is_not_a_path_is_refused_with_a_reason(folder, name):
    (folder / "loop").symlink_to(folder / "loop")
    with pytest.raises(Refusal) as error:
        AllowedImages((folder.resolve(),)).open(f"{folder}/{name}")
    assert error.value.status == 400


def test_an_image_that_is_broken_or_too_large_or_of_another_size_is_refused(folder, monkeypatch):
    allowed = AllowedImages((folder.resolve(),))
    whole = (folder / "in/a.png").read_bytes()
    (folder / "broken.png").write_bytes(whole[:40] + b"x" * 20)
    with pytest.raises(Refusal, match="not a readable image"):
        allowed.open(str(folder / "broken.png"))
    assert allowed.open(str(folder / "in/a.png"), (5, 4)).decode().size == (5, 4)
    with pytest.raises(Refusal, match="5 x 4, but its record says 4 x 5"):
        allowed.open(str(folder / "in/a.png"), (4, 5))
    monkeypatch.setattr("coordexp.data.images.MOST_PIXELS", 19)
    with pytest.raises(Refusal, match="more than 19 pixels"):
        allowed.open(str(folder / "in/a.png"))


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_sampling_that_is_not_served_is_refused_and_its_neutral_value_is_not(name):
    for neutral in (None, NEUTRAL[name]):
        RequestConfig.model_validate({name: neutral})
    with pytest.raises(ValueError, match="not served here"):
        RequestConfig.model_validate({name: 4})


def test_numbers_that_no_engine_takes_are_refused():
    for values in ({"seed": 2**70}, {"max_tokens": 2**40}, {"n": 65}):
        with pytest.raises(ValueError, match="less than"):
            RequestConfig.model_validate(values)
    for name in ("temperature", "top_p", "repetition_penalty"):
        for value in (float("nan"), float("inf"), -float("inf")):
            with pytest.raises(ValueError, match="finite number"):
                RequestConfig.model_validate({name: value})


def test_text_must_be_text():
    with pytest.raises(Refusal, match="neither text nor image"):
        split_request(request([{"type": "text", "text": 5}], []))
