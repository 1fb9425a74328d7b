"""Random rollouts, valid and broken, and a check of the properties that hold for all of them.

The property tests use them, and benchmarks/fuzz_core.py does for a longer run.
"""

import json
import random
import re
import unicodedata
from typing import Any, get_args

import numpy as np

from coordexp.answers.correct import correct
from coordexp.answers.entries import Reason
from coordexp.answers.parse import ParsedRollout, entry_spans, parse_rollout
from coordexp.answers.segment import Role, Segment, TokenKind
from coordexp.answers.table import COORD_BASE, VocabularyTable
from coordexp.answers.transport import coord_targets
from coordexp.config import RolloutMatching
from coordexp.config.rollout import CorrectionPolicy
from coordexp.data import Geometry, TrueObject, is_degenerate

SETTINGS = RolloutMatching()
PROMPT = (11, 12, 13)
DESCS = (
    "red cup",
    "dog",
    'a "quoted" b\\s',
    "猫 🙂",
    "e\u0301",
    "}}]},{",
    "object_3",
    "a\n\u0301b\tc\x00",
    "<|coord_5|> <|image_pad|>",
    "<|im_end|>",
    "x" * 40,
)
SNIPPETS = (
    *'{}[]",:\\ \n',
    *("\\u", "\\ud800", "\\ud83d\\ude42", "}}", "]},", '"]', '{"'),
    *('": {"', "true", "null", "NaN", "1e5", "-0", "01", "0" * 30, '"object_7": 3, ', '"object_007": {}, '),
    *('"object_-1": {}, ', '"object_1": {"desc": "again"}, ', "Sure! ", "```json\n", "é", "🙂", "\x00", "\x1f"),
    *("\x7f", "[" * 70 + "]" * 70, '{"a": {"b": [1, {"c": "d"}]}}', "object_", '"desc": ', '"poly": ['),
    *('"bbox_2d": [', "9" * 1500, "// c", '"object_99999999999999999": {}, ', '"object_999999999999999999": {}, '),
)


def random_shape(chooser: random.Random) -> Geometry:
    while True:
        if chooser.random() < 0.6:
            (x1, x2), (y1, y2) = (sorted(chooser.sample(range(1000), 2)) for _ in range(2))
            return Geometry("bbox_2d", (x1, y1, x2, y2))
        bins = tuple(chooser.randrange(1000) for _ in range(2 * chooser.randint(3, 7)))
        if not is_degenerate("poly", bins):
            return Geometry("poly", bins)


def random_truth(chooser: random.Random) -> list[TrueObject]:
    return [TrueObject(chooser.choice(DESCS), random_shape(chooser)) for _ in range(chooser.randint(0, 4))]


def random_rollout(chooser: random.Random, truth: list[TrueObject], table: VocabularyTable) -> list[int]:
    """Return random tokens or bytes, or a valid answer with mutations in its text and then in its tokens."""
    if chooser.random() < 0.1:
        return [chooser.randrange(len(table.pieces) + 3) for _ in range(chooser.randint(0, 30))]
    if chooser.random() < 0.1:
        return [
            table.byte_ids[chooser.choice(b'{}[]":,\\ aou_1\xc3\xa9\xff')] for _ in range(chooser.randint(0, 40))
        ]
    text = _random_answer(chooser, truth)
    for _ in range(chooser.choice((0, 0, 1, 1, 2, 3))):
        at, length = chooser.randrange(len(text) + 1), chooser.choice((0, 0, 1, 3))
        text = text[:at] + chooser.choice((*SNIPPETS, text[at : at + 20])) + text[at + length :]
    ids = table.tokenizer.encode(text, add_special_tokens=False).ids
    for _ in range(chooser.choice((0, 0, 1, 1, 2, 4))):
        ids = _mutate(chooser, ids, table)
    return ids


def check_rollout(
    ids: list[int], truth: list[TrueObject], table: VocabularyTable, order: Any = "desc_first"
) -> None:
    """Correct a rollout, and raise AssertionError if the result breaks a property."""
    correction = correct(PROMPT, ids, truth, table=table, order=order, settings=SETTINGS)
    parsed, match, segment = correction.parsed, correction.match, correction.segment
    _check_kept_ids(ids, parsed, segment, table)
    _check_strict_json(segment, table)
    _check_second_parse(parsed, [truth[j] for j in match.missed], segment, table)
    _check_supervision(parsed, segment, match.pairs, truth, table)
    _check_kinds(parsed, segment, table)


