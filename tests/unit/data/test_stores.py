"""Images in stores: what is read, what is refused, and what a store that fails changes. The store is a real HTTP
server on this machine."""

import errno
import io
import json
import socket
import threading
import time
from pathlib import Path

import pytest

from coordexp.data import RecordFile, parse_any_record, stores
from coordexp.data.addresses import ImageError, parse_address
from coordexp.data.doctor import examine
from coordexp.data.doctor.clean import clean
from coordexp.data.images import read_image_bytes, read_image_facts
from coordexp.data.stores import RefusedAddress, check_allowed, hide_secrets, read_ahead
from coordexp.errors import DataError, StoreError, UserError
from coordexp.pages.cards import try_thumbnail
from coordexp.rollout.backend import Decode, ImageRef, Request
from coordexp.rollout.prompt import load_image, open_image
from coordexp.servers.answering import AllowedImages
from coordexp.servers.asking import infer_payload
from coordexp.servers.protocol import Refusal
from tests.command import run
from tests.http_store import http_store
from tests.unit.data.addressed import pack_tar, pack_tsv, rewrite
from tests.unit.data.planted import HEIGHT, WIDTH, write_clean

SIZE = (WIDTH, HEIGHT)
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def planted(tmp_path):
    """Forty records with images in files."""
    (tmp_path / "data").mkdir()
    return write_clean(tmp_path / "data").write()


@pytest.fixture
def store(planted, tmp_path, monkeypatch):
    """A store that has the images, and from which images may be read. The cache is empty."""
    monkeypatch.setenv(stores.CACHE, str(tmp_path / "cache"))
    stores._start_anew()
    with http_store(planted.parent) as store:
        monkeypatch.setenv(stores.PREFIXES, f"s3://elsewhere {store.url}/")
        yield store
        for client in stores._reader._clients.values():
            client.close()


def in_store(file: Path, store, change=lambda name: name) -> Path:
    """Write the records of a file with URLs of their images."""
    return rewrite(file, "stored.jsonl", lambda name: f"{store.url}/{change(name)}")


@pytest.mark.parametrize("pack", [None, pack_tar, pack_tsv])
def test_an_object_or_a_part_of_one_is_the_image_that_was_put_there(planted, store, pack):
    names = pack(planted) if pack else {f"images/{k}.png": f"images/{k}.png" for k in range(40)}
    records, stored = RecordFile(planted), RecordFile(in_store(planted, store, names.__getitem__))
    for k in range(0, 40, 13):
        url, path = (file.image_address(file[k]) for file in (stored, records))
        assert url.startswith(f"{store.url}/") and read_image_facts(url, decode=True) == read_image_facts(path)
        assert open_image(url, SIZE).tobytes() == open_image(path, SIZE).tobytes()
        assert try_thumbnail(url) == try_thumbnail(path)
    assert len(store.requests) == 4, "an image is read once, and then from the cache"
    assert examine(stored.path, look=read_image_facts).findings == examine(planted, look=read_image_facts).findings


def fail_for(count):
    """Return a fault of the first requests, of three kinds by turns."""
    return lambda path, number: (503, "cut", 429)[number % 3] if number <= count else None


def test_a_store_that_fails_for_a_while_is_waited_for(planted, store, monkeypatch):
    monkeypatch.setattr(stores, "PAUSE_S", 0.01)
    file, store.fault = in_store(planted, store), fail_for(30)
    assert examine(file, look=read_image_facts).findings == examine(planted, look=read_image_facts).findings
    assert len(store.requests) == 70


def test_a_store_that_refuses_connections_for_a_while_is_waited_for(planted, store):
    store.close()
    threading.Timer(1.0, store.open).start()
    url, began = f"{store.url}/images/3.png", time.monotonic()
    assert open_image(url, SIZE).size == SIZE
    assert time.monotonic() - began > 0.9


