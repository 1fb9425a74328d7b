"""What a dump says in codes, in words: why an object was not used, how an answer was made and how it ended."""

from collections.abc import Mapping
from typing import Any

from coordexp.correction import Reason

REASONS = {
    Reason.truncated: "the answer ends inside of it",
    Reason.syntax: "not JSON here: it and all that follows is cut off",
    Reason.placeholder: "holds an image or video token, which no training sequence may: cut off",
    Reason.bad_key: "its key is not object_N",
    Reason.repeated_key: "its key was written before",
    Reason.not_a_mapping: "not a mapping with desc and a geometry",
    Reason.unexpected_key: "has a field besides desc, bbox_2d and poly",
    Reason.repeated_field: "a field is written twice",
    Reason.missing_desc: "desc is absent, or not a text",
    Reason.empty_desc: "desc is empty",
    Reason.missing_geometry: "has neither bbox_2d nor poly",
    Reason.two_geometries: "has both bbox_2d and poly",
    Reason.bad_geometry: "its geometry is not a flat list of coordinates",
    Reason.wrong_count: "a box has four coordinates, a polygon an even number from six on; this has neither",
    Reason.degenerate: "inverted, or without area",
    Reason.stray_coord: "a coordinate token stands outside of the geometry",
    Reason.ambiguous: "a coordinate is spelled in ordinary tokens, so there is no one token to teach",
}
ENDED = {
    "stop": "by itself",
    "length": "at the limit of tokens",
    "repeat": "by the repeat guard: it went in circles",
}


def is_cut(whole: Mapping[str, Any]) -> bool:
    """Whether the answer came to the limit of tokens, or just stops."""
    return bool(whole["rollout"]["finish_reason"] == "length" or whole["result"]["truncated"])


def count_invalid(result: Mapping[str, Any]) -> int:
    """Return how many objects of the answer are not used: those with a reason, and those in text that is not read,
    which dumps of earlier releases do not count."""
    return sum(one["reason"] is not None for one in result["objects"]) + int(result.get("unread", 0))


def facts(whole: Mapping[str, Any]) -> list[list[str]]:
    """Rows of a name and a value: how the answer was made."""
    rollout, place = whole["rollout"], whole["place"]
    return [
        ["answered by", f"the weights after {place['step']:,} update{'' if place['step'] == 1 else 's'}"],
        ["decoding", decoding(whole["decode"])],
        ["seed", str(whole["seed"])],
        ["ended", str(ENDED.get(rollout["finish_reason"], rollout["finish_reason"]))],
        ["answer", f"{len(rollout['ids']):,} tokens, {whole['result']['prefix_tokens']:,} of them kept"],
        ["prompt", f"{whole['result']['prompt_length']:,} tokens"],
        ["place", f"record {place['record']}, micro-step {place['micro']}, rank {place['rank']}"],
    ]


def decoding(decode: Mapping[str, Any]) -> str:
    how = {
        "greedy": "greedy",
        "sampling": f"sampled at temperature {decode['temperature']:g}",
        "beam": f"best of {decode['num_beams']} beams",
    }.get(decode["mode"], str(decode["mode"]))
    if decode["mode"] == "sampling":
        how += f", top_p {decode['top_p']:g}" if decode["top_p"] < 1 else ""
        how += f", top_k {decode['top_k']}" if decode["top_k"] > 0 else ""
    return f"{how}, at most {decode['max_new_tokens']:,} tokens"


def notes(whole: Mapping[str, Any]) -> list[str]:
    """Sentences on what is out of the ordinary. Counts of missed and extra objects stand elsewhere."""
    result = whole["result"]
    cut = len(whole["rollout"]["ids"]) - result["prefix_tokens"]
    found = []
    if result["fallback"]:
        found.append("Nothing in the answer can be continued: all of it is set aside, and the target begins anew.")
    elif result["truncated"]:
        found.append("The answer stops before it is closed: what stands behind its last whole object is cut off.")
    elif any(one["reason"] in (Reason.syntax, Reason.placeholder) for one in result["objects"]):
        found.append(f"The answer cannot be read to its end: its last {cut:,} tokens are cut off.")
    invalid = count_invalid(result)
    if invalid == 1:
        found.append("One object of the answer cannot be used, and is not matched.")
    elif invalid:
        found.append(f"{invalid:,} objects of the answer cannot be used, and are not matched.")
    if unread := result.get("unread"):
        found.append(f"Objects in text that is not read, counted by their keys: {unread:,}.")
    return found
