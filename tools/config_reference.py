"""The page docs/reference/config.md, from the classes of the settings. `python tools/reference.py` writes it."""

import ast
import json
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from coordexp.config import schema
from coordexp.config.rollout import ServerEndpoint
from coordexp.config.schema import Node
from coordexp.config.settings import CurriculumStage, EvaluationData, TrainingData
from coordexp.config.training import PACKING_KEYS, REFUSED, TRANSFORMERS_VERSION, UNUSED
from coordexp.config.yaml_tree import KeyPath

OWN = ("output_dir", *PACKING_KEYS)  # the keys of `training` that are coordexp's

HEADER = """\
A config is a YAML file. `extends` names one or more files, relative to the config, whose values it starts from.
Later files win, mappings are merged, lists are replaced as a whole. Environment variables are not interpolated.
Scalars follow YAML 1.2 (`1e-5` is a number, `no` is text). Unknown keys, keys that are written twice and values of
the wrong type are errors; those of renamed keys say what to write. Paths are relative to the folder that a command
is run in. `coordexp check --config FILE --all` shows every value and where it came from. An editor completes and
checks a config that begins with `# yaml-language-server: $schema=FILE`, where FILE was written by
`coordexp check --schema > FILE`.
The brackets after a key have its values and its default. `null`: the key is not set. `true` or `false` alone:
the key takes both.
"""

TRANSFORMERS = "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments"
_PIPELINE = "- `pipeline` (`null`): The lists `objective` and `diagnostics` of [modules](#pipeline-modules)."
_SHORTER = {
    "an integer": "integer",
    "a number": "number",
    "number >= 0 and <= 1": "0 to 1",
    "a list of": "list of",
    "a mapping": "mapping",
    "one of ": "",
    " or null": "",
}

MODULES = """## Pipeline modules

`rollout_matching.pipeline` and `stage1.pipeline` have the lists `objective` and `diagnostics`. Each entry must
have `name`, `enabled`, `weight`, `channels` and `config`, and each `config` must have every key of its module.
None of them has a default, and weights are numbers >= 0.
"""


def render_config() -> Iterator[str]:
    """Yield the parts of the page."""
    yield HEADER
    yield from (*_sections(), *_entries(), MODULES, *_modules(), *_refusal_table())


def _sections() -> Iterator[str]:
    """Yield a table for each section, in the order of the classes, and the arguments of transformers in a list."""
    rows: dict[KeyPath, list[str]] = {(): []}
    mirrored: list[str] = []
    ours = {*OWN, *_own_meanings()}
    for path, node in schema.leaves():
        row = _row(str(path[-1]), node)
        if path[-1] in ("objective", "diagnostics"):
            if path[-1] == "objective":
                rows.setdefault(path[:-2], []).append(_PIPELINE)
        elif path[0] == "training" and path[-1] not in ours:
            mirrored.append(f"{path[-1]}: {_default(node).strip('`')}".replace(" ", "\0"))
        else:
            rows.setdefault(path[:-1], []).append(row)
    for path in rows:
        yield f"\n## `{'.'.join(map(str, path))}`\n" if path else "\n## Top level\n"
        section = schema.node_at(path, None)
        if path and section and "description" in section:
            yield section["description"] + "\n"
        if path == ("training",):
            yield f"Below the list are those that mean what [transformers {TRANSFORMERS_VERSION}]({TRANSFORMERS})"
            yield "says; [some are refused](#refused).\n"
        yield from rows[path]
        if path == ("training",):
            arguments = textwrap.fill(", ".join(mirrored), 110).replace("\0", " ")
            yield f"\nArguments of transformers, with their defaults:\n\n```text\n{arguments}\n```"
    yield ""


def _own_meanings() -> set[str]:
    """Return the arguments of transformers whose meaning is our own."""
    for node in ast.parse(Path(__file__).with_name("mirror_training_arguments.py").read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "OWN" and node.value:
            return {name for name, changed in ast.literal_eval(node.value).items() if "help" in changed}
    raise LookupError("mirror_training_arguments.py has no OWN")


def _row(key: str, node: Node) -> str:
    kind = schema.describe(node)
    for long, short in _SHORTER.items():
        kind = kind.replace(long, short)
    facts = _default(node) if isinstance(node.get("default"), bool) else f"{kind}; {_default(node)}"
    return f"- `{key}` ({facts}): {schema.resolve(node).get('description', '')}"


def _default(node: Node) -> str:
    value = node.get("default")
    default = json.dumps(value) if not isinstance(value, str) else value or '""'
    return f"`{default}`" if "default" in node else "required"


def _entries() -> Iterator[str]:
    """Yield a table for the entries of each list that has sections as entries, besides those of pipelines."""
    for path, entry in (
        ("custom.train_data", TrainingData),
        ("custom.eval_data", EvaluationData),
        ("custom.curriculum", CurriculumStage),
        ("rollout_matching.vllm.server.servers", ServerEndpoint),
    ):
        yield f"## Each entry of `{path}`\n"
        yield from (_row(key, node) for key, node in schema.root()["$defs"][entry.__name__]["properties"].items())
        yield ""


def _modules() -> Iterator[str]:
    entry = schema.root()["$defs"]["Pipeline"]["properties"]["objective"]["items"]
    modules = [schema.resolve(option)["properties"] for option in entry["oneOf"]]
    yield "### Every entry\n"
    yield from (_module_row(key, modules[0][key]) for key in ("enabled", "weight", "channels"))
    for module in modules:
        yield f"\n### `{module['name']['const']}`\n\n{module['name']['description']}\n"
        keys = schema.resolve(module["config"])["properties"]
        yield from (_module_row(key, node) for key, node in keys.items())
    yield ""


def _module_row(key: str, node: Node) -> str:
    """Return the row of a key of a module. All of them are required, and most are weights."""
    return _row(key, node).replace("; required)", ")").replace(" (number >= 0)", "")


def _refusal_table() -> Iterator[str]:
    yield "## Refused\n\nEvery other argument of `transformers.TrainingArguments` is an error in `training`. Most"
    yield f"of them {UNUSED[0].replace('has', 'have', 1)}. The others have reasons of their own:\n"
    others = defaultdict(list)  # arguments with the same reason stand on one line
    for name, (reason, _) in REFUSED.items():
        if reason != UNUSED[0]:
            others[reason].append(f"`{name}`")
    yield from (f"- {', '.join(group)} {reason}" for reason, group in others.items())
    yield ""