def random_policy(chooser: random.Random) -> CorrectionPolicy:
    """Return any policy but the specified one."""
    choices = {
        name: get_args(field.annotation)
        for name, field in CorrectionPolicy.model_fields.items()
        if name not in ("duplicate_iou", "closing_weight", "added_policy")
    }
    while True:
        values: dict[str, Any] = {name: chooser.choice(options) for name, options in choices.items()}
        values["closing_weight"] = chooser.choice((0.0, 0.5, 1.0))
        policy = CorrectionPolicy(**values, duplicate_iou=chooser.choice((0.05, 0.5, 1.0)))
        if not policy.is_specified:
            return policy


def check_rebuilt(
    ids: list[int],
    truth: list[TrueObject],
    policy: CorrectionPolicy,
    table: VocabularyTable,
    order: Any = "desc_first",
) -> None:
    """Correct a rollout under a policy, and raise AssertionError if the result breaks a property."""
    settings = RolloutMatching(correction=policy)
    correction = correct(PROMPT, ids, truth, table=table, order=order, settings=settings)
    segment, rebuilt, valid = correction.segment, correction.rebuilt, correction.parsed.valid
    assert rebuilt is not None
    items = rebuilt.items
    own = rebuilt.own_tokens
    assert segment.ids[len(PROMPT) : len(PROMPT) + own].tolist() == ids[:own]
    _check_strict_json(segment, table)
    again = parse_rollout(segment.ids[len(PROMPT) :].tolist(), table)
    assert not again.truncated
    assert not again.fallback
    written = [(item.key, item.desc, item.geometry, item.reason) for item in again.objects]
    assert written == [
        (f"object_{n}", unicodedata.normalize("NFC", item.desc), item.geometry, None)
        for n, item in enumerate(items, 1)
    ]
    _check_items(items, truth, policy, rebuilt, len(valid))
    for item in items:
        if item.predicted is None:
            assert TrueObject(item.desc, item.geometry) == truth[item.true]
        else:
            assert item.geometry == valid[item.predicted].geometry
            replaced = policy.supervise == "matched_with_desc" and item.true is not None
            assert item.desc == (truth[item.true].desc if replaced else valid[item.predicted].desc)
    _check_roles_of_items(segment, again, items, policy, table)


def _check_items(items: Any, truth: list[TrueObject], policy: CorrectionPolicy, rebuilt: Any, valid: int) -> None:
    """Every true object appears exactly once, every valid object is used or left out for a reason, and the order
    is that of the policy."""
    labelled = [item.true for item in items if item.true is not None]
    assert sorted(labelled) == list(range(len(truth)))
    predicted = [item.predicted for item in items if item.predicted is not None]
    assert sorted((*predicted, *rebuilt.duplicates, *rebuilt.removed_extras)) == list(range(valid))
    assert not rebuilt.duplicates or policy.duplicates != "keep"
    assert not rebuilt.removed_extras or policy.extras == "remove"
    if policy.extras == "remove":
        assert all(item.true is not None for item in items)
    if policy.insertion != "append":
        assert labelled == sorted(labelled)
    else:
        assert predicted == sorted(predicted)
        assert [item.predicted is None for item in items] == sorted(item.predicted is None for item in items)


