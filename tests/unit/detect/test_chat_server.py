"""The client of a chat server: what it sends, what it accepts, and how it explains everything else. The server is
a fake one here; `tests/integration/test_detector.py` asks a real one."""

import base64
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coordexp.answers.table import VocabularyTable
from coordexp.config.rollout import RepeatTerminate
from coordexp.detect import chat_server
from coordexp.detect.chat_server import ChatServerBackend, to_data_url
from coordexp.errors import DataError, EngineError
from coordexp.rollout.backend import Decode, ImageRef, Request
from coordexp.rollout.prompt import PromptBuilder, load_processor
from tests.unit.detect.fake_chat_server import MODELS, FakeChatServer, FakeResponse, run_fake_chat_server

MODEL = Path("examples/scenes-cpu/model")
TEXT = (
    '{"object_1": {"desc": "red circle", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}}'
)
KEY = "a-secret-key"


@pytest.fixture(scope="module")
def table() -> VocabularyTable:
    return VocabularyTable.from_folder(MODEL)


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder(load_processor(MODEL), "Detect all objects.")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeChatServer]:
    monkeypatch.setattr(chat_server, "PAUSES", (0.01, 0.01))
    with run_fake_chat_server() as fake:
        yield fake


@pytest.fixture
def image(tmp_path: Path) -> ImageRef:
    Image.new("RGB", (64, 48), "teal").save(tmp_path / "a.png")
    return ImageRef(str(tmp_path / "a.png"), 64, 48)


def make_answer(prompts: PromptBuilder, table: VocabularyTable, question: str | None = None) -> dict[str, Any]:
    ids = [*table.encode(TEXT.encode()), table.end_of_turn]
    choice = {
        "finish_reason": "stop",
        "token_ids": ids,
        "logprobs": {"content": [{"token": "?", "logprob": -0.01 * k} for k in range(len(ids))]},
    }
    return {"choices": [choice], "prompt_token_ids": prompts.ids(64, 48, question=question)}


