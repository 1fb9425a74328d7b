"""Images that are given to a detector, before a model is asked about them."""

import io

import pytest
from PIL import Image

from coordexp.detect.detector import _open
from coordexp.errors import DataError


def test_a_pillow_image_whose_file_is_cut_off_is_a_data_error():
    file = io.BytesIO()
    Image.effect_noise((200, 200), 90).convert("RGB").save(file, "JPEG")
    with pytest.raises(DataError, match="image 3: not a readable image: image file is truncated"):
        _open(Image.open(io.BytesIO(file.getvalue()[:4000])), 3)