def _check_roles_of_items(
    segment: Segment, again: ParsedRollout, items: Any, policy: CorrectionPolicy, table: VocabularyTable
) -> None:
    """Supervision is where the policy says: on each token that lies inside one object only, and on the end."""
    roles, kinds = segment.roles[len(PROMPT) :], segment.kinds[len(PROMPT) :]
    targets = segment.coord_targets[len(PROMPT) :]
    assert roles[-1] == Role.end_of_turn
    assert roles[-2] == Role.tail_structure
    weights = (segment.roles >= Role.matched_coord).astype(float)
    weights[-2] *= policy.closing_weight
    assert (segment.weights == weights).all()
    assert (~np.isnan(targets) == np.isin(roles, (Role.matched_coord, Role.tail_coord))).all()
    spans = entry_spans(segment.ids[len(PROMPT) :].tolist(), table)
    for item, entry, (start, end) in zip(items, again.objects, spans, strict=True):
        supervised = {
            TokenKind.coord: item.true is not None,
            TokenKind.structure: item.predicted is None
            or (item.true is not None and policy.supervise != "missed"),
            TokenKind.desc: item.predicted is None
            or (item.true is not None and policy.supervise == "matched_with_desc"),
        }
        for at in range(start + 1, end - 1):  # the first and the last token may also belong to a neighbour
            assert (roles[at] >= Role.matched_coord) == supervised[TokenKind(kinds[at])]
        if item.true is not None:
            expected = Role.tail_coord if item.predicted is None else Role.matched_coord
            assert {int(roles[at]) for at in entry.coord_indices} == {expected}
        if item.predicted is None:
            assert targets[list(entry.coord_indices)].tolist() == list(item.geometry.bins)
        is_box = item.geometry.kind == "bbox_2d" and item.true is not None
        sides = segment.sides[len(PROMPT) + np.array(entry.coord_indices)]
        assert sides.tolist() == ([1, 2, 3, 4] if is_box else [0] * len(sides))


def _random_answer(chooser: random.Random, truth: list[TrueObject]) -> str:
    entries = []
    for number in range(1, chooser.randint(0, 5) + 1):
        near = chooser.choice(truth).geometry if truth and chooser.random() < 0.6 else random_shape(chooser)
        mark = '"' if chooser.random() < 0.8 else ""
        coords = ", ".join(f"{mark}<|coord_{bin}|>{mark}" for bin in near.bins)
        fields = [f'"desc": {json.dumps(chooser.choice(DESCS), ensure_ascii=False)}', f'"{near.kind}": [{coords}]']
        if chooser.random() < 0.3:
            fields.reverse()
        entries.append(f'"object_{number}": {{{", ".join(fields)}}}')
    return "{" + ", ".join(entries) + "}"


def _mutate(chooser: random.Random, ids: list[int], table: VocabularyTable) -> list[int]:
    if not ids:
        return ids
    at, other = chooser.randrange(len(ids)), chooser.randrange(len(ids))
    match chooser.randrange(7):
        case 0:
            return ids[:at] + ids[at + 1 :]
        case 1:
            return [*ids[:at], ids[at], *ids[at:]]
        case 2:
            ids = list(ids)
            ids[at], ids[other] = ids[other], ids[at]
            return ids
        case 3:
            return ids[:at]
        case 4:
            return [*ids[:at], chooser.randrange(len(table.pieces) + 2), *ids[at:]]
        case 5:
            return [*ids[:at], table.first_coord + chooser.randrange(1000), *ids[at:]]
    return [*ids[:at], table.end_of_turn, *ids[at:]]


def _check_kept_ids(ids: list[int], parsed: ParsedRollout, segment: Segment, table: VocabularyTable) -> None:
    count = len(parsed.prefix_ids)
    assert list(parsed.prefix_ids) == ids[:count]
    assert segment.ids[len(PROMPT) : len(PROMPT) + count].tolist() == ids[:count]
    if not parsed.fallback:
        following = ids[count : count + 1]
        assert table.bytes_of([id for id in following if id < len(table.pieces)]).startswith(parsed.remainder)
    assert (table.bytes_of(parsed.prefix_ids) + parsed.remainder).endswith((b"{", b"}"))


def answer_text(segment: Segment, table: VocabularyTable) -> str:
    """Return the answer as JSON text, with quotes around the coordinates outside strings."""
    symbols = "".join(table.symbols[id] for id in segment.ids[len(PROMPT) : -1])
    coord = f"[{chr(COORD_BASE)}-{chr(COORD_BASE + 999)}]"

    def spell(match: "re.Match[str]") -> str:
        text = re.sub(coord, lambda c: f"<|coord_{ord(c.group()) - COORD_BASE}|>", match.group())
        return text if text.startswith('"') else f'"{text}"'

    return re.sub(rf'"(?:[^"\\]|\\.)*"|{coord}', spell, symbols, flags=re.DOTALL).encode("latin-1").decode()


def _check_strict_json(segment: Segment, table: VocabularyTable) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    value = json.loads(answer_text(segment, table), parse_constant=refuse)
    assert isinstance(value, dict)
    json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be encoded


