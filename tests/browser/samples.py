"""Invented indexes and samples for the inspector's page, without a run or a model.

`Book` collects samples and renders the page. An answer is written piece by piece in the project's format, so that
tokens, roles, owners and breaks agree with the objects.
"""

import base64
import functools
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from coordexp.pages.rollouts import render_inspector

COORD0 = 151700
END = "<|im_end|>"
PREFIX, COORD, STRUCTURE, DESC, ADDED, END_OF_TURN, CUT, MASKED = range(1, 9)
_PIECES = re.compile(r"<\|coord_\d+\|>|<\|im_end\|>| ?\w+|\s+|[^\w\s]", re.DOTALL)


@dataclass(frozen=True)
class TrueShape:
    desc: str
    bins: Sequence[int]

    @property
    def kind(self) -> str:
        return "bbox_2d" if len(self.bins) == 4 else "poly"


@dataclass(frozen=True)
class Predicted:
    """`of` is the matched true object. An object with a `reason` is invalid; with `cut`, it is also cut off."""

    desc: str | None
    bins: Sequence[int]
    of: int | None = None
    iou: float | None = None
    reason: str | None = None
    words: str | None = None
    cut: bool = False


class Vocabulary:
    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self._id(piece) for piece in _PIECES.findall(text)]

    def pieces(self) -> dict[str, str]:
        return {str(number): piece for piece, number in self.ids.items()}

    def _id(self, piece: str) -> int:
        coord = re.fullmatch(r"<\|coord_(\d+)\|>", piece)
        return COORD0 + int(coord[1]) if coord else self.ids.setdefault(piece, len(self.ids))


@dataclass
class Strip:
    vocabulary: Vocabulary
    ids: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    target: list[float | None] = field(default_factory=list)
    breaks: list[int] = field(default_factory=list)

    def write(
        self, text: str, role: int, owner: int = -1, coord_role: int = 0, targets: Sequence[float] = ()
    ) -> None:
        remaining = iter(targets)
        for number in self.vocabulary.encode(text):
            coord = COORD0 <= number < COORD0 + 1000
            self.ids.append(number)
            self.roles.append(coord_role if coord and coord_role else role)
            self.owner.append(owner)
            self.target.append(next(remaining, None) if coord else None)

    def entry(self, key: str, desc: str | None, bins: Sequence[int], owner: int, **roles: Any) -> None:
        """`roles`: role, desc_role, coord_role and targets."""
        role, desc_role = roles["role"], roles["desc_role"]
        self.breaks.append(len(self.ids))
        self.write(f'"{key}": {{"desc": "', role, owner)
        self.write(desc or "", desc_role, owner)
        kind = "poly" if len(bins) > 4 else "bbox_2d"
        self.write(f'", "{kind}": [', role, owner)
        coords = ", ".join(f"<|coord_{bin}|>" for bin in bins)
        self.write(coords, role, owner, roles.get("coord_role", 0), roles.get("targets", ()))
        self.write("]}", role, owner)


@functools.cache
def peaked(center: float, width: float) -> list[list[int]]:
    """Return a distribution as runs of the bins that have at least 5/10000."""
    weights = [math.exp(-0.5 * ((bin - center) / width) ** 2) for bin in range(1000)]
    total = sum(weights)
    shares = [round(10000 * weight / total) for weight in weights]
    kept = [bin for bin in range(1000) if shares[bin] >= 5]
    return [[kept[0], *(shares[bin] for bin in range(kept[0], kept[-1] + 1))]] if kept else []


