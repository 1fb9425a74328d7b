"""Images that are given to a detector, before a model is asked about them."""

import io

import numpy as np
import pytest
from PIL import Image

from coordexp.data.stores import PREFIXES, RefusedAddress
from coordexp.detect.detector import _open
from coordexp.errors import DataError, UserError


def test_a_pillow_image_whose_file_is_cut_off_is_a_data_error():
    file = io.BytesIO()
    Image.effect_noise((200, 200), 90).convert("RGB").save(file, "JPEG")
    with pytest.raises(DataError, match="image 3"):
        _open(Image.open(io.BytesIO(file.getvalue()[:4000])), 3)


@pytest.mark.parametrize("view", [slice(None), slice(None, None, -1)], ids=["rgb", "from-bgr"])
def test_an_array_is_the_image_with_its_pixels(view):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    image = _open(pixels[..., view], 1)
    assert image.size == (60, 40)
    assert np.array_equal(np.asarray(image.pixels), pixels[..., view])


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((40, 60), np.uint8),
        np.zeros((40, 60, 4), np.uint8),
        np.zeros((3, 40, 60), np.uint8),
        np.zeros((1, 40, 60, 3), np.uint8),
        np.zeros((0, 60, 3), np.uint8),
        np.zeros((40, 60, 3), np.float32),
    ],
)
def test_an_array_that_is_not_rgb_is_refused(array):
    with pytest.raises(UserError, match="image 2") as raised:
        _open(array, 2)
    assert raised.value.fix


@pytest.mark.parametrize("url", ["https://example.org/a.png", "http://example.org/a.png", "s3://bucket/a.png"])
def test_a_url_is_not_read_unless_it_is_allowed(url):
    with pytest.raises(RefusedAddress, match=PREFIXES):
        _open(url, 1)