def test_an_answer_is_made_of_token_ids_and_their_log_probabilities(server, prompts, table, image):
    server.answers = [FakeResponse(make_answer(prompts, table, "Where are cups?"))]
    backend = ChatServerBackend(server.url, prompts, table, api_key=KEY)
    (rollout,) = backend.generate([Request(image, Decode(100), question="Where are cups?")])
    backend.close()
    assert (rollout.text, rollout.finish_reason) == (TEXT, "stop")
    assert len(rollout.ids) == len(rollout.logprobs) and rollout.logprobs[3] == -0.03
    (_, headers, body) = server.calls[-1]
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert body["messages"][0]["content"][1] == {"type": "text", "text": "Where are cups?"}
    # What a generation_config.json of the checkpoint would change is part of the request.
    sent = {name: body[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    assert sent == {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert body["return_token_ids"] and body["logprobs"] and body["max_completion_tokens"] == 100


def test_answers_are_in_the_order_of_the_requests_and_the_limit_of_the_server_is_kept(
    server, prompts, table, image
):
    answers = {name: make_answer(prompts, table, name) for name in ("a", "b", "c", "d")}
    server.answers = [FakeResponse(answers["a"])]
    backend = ChatServerBackend(server.url, prompts, table, batch=1)
    server.answers = [FakeResponse(answer) for answer in answers.values()]
    requests = [Request(image, Decode(5000), question=name) for name in answers]
    rollouts = backend.generate(requests)
    assert [rollout.prompt_ids for rollout in rollouts] == [
        tuple(prompts.ids(64, 48, question=name)) for name in answers
    ]
    assert {len(prompts.ids(64, 48, question="a")) + body["max_completion_tokens"] for body in server.bodies} == {
        1024
    }


def test_a_sampled_answer_has_a_seed_and_a_stop_bias_becomes_a_bias_on_tokens(server, prompts, table, image):
    server.answers = [FakeResponse(make_answer(prompts, table))]
    backend = ChatServerBackend(server.url, prompts, table)
    sampling = Decode(10, mode="sampling", temperature=0.7, top_p=0.9)
    backend.generate([Request(image, sampling, seed=77)])
    (body,) = server.bodies
    assert (body["seed"], body["temperature"], body["top_p"]) == (77, 0.7, 0.9)
    with pytest.raises(EngineError, match="end of an answer"):
        backend.generate([Request(image, Decode(10, stop_bias=1.0))])
    with pytest.raises(ValueError, match="guard"):
        backend.generate([Request(image, Decode(10, guard=RepeatTerminate(enabled=True)))])


def test_another_prompt_than_that_of_training_is_refused(server, prompts, table, image):
    answer = make_answer(prompts, table)
    answer["prompt_token_ids"].insert(3, 0)
    server.answers = [FakeResponse(answer)]
    with pytest.raises(DataError, match=r"a\.png"):
        ChatServerBackend(server.url, prompts, table).generate([Request(image, Decode(10))])


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (FakeResponse({"error": {"message": "no such model"}}, 400), r"\(400\): no such model"),
        (FakeResponse({"error": {"message": "wrong"}}, 401), r"\(401\)"),
        (FakeResponse({}, 307, {"Location": "http://127.0.0.1:1/"}), r"\(307\)"),
        (FakeResponse({}, 404), "/v1/chat/completions"),
        (FakeResponse(b"not \x1b[31mJSON", 500), r"\(500\): not \?\[31mJSON"),
        (FakeResponse(b"not JSON"), "tokens"),
        (FakeResponse({"choices": [{"finish_reason": "stop", "message": {"content": TEXT}}]}), "token_ids"),
        (FakeResponse({"error": {"message": "still loading"}}, 503), r"\(503\): still loading"),
    ],
)
def test_a_response_that_is_no_answer_is_explained_without_the_key(
    server, prompts, table, image, response, message
):
    server.answers = [response]
    backend = ChatServerBackend(server.url, prompts, table, api_key=KEY)
    with pytest.raises(EngineError, match=message) as error:
        backend.generate([Request(image, Decode(10))])
    assert KEY not in f"{error.value!r} {error.value} {error.value.__cause__!r}"
    assert len(server.bodies) == (3 if response.status == 503 else 1)


def test_a_busy_server_is_asked_again(server, prompts, table, image):
    server.answers = [FakeResponse({}, 503), FakeResponse({}, 429), FakeResponse(make_answer(prompts, table))]
    (rollout,) = ChatServerBackend(server.url, prompts, table).generate([Request(image, Decode(10))])
    assert rollout.text == TEXT


def test_an_answer_that_takes_too_long_is_given_up(server, prompts, table, image):
    never = threading.Event()
    server.answers = [FakeResponse({}, wait=never)]
    backend = ChatServerBackend(server.url, prompts, table, answer_s=0.2)
    with pytest.raises(EngineError, match="ReadTimeout"):
        backend.generate([Request(image, Decode(10))])
    never.set()


def test_a_server_that_is_not_there_is_named_with_the_command_that_starts_one(prompts, table, monkeypatch):
    monkeypatch.setattr(chat_server, "PAUSES", ())
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9") as error:
        ChatServerBackend("http://127.0.0.1:9", prompts, table)
    assert "vllm serve" in error.value.fix


def test_of_several_models_the_user_chooses_one(server, prompts, table):
    server.models = FakeResponse({"data": [*MODELS["data"], {"id": "other"}]})
    assert ChatServerBackend(server.url, prompts, table, served_model="other").served.id == "other"
    with pytest.raises(EngineError, match="scenes, other"):
        ChatServerBackend(server.url, prompts, table)
    with pytest.raises(EngineError, match="mine"):
        ChatServerBackend(server.url, prompts, table, served_model="mine")


def test_an_image_that_is_too_long_for_the_server_is_refused_before_it_is_sent(server, prompts, table, image):
    server.models = FakeResponse({"data": [{"id": "scenes", "max_model_len": 16}]})
    backend = ChatServerBackend(server.url, prompts, table)
    with pytest.raises(DataError, match="16 tokens"):
        backend.generate([Request(image, Decode(10))])
    assert server.bodies == []


def read_back(url: str) -> tuple[str, Image.Image]:
    kind, _, content = url.partition(";base64,")
    return kind, Image.open(io.BytesIO(base64.b64decode(content)))


def test_a_plain_jpeg_is_sent_as_it_is_and_a_rotated_one_upright(tmp_path):
    photo = Image.linear_gradient("L").resize((40, 20)).convert("RGB")
    photo.save(tmp_path / "plain.jpg")
    exif = photo.getexif()
    exif[0x0112] = 6
    photo.save(tmp_path / "turned.jpg", exif=exif)
    kind, plain = read_back(to_data_url(ImageRef(str(tmp_path / "plain.jpg"), 40, 20)))
    assert (kind, plain.format) == ("data:image/jpeg", "JPEG")
    kind, turned = read_back(to_data_url(ImageRef(str(tmp_path / "turned.jpg"), 20, 40)))
    assert (kind, turned.size) == ("data:image/png", (20, 40))
    with Image.open(tmp_path / "turned.jpg") as stored:
        assert turned.tobytes() == stored.convert("RGB").transpose(Image.Transpose.ROTATE_270).tobytes()
    kind, own = read_back(to_data_url(ImageRef("image 1", 40, 20, photo)))
    assert (kind, own.tobytes()) == ("data:image/png", photo.tobytes())