def _check_second_parse(
    parsed: ParsedRollout, missed: list[TrueObject], segment: Segment, table: VocabularyTable
) -> None:
    again = parse_rollout(segment.ids[len(PROMPT) :].tolist(), table)
    assert not again.truncated
    assert not again.fallback
    cut = len(again.objects) - len(missed)
    appended = [(item.desc, item.geometry, item.reason) for item in again.objects[cut:]]
    assert appended == [(unicodedata.normalize("NFC", true.desc), true.geometry, None) for true in missed]
    lost = (Reason.truncated, Reason.syntax, Reason.placeholder)
    kept = [prediction for prediction in parsed.objects if prediction.reason not in lost]
    assert again.objects[:cut] == tuple(kept[:cut])
    assert all(not prediction.is_valid for prediction in kept[cut:])


def _check_kinds(parsed: ParsedRollout, segment: Segment, table: VocabularyTable) -> None:
    """In the tail, the desc tokens are exactly those that lie entirely inside a desc value."""
    start = len(PROMPT) + len(parsed.prefix_ids)
    pieces = [table.pieces[id] for id in segment.ids[start:-1]]
    tail = b"".join(pieces)
    spans = [match.span(1) for match in re.finditer(rb'"desc": "((?:[^"\\]|\\.)*)"', tail)]
    end = 0
    for piece, kind in zip(pieces, segment.kinds[start:-1], strict=True):
        begin, end = end, end + len(piece)
        inside = any(low <= begin and end <= high for low, high in spans)
        assert (kind == TokenKind.desc) == inside


def _check_supervision(
    parsed: ParsedRollout, segment: Segment, pairs: Any, truth: list[TrueObject], table: VocabularyTable
) -> None:
    answer = segment.ids[len(PROMPT) :]
    assert (answer == table.end_of_turn).sum() == 1
    assert (segment.roles == Role.end_of_turn).nonzero()[0].tolist() == [len(segment) - 1]
    assert (segment.roles[: len(PROMPT)] == Role.prompt).all()
    supervised = segment.weights > 0
    assert supervised[-1]
    assert not supervised[segment.roles <= Role.masked_prefix].any()
    with_target = ~np.isnan(segment.coord_targets)
    assert (with_target == np.isin(segment.roles, (Role.matched_coord, Role.tail_coord))).all()
    assert all(table.is_coord(id) for id in segment.ids[with_target])
    tail_coords = segment.roles == Role.tail_coord
    assert (segment.coord_targets[tail_coords] == segment.ids[tail_coords] - table.first_coord).all()
    valid = parsed.valid
    shapes = [(valid[i].geometry, truth[j].geometry) for i, j in pairs]
    matched = {}
    for (i, _), bins in zip(pairs, coord_targets(shapes, SETTINGS.optimal_transport), strict=True):
        matched |= zip(valid[i].coord_indices, bins, strict=True)
    assert (segment.roles == Role.matched_coord).nonzero()[0].tolist() == [
        len(PROMPT) + at for at in sorted(matched)
    ]
    targets = segment.coord_targets[segment.roles == Role.matched_coord]
    assert np.allclose(targets, [matched[at] for at in sorted(matched)], atol=1e-3)
    assert all(0 <= bin <= 999 for bin in matched.values())
    assert (segment.weights == (segment.roles >= Role.matched_coord)).all()
    _check_sides(parsed, segment, pairs, truth)


def _check_sides(parsed: ParsedRollout, segment: Segment, pairs: Any, truth: list[TrueObject]) -> None:
    """The sides mark the four coordinates of each supervised box, in order, and no coordinate of a polygon."""
    valid, matched = parsed.valid, {j for _, j in pairs}
    boxes = [list(valid[i].coord_indices) for i, _ in sorted(pairs) if valid[i].geometry.kind == "bbox_2d"]
    positions = segment.sides.nonzero()[0]
    assert segment.sides[positions].tolist() == [1, 2, 3, 4] * (len(positions) // 4)
    groups = (positions - len(PROMPT)).reshape(-1, 4).tolist()
    assert groups[: len(boxes)] == sorted(boxes)
    appended = [list(true.geometry.bins) for j, true in enumerate(truth) if j not in matched]
    tail = segment.coord_targets[positions].reshape(-1, 4)[len(boxes) :].tolist()
    assert tail == [bins for bins in appended if len(bins) == 4]
