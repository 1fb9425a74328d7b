"""Pictures with the detected objects drawn over the image. Needs Pillow."""

import colorsys
import math
from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont

from coordexp.detect.detections import DetectedObject, Detections

LEAST_SIDE = 512  # pixels of the longer side of a picture; a smaller image is enlarged, so that names can be read
DARK = (16, 18, 21)


def draw_detections(image: Image.Image, detections: Detections) -> Image.Image:
    """Return a copy of the image with every object outlined, and its name and score. `image` is upright and has
    the size of the detections. A small image is enlarged by a whole factor."""
    factor = max(1, math.ceil(LEAST_SIDE / max(image.size)))
    picture = image.convert("RGB").resize(
        (image.width * factor, image.height * factor), Image.Resampling.NEAREST if factor > 1 else None
    )
    unit = max(2, round(max(picture.size) / 400))
    draw, colours = ImageDraw.Draw(picture), _choose_colours(detections)
    for item in detections:
        _draw_outline(draw, item, factor, unit, colours[item.name])
    for item in detections:  # above all outlines
        _draw_name(draw, item, factor, unit, colours[item.name])
    return picture


def _draw_outline(
    draw: ImageDraw.ImageDraw, item: DetectedObject, factor: int, unit: int, colour: tuple[int, int, int]
) -> None:
    """Draw an outline with a dark border, so that it is visible on any ground."""
    left, top, right, bottom = item.box
    points = item.polygon or ((left, top), (right, top), (right, bottom), (left, bottom))
    ring = [(x * factor, y * factor) for x, y in (*points, points[0], points[1])]
    draw.line(ring, fill=DARK, width=2 * unit, joint="curve")
    draw.line(ring, fill=colour, width=round(1.4 * unit), joint="curve")


def _draw_name(
    draw: ImageDraw.ImageDraw, item: DetectedObject, factor: int, unit: int, colour: tuple[int, int, int]
) -> None:
    """Write the name and the score above the object, or inside it at the upper edge of the image."""
    width, height = draw.im.size
    font, text = _load_font(7 * unit), f"{item.name} {item.score:.2f}"
    _, _, text_width, text_height = draw.textbbox((0, 0), text, font=font)
    text_width, text_height = text_width + 2 * unit, text_height + 2 * unit
    x = max(0.0, min(item.box[0] * factor, width - text_width))
    top = item.box[1] * factor
    y = top - text_height if top >= text_height else min(top, height - text_height)
    draw.rectangle((x, y, x + text_width, y + text_height), fill=DARK)
    draw.rectangle((x, y, x + unit / 2, y + text_height), fill=colour)
    draw.text((x + 1.5 * unit, y + unit / 2), text, fill="white", font=font)


@lru_cache(16)
def _load_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Pillow's own font, which has the Latin letters."""
    return ImageFont.load_default(size)


def _choose_colours(detections: Detections) -> dict[str, tuple[int, int, int]]:
    """Return a colour for each name. The same names have the same colours in all pictures."""
    names = {item.name for item in detections}
    return {name: _to_colour(sum(map(ord, name)) * 0.381966 % 1) for name in names}


def _to_colour(hue: float) -> tuple[int, int, int]:
    red, green, blue = colorsys.hls_to_rgb(hue, 0.6, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)