@pytest.mark.parametrize("fault", ["refused", 503, "cut", 403, "hangs"])
def test_no_image_is_called_broken_because_of_its_store(planted, store, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(stores, "DEADLINE_S", 0.5)
    file, url = in_store(planted, store), f"{store.url}/images/3.png"
    if fault == "refused":
        store.close()
    elif fault == "hangs":
        monkeypatch.setattr(stores, "ATTEMPT_S", 0.2)
        store.delay = 30.0
    else:
        store.fault = lambda path, number: fault
    request = Request(ImageRef(url, *SIZE), Decode(4))
    calls = [
        lambda: examine(file, look=read_image_facts),
        lambda: clean(file, tmp_path / "clean.jsonl", look=read_image_facts),
        lambda: load_image(request.image),
        lambda: try_thumbnail(url),
        lambda: infer_payload([request], "Which?"),
    ]
    for call in calls:
        with pytest.raises(StoreError) as error:
            call()
        assert url.rpartition("/")[0] in error.value.problem and error.value.fix
    assert not (tmp_path / "clean.jsonl").exists()
    result = run("data", "doctor", file, code=1)
    assert "the store" in result.output and "unreadable" not in result.output


def test_an_object_that_is_missing_or_ends_early_is_a_broken_image(planted, store):
    url, size = f"{store.url}/images/3.png", (planted.parent / "images/3.png").stat().st_size
    with pytest.raises(FileNotFoundError):
        read_image_facts(f"{store.url}/images/nothing.png")
    for part in (f"0:{size + 1}", f"{size}:5", f"{10**15}:{10**15}", "5:20", "0:0"):
        with pytest.raises(ImageError):
            read_image_facts(f"{url}#bytes={part}")
    file = in_store(planted, store, lambda name: name.replace("/1", "/gone"))
    findings = {finding.subject: finding.count for finding in examine(file, look=read_image_facts).findings}
    assert findings["image-missing"] == 11 and "image-unreadable" not in findings


def test_a_store_without_ranges_is_named_and_its_answer_is_not_taken_for_the_part(planted, store):
    store.has_ranges = False
    with pytest.raises(StoreError, match="ranges"):
        read_image_bytes(f"{store.url}/images/3.png#bytes=0:100")


def test_an_object_that_is_too_large_is_not_read_to_its_end(planted, store, monkeypatch):
    monkeypatch.setattr(stores, "LARGEST", 100)
    with pytest.raises(ImageError):
        read_image_bytes(f"{store.url}/images/3.png")


REFUSED = [
    *(
        "file:///etc/passwd",
        "ftp://host/a.png",
        "data://a",
        "gopher://x/",
        "local://etc/passwd",
        "simplecache://x/y",
    ),
    *(
        "s3://key:hidden@bucket/a.png",
        "https://user:hidden@host/a.png",
        "https://host@evil/a.png",
        "http://@host/a",
    ),
    *("https://host/a.png?token=hidden", "https://host/a.png#hidden", "s3://b/a.png?versionId=hidden#bytes=1:2"),
    *(
        "s3://bucket/a/../secret.png",
        "https://host/%2e%2e/a",
        "https://host/a/..%2Fb",
        "https://host/%252e%252e/a",
    ),
    *(
        "https://host/a\\b",
        "https://host/a b",
        "https://host/a\nb",
        "https://ho\tst/a",
        "https:///a",
        "s3://b/./a",
    ),
    *("https://host:x/a", "https://ho%73t/a", "https://[::1/a", "https://h\u00f6st/a", "https://host/a\u2028b"),
]


@pytest.mark.parametrize("url", REFUSED)
def test_a_url_that_is_no_object_of_a_store_is_refused_and_nothing_of_it_is_shown(url, store, tmp_path):
    line = json.dumps({"image": url, "width": 8, "height": 8, "space": "pixel", "objects": []})
    for call in (lambda: parse_any_record(line), lambda: read_image_facts(url)):
        with pytest.raises((ValueError, ImageError)) as error:
            call()
        assert "hidden" not in str(error.value) and "hidden" not in repr(error.value)
    with pytest.raises(Refusal) as refusal:
        AllowedImages((tmp_path,)).open(url)
    assert refusal.value.status == 400 and "hidden" not in str(refusal.value)
    (tmp_path / "hostile.jsonl").write_text(f"{line}\n")
    result = run("data", "doctor", "--json", tmp_path / "hostile.jsonl", code=1)
    assert "broken-line" in result.output and "hidden" not in result.output
    assert store.requests == []


@pytest.mark.parametrize(
    ("prefix", "inside", "outside"),
    [
        (
            "s3://bucket",
            ["s3://bucket/a.png", "S3://BUCKET/a"],
            ["s3://bucket-2/a", "s3://bucket.e/a", "gs://bucket/a"],
        ),
        (
            "https://host/a",
            ["https://host/a", "https://HOST/a/b.png#bytes=1:2"],
            ["https://host/ab", "https://host/"],
        ),
        ("https://host/", ["https://host/a"], ["http://host/a", "https://host:444/a", "https://host.evil/a"]),
        ("http://10.0.0.1:9000/", ["http://10.0.0.1:9000/a"], ["http://10.0.0.1/a", "http://10.0.0.1:90000/a"]),
        ("", [], ["s3://bucket/a", "https://host/a"]),
    ],
)
def test_only_urls_below_an_allowed_prefix_are_read(prefix, inside, outside, monkeypatch):
    monkeypatch.setenv(stores.PREFIXES, prefix)
    for url in inside:
        check_allowed(parse_address(url).location)
    for url in outside:
        with pytest.raises(RefusedAddress, match=stores.PREFIXES) as error:
            read_image_facts(url)
        assert not isinstance(error.value, OSError | ValueError), "it would be taken for a broken image"


@pytest.mark.parametrize(
    "prefix", ["https://", "/data", "s3://user:hidden@bucket/", "file:///", "https://host/?a"]
)
def test_a_prefix_that_allows_too_much_is_refused(prefix, monkeypatch):
    monkeypatch.setenv(stores.PREFIXES, prefix)
    with pytest.raises(UserError, match=stores.PREFIXES) as error:
        check_allowed("https://host/a")
    assert "hidden" not in str(error.value)


def test_a_redirect_leads_only_below_allowed_prefixes_and_its_signature_is_not_shown(planted, store, monkeypatch):
    content = (planted.parent / "images/3.png").read_bytes()
    store.redirects = {"/a": "/images/3.png?signature=hidden", "/b": "/a", "/loop": "/loop"}
    assert read_image_bytes(f"{store.url}/b") == content
    with http_store(planted.parent) as other:
        elsewhere = (
            f"{other.url}/images/3.png?hidden",
            "file:///etc/passwd",
            "http://u:hidden@x/",
            "//[::1]/a.png",
        )
        for target in elsewhere:
            store.redirects = {"/away": target}
            with pytest.raises(RefusedAddress) as error:
                read_image_bytes(f"{store.url}/away")
            assert "hidden" not in str(error.value)
            with pytest.raises(Refusal) as refusal:
                AllowedImages(()).open(f"{store.url}/away")
            assert refusal.value.status == 400 and "hidden" not in str(refusal.value)
        assert other.requests == []
    monkeypatch.setattr(stores, "DEADLINE_S", 0.1)
    store.redirects = {"/loop": "/loop"}
    with pytest.raises(StoreError, match="redirects"):
        read_image_bytes(f"{store.url}/loop")


@pytest.mark.parametrize("name", ["images.example", "2130706433", "localhost.example"])
def test_a_name_that_leads_to_this_machine_gets_no_request(name, store, monkeypatch):
    """A name may lead to one address when it is looked at, and to another one when it is used."""
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **named: resolve("127.0.0.1", *more, **named))
    monkeypatch.setenv(stores.PREFIXES, f"http://{name}:{store.port}/")
    with pytest.raises(RefusedAddress, match=r"127\.0\.0\.1"):
        read_image_bytes(f"http://{name}:{store.port}/images/3.png")
    assert store.requests == []
    monkeypatch.setenv(stores.PREFIXES, f"http://localhost:{store.port}/")
    assert read_image_bytes(f"http://localhost:{store.port}/images/3.png")