class Book:
    def __init__(self, run: str = "runs/demo") -> None:
        self.vocabulary = Vocabulary()
        self.run = run
        self.entries: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.images: dict[str, str] = {}
        self.more: dict[str, Any] = {}  # replaces entries of the index

    def add(
        self,
        name: str,
        truth: Sequence[TrueShape],
        predicted: Sequence[Predicted],
        *,
        loss: float | None = 1.0,
        width: float = 6.0,
        masked_desc: bool = False,
        truncated: bool = False,
        **entry: Any,
    ) -> dict[str, Any]:
        """Add a sample with the name `step.micro.record`. `width` is that of the model's distributions."""
        step, _, record = map(int, name.split("."))
        strip = self._strip(truth, predicted, masked_desc)
        missed = [j for j in range(len(truth)) if j not in {obj.of for obj in predicted}]
        extra = sum(obj.of is None and obj.reason is None for obj in predicted)
        objects = [self._object(k, obj) for k, obj in enumerate(predicted)]
        sample = {
            "id": name,
            "width": 640,
            "height": 480,
            "facts": [["weights", f"after {step} updates"], ["decoding", "greedy, at most 400 tokens"]],
            "notes": [],
            "truth": [self._true(j, true, predicted) for j, true in enumerate(truth)],
            "objects": objects,
            "agreed": [],
            "rebuilt": None,
            "choice": None,
            "match": self._match(truth, predicted),
            "prompt_tokens": 87,
            "tokens": {key: getattr(strip, key) for key in ("ids", "roles", "owner", "target", "breaks")},
            "unlikely": {},
            "trained": None if loss is None else self._trained(strip, step + 1, loss, width),
        }
        self.samples.append(sample)
        self.entries.append(
            {
                "id": name,
                "step": step + 1,
                "record": record,
                "image": f"images/train/{record:07d}.png",
                "picture": f"picture-{record}" if f"picture-{record}" in self.images else None,
                "remark": None if f"picture-{record}" in self.images else "image not shown: No such file",
                "true": len(truth),
                "matched": len(truth) - len(missed),
                "renamed": sum(obj.of is not None and obj.desc != truth[obj.of].desc for obj in predicted),
                "missed": len(missed),
                "extra": extra,
                "invalid": sum(obj.reason is not None for obj in predicted),
                "tokens": len(strip.ids),
                "truncated": truncated,
                "fallback": False,
                "finish": "length" if truncated else "stop",
                "loss": loss,
                "followed": True,
                **entry,
            }
        )
        return sample

    def add_image(self, record: int, truth: Sequence[TrueShape], colours: Sequence[str]) -> None:
        self.images[f"picture-{record}"] = drawing(truth, colours)

    def index(self, **more: Any) -> dict[str, Any]:
        return {
            "run": self.run,
            "total": len(self.samples),
            "live": False,
            "stamp": "",
            "target": {"sigma": 8.0, "truncate": None, "temperature": 1.0},
            "pieces": self.vocabulary.pieces(),
            "coord0": COORD0,
            "samples": self.entries,
            **self.more,
            **more,
        }

    def html(self, *, live: bool = False, **more: Any) -> str:
        return render_inspector(self.index(**more), self.samples, self.images, live=live)

    def save(self, path: Path) -> Path:
        path.write_text(self.html(), encoding="utf-8")
        return path

    def _strip(self, truth: Sequence[TrueShape], predicted: Sequence[Predicted], masked_desc: bool) -> Strip:
        strip = Strip(self.vocabulary)
        strip.write("{", PREFIX)
        kept = [obj for obj in predicted if not obj.cut]
        for k, obj in enumerate(predicted):
            role = CUT if obj.cut else PREFIX
            if k:
                strip.write(", ", role)
            targets = truth[obj.of].bins if obj.of is not None else ()
            trained = {"coord_role": COORD, "targets": targets} if targets else {}
            strip.entry(f"object_{k + 1}", obj.desc, obj.bins, k, role=role, desc_role=role, **trained)
        missed = [j for j in range(len(truth)) if j not in {obj.of for obj in predicted}]
        for rank, j in enumerate(missed):
            if kept or rank:
                strip.write(", ", STRUCTURE)
            true, desc = truth[j], MASKED if masked_desc else DESC
            roles = {"role": STRUCTURE, "desc_role": desc, "coord_role": ADDED, "targets": true.bins}
            strip.entry(f"object_{len(predicted) + rank + 1}", true.desc, true.bins, -2 - j, **roles)
        strip.write("}", STRUCTURE)
        strip.write(END, END_OF_TURN)
        return strip

    def _object(self, k: int, obj: Predicted) -> dict[str, Any]:
        valid = obj.reason is None
        return {
            "key": f"object_{k + 1}",
            "desc": obj.desc,
            "kind": ("poly" if len(obj.bins) > 4 else "bbox_2d") if valid else None,
            "bins": list(obj.bins) if valid else None,
            "of": obj.of,
            "iou": obj.iou,
            "reason": obj.reason,
            "words": obj.words,
            "number": None,
            "change": None,
            "agreed": False,
        }

    def _true(self, j: int, true: TrueShape, predicted: Sequence[Predicted]) -> dict[str, Any]:
        by = next((k for k, other in enumerate(predicted) if other.of == j), None)
        return {"desc": true.desc, "kind": true.kind, "bins": list(true.bins), "by": by, "number": None}

    def _match(self, truth: Sequence[TrueShape], predicted: Sequence[Predicted]) -> dict[str, Any]:
        rows = [k for k, obj in enumerate(predicted) if obj.reason is None]
        iou: list[list[float | None]] = []
        for k in rows:
            near = [(k * 7 + j * 3) % 10 < 3 for j in range(len(truth))]
            row: list[float | None] = [0.05 + 0.02 * ((k + j) % 5) if near[j] else None for j in range(len(truth))]
            of = predicted[k].of
            if of is not None:
                row[of] = predicted[k].iou
            iou.append(row)
        return {"rows": rows, "iou": iou, "gate": 0.3, "top_k": 8, "rejections": 2}

    def _trained(self, strip: Strip, step: int, loss: float, width: float) -> dict[str, Any]:
        supervised = [i for i, role in enumerate(strip.roles) if 2 <= role <= 6]
        coords = [i for i in supervised if strip.target[i] is not None]
        written = {i: strip.ids[i] - COORD0 for i in coords}
        return {
            "step": step,
            "loss": loss,
            "terms": {"coord_reg/soft_ce": 0.7 * loss, "token_ce/desc_ce": 0.2 * loss, "coord_reg/w1": 0.1 * loss},
            "nll": {str(i): self._nll(strip, i, loss) for i in supervised},
            "mass": {str(i): 0.998 for i in coords},
            "bins": {str(i): peaked(written[i], width) for i in coords},
        }

    def _nll(self, strip: Strip, i: int, loss: float) -> float:
        """Return a loss: coordinates and words are hard, structure is easy."""
        return round(
            (0.002 if strip.roles[i] in (STRUCTURE, END_OF_TURN) else loss) * (0.2 + i * 37 % 100 / 60), 4
        )


def drawing(truth: Sequence[TrueShape], colours: Sequence[str], size: tuple[int, int] = (320, 240)) -> str:
    """Return an image with each true object as a shape in its colour."""
    image = Image.new("RGB", size, "#d9d4c7")
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, size[1] * 0.62, *size), fill="#b9a98c")
    for k, true in enumerate(truth):
        numbers = [bin / 999 * size[i % 2] for i, bin in enumerate(true.bins)]
        draw_as = draw.ellipse if true.kind == "bbox_2d" else draw.polygon
        draw_as(numbers, fill=colours[k % len(colours)])
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
