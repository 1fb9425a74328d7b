"""What a request may be, and which pictures it may have read."""

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from coordexp.serve.refusal import Refusal
from coordexp.serve.requests import NEUTRAL, InferRequest, Pictures, RequestConfig, parts, sampling_fields


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
@pytest.mark.parametrize("kind", ["png", "jpeg"])  # that of a JPEG begins with a slash, as a path does
@pytest.mark.parametrize("before", ["", "data:image/x;base64,"])
def test_a_picture_may_come_along_as_base64(kind, before):
    assert Pictures(()).look(before + encoded(kind)).decode().size == (5, 4)


@pytest.mark.scenario("R40.C2", on="pure")
def test_a_picture_may_lie_below_an_allowed_folder_and_nowhere_else(folder):
    pictures = Pictures(((folder / "in").resolve(),))
    assert pictures.look(str(folder / "in/a.png")).decode().size == (5, 4)
    for name in ("out.png", "in/../out.png", "in/link.png", "in/../../../../etc/passwd", "nothing.png"):
        with pytest.raises(Refusal, match="reads pictures below"):
            pictures.look(str(folder / name))
    with pytest.raises(Refusal, match="not a readable picture"):
        pictures.look(str(folder / "in/nothing.png"))


@pytest.mark.scenario("R40.C2", on="pure")
@pytest.mark.parametrize("source", ["http://127.0.0.1/a.png", "https://x/a", "file:///etc/passwd", "ftp://x/y"])
def test_an_image_url_is_refused_with_what_to_send_instead(source):
    """A deviation (D34): the specification allows URLs."""
    with pytest.raises(Refusal, match="not fetched") as error:
        Pictures((Path("/"),)).look(source)
    assert error.value.fix == "send a path, or base64"


@pytest.mark.parametrize("source", ["", "AAAA", "%%%%", "data:image/png;base64,", "data:image/png;base64,!"])
def test_what_is_no_picture_is_refused_with_words(source):
    with pytest.raises(Refusal) as error:
        Pictures(()).look(source)
    assert error.value.status == 400 and len(error.value.message) < 200


def request(content: object, images: list[str], **more: object) -> InferRequest:
    return InferRequest.model_validate(
        {"messages": [{"role": "user", "content": content}], "images": images, **more}
    )


def test_a_tag_in_the_text_and_a_part_of_the_content_stand_for_a_picture():
    wanted = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    assert parts(request("<image>What?", ["a.png"])) == (wanted, ["a.png"])
    inline = [{"type": "image", "image": "b.png"}, {"type": "text", "text": "What?"}]
    assert parts(request(inline, [])) == (wanted, ["b.png"])
    assert parts(request("Hello", [])) == ([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], [])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("<image>", []), "name 1 pictures, and 0 came along"),
        (("text", ["a.png"]), "name 0 pictures, and 1 came along"),
        (("<image><image>", ["a.png", "b.png"]), "one is served"),
        (([{"type": "video", "video": "x"}], []), "neither text nor image"),
    ],
)
def test_pictures_and_their_places_must_agree(given, told):
    with pytest.raises(Refusal, match=told):
        parts(request(*given))


NOT_SERVED = {"audios": ["x"], "videos": ["x"], "tools": ["x"], "objects": {"ref": ["x"]}, "add_eos": "auto"}


@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_is_not_served_is_refused_and_not_left_out(name):
    with pytest.raises(Refusal, match=name):
        parts(request("<image>", ["a.png"], **{name: NOT_SERVED[name]}))


def test_a_sampling_field_that_is_not_set_is_the_models_own():
    own = {"temperature": 0.7, "top_p": 0.8, "max_tokens": 3}
    assert sampling_fields(RequestConfig(), own) == {"temperature": 0.7, "top_p": 0.8}
    assert sampling_fields(RequestConfig(temperature=0.0, top_k=5), own) == {
        "temperature": 0.0,
        "top_p": 0.8,
        "top_k": 5,
    }


@pytest.mark.parametrize("name", ["\0.png", "a\ud800.png", "loop/x.png"])
def test_what_is_no_path_is_refused_with_words(folder, name):
    (folder / "loop").symlink_to(folder / "loop")
    with pytest.raises(Refusal) as error:
        Pictures((folder.resolve(),)).look(f"{folder}/{name}")
    assert error.value.status == 400


def test_a_picture_that_is_broken_or_too_large_or_of_another_size_is_refused(folder, monkeypatch):
    pictures = Pictures((folder.resolve(),))
    whole = (folder / "in/a.png").read_bytes()
    (folder / "broken.png").write_bytes(whole[:40] + b"x" * 20)
    with pytest.raises(Refusal, match="not a readable picture"):
        pictures.look(str(folder / "broken.png"))
    assert pictures.look(str(folder / "in/a.png"), (5, 4)).decode().size == (5, 4)
    with pytest.raises(Refusal, match="5 x 4, and its record says 4 x 5"):
        pictures.look(str(folder / "in/a.png"), (4, 5))
    monkeypatch.setattr("coordexp.data.images.MOST_PIXELS", 19)
    with pytest.raises(Refusal, match="more than 19 pixels"):
        pictures.look(str(folder / "in/a.png"))


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_sampling_that_is_not_served_is_refused_and_its_neutral_value_is_not(name):
    for neutral in (None, NEUTRAL[name]):
        RequestConfig.model_validate({name: neutral})
    with pytest.raises(ValueError, match="not served here"):
        RequestConfig.model_validate({name: 4})


def test_numbers_that_no_engine_takes_are_refused():
    for given in ({"seed": 2**70}, {"max_tokens": 2**40}, {"n": 65}):
        with pytest.raises(ValueError, match="less than"):
            RequestConfig.model_validate(given)


def test_text_must_be_text():
    with pytest.raises(Refusal, match="neither text nor image"):
        parts(request([{"type": "text", "text": 5}], []))