def test_secrets_in_messages_of_libraries_are_left_out():
    text = hide_secrets("403, url='https://me:hidden@host/a.png?X-Amz-Signature=hidden&b=hidden', s3://b/k@1")
    assert text == "403, url='https://...@host/a.png?...', s3://b/k@1"


@pytest.mark.scenario("R40.C3", on="pure")
def test_a_rollout_server_reads_urls_below_allowed_prefixes_and_no_others(planted, store, monkeypatch):
    image = AllowedImages(()).open(f"{store.url}/images/3.png", SIZE)
    assert image.decode().tobytes() == open_image(str(planted.parent / "images/3.png"), SIZE).tobytes()
    tar = pack_tar(planted)["images/4.png"]
    assert AllowedImages(()).open(f"{store.url}/{tar}", SIZE).decode().size == SIZE
    for url in (
        f"{store.url}/nothing.png",
        f"{store.url}/train.jsonl",
        "s3://bucket/a.png",
        "http://[::1]:1/a.png",
    ):
        with pytest.raises(Refusal) as refusal:
            AllowedImages((planted.parent,)).open(url)
        assert refusal.value.status == 400
    count = len(store.requests)
    monkeypatch.delenv(stores.PREFIXES)
    with pytest.raises(Refusal, match="from no store"):
        AllowedImages((planted.parent,)).open(f"{store.url}/images/3.png")
    assert len(store.requests) == count


def test_a_server_gets_the_bytes_of_an_object_because_it_may_not_read_the_store(planted, store, monkeypatch):
    payload = infer_payload([Request(ImageRef(f"{store.url}/images/3.png", *SIZE), Decode(4))], "Which?")
    monkeypatch.delenv(stores.PREFIXES)
    image = AllowedImages(()).open(payload["infer_requests"][0]["images"][0], SIZE)
    assert image.decode().tobytes() == open_image(str(planted.parent / "images/3.png"), SIZE).tobytes()


def test_images_are_read_ahead_side_by_side_and_each_once(planted, store):
    store.delay = 0.2
    urls = [f"{store.url}/images/{k}.png" for k in range(40)]
    began = time.monotonic()
    read_ahead([*urls, "a.png", "s3://not-allowed/a.png", "file:///etc/passwd", f"{store.url}/nothing.png"])
    assert time.monotonic() - began < 15 * store.delay  # it does not wait: one after the other, they take 40
    for url in urls:
        assert open_image(url, SIZE).size == SIZE
    assert time.monotonic() - began < 30 * store.delay
    assert len(store.requests) == 41
    with pytest.raises(FileNotFoundError):
        read_image_facts(f"{store.url}/nothing.png")


def test_the_doctor_reads_ahead_in_several_processes_after_a_read_in_the_first_one(planted, store):
    """Clients and threads do not survive a fork."""
    store.delay = 0.1
    file = in_store(planted, store)
    read_ahead([f"{store.url}/images/0.png"])
    assert read_image_bytes(f"{store.url}/images/1.png")
    began = time.monotonic()
    report = examine(file, look=read_image_facts, processes=2, part=file.stat().st_size // 4)
    assert report.findings == examine(planted, look=read_image_facts).findings
    assert time.monotonic() - began < 30 * store.delay
    assert len(store.requests) == 40


def test_a_cache_that_cannot_be_written_costs_only_time(planted, store, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(stores.CACHE, str(tmp_path / "file/cache"))
    url = f"{store.url}/images/3.png"
    for _ in range(2):
        read_ahead([url])
        assert open_image(url, SIZE).size == SIZE


class FakeS3:
    """The `cat_file` of a file system of fsspec, which raises what s3fs raises."""

    def __init__(self, answer):
        self.answer, self.calls = answer, 0

    def cat_file(self, path, version_id=None, start=None, end=None):
        self.calls += 1
        answer = self.answer(self.calls) if callable(self.answer) else self.answer
        if isinstance(answer, Exception):
            raise answer
        return answer[start:end]


class NoCredentialsError(Exception):
    """As that of botocore."""


@pytest.fixture
def fake_s3(monkeypatch, tmp_path):
    def begin(answer):
        monkeypatch.setenv(stores.CACHE, str(tmp_path / "cache"))
        monkeypatch.setenv(stores.PREFIXES, "s3://bucket/")
        monkeypatch.setattr(stores, "need_packages", lambda *names, **more: None)
        monkeypatch.setattr(stores, "DEADLINE_S", 0.3)
        fake = FakeS3(answer)
        monkeypatch.setattr("fsspec.filesystem", lambda scheme, **options: fake)
        stores._start_anew()
        return fake

    return begin


def test_objects_are_read_through_fsspec_by_ranges(fake_s3):
    fake = fake_s3(b"0123456789")
    assert read_image_bytes("s3://bucket/k") == b"0123456789"
    assert read_image_bytes("s3://bucket/k#bytes=2:3") == b"234"
    assert read_image_bytes("s3://bucket/k#bytes=2:3") == b"234" and fake.calls == 2
    with pytest.raises(ImageError):
        read_image_bytes("s3://bucket/k#bytes=8:3")


@pytest.mark.parametrize(
    ("answer", "kind", "calls"),
    [
        (FileNotFoundError("The specified key does not exist."), FileNotFoundError, 1),
        (FileNotFoundError("The specified bucket does not exist"), StoreError, 1),
        (PermissionError("Access Denied https://b/?X-Amz-Signature=hidden"), StoreError, 1),
        (OSError(errno.EINVAL, "The requested range is not satisfiable"), ImageError, 1),
        (NoCredentialsError("Unable to locate credentials"), StoreError, 1),
        (ConnectionError("reset"), StoreError, None),
        (OSError(errno.EIO, "internal error"), StoreError, None),
        (RuntimeError("https://me:hidden@host"), StoreError, None),
        (lambda number: time.sleep(20), StoreError, None),
    ],
)
def test_failures_of_fsspec_are_told_apart(fake_s3, monkeypatch, answer, kind, calls):
    monkeypatch.setattr(stores, "ATTEMPT_S", 0.3)
    fake = fake_s3(answer)
    with pytest.raises(kind) as error:
        read_image_bytes("s3://bucket/key")
    assert type(error.value) is not DataError and "hidden" not in str(error.value)
    assert fake.calls == calls if calls else fake.calls >= 1


def test_without_the_package_of_a_store_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setenv(stores.PREFIXES, "gs://bucket/")
    with pytest.raises(UserError, match="gcsfs"):
        read_image_bytes("gs://bucket/a.png")
    with pytest.raises(UserError) as raised:
        stores.list_objects("gs://bucket/*.tar")
    assert raised.value.problem.endswith("needs gcsfs")


def test_an_object_is_a_file_that_is_read_in_blocks_and_breaks_no_image_when_it_changes(monkeypatch):
    content, sizes = bytes(range(256)) * 20, []

    def fake_ask(address):
        sizes.append(address.size)
        if address.offset + address.size > len(content) - 100:
            raise ImageError("it ends early")
        return content[address.offset : address.offset + address.size]

    monkeypatch.setattr(stores, "list_objects", lambda url: {url: len(content)})
    monkeypatch.setattr(stores._reader, "ask", fake_ask)
    monkeypatch.setattr(stores, "BLOCK", 1000)
    with stores.open_object("s3://bucket/a.tar") as file:
        assert file.read(2500) == content[:2500]
        file.seek(700)
        assert file.read(10) == content[700:710]
        assert file.seek(-5, io.SEEK_END) == len(content) - 5
        with pytest.raises(StoreError, match="bucket"):
            file.read(5)
    assert max(sizes) <= 1000
    monkeypatch.setattr(stores, "list_objects", lambda url: {})
    with pytest.raises(DataError):
        stores.open_object("s3://bucket/b.tar")
