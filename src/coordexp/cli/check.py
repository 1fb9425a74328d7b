"""`coordexp check`: check a config, and show the settings that it results in."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from coordexp.cli.console import out, print_violations
from coordexp.config import ConfigError, Loaded, World, format_path, load_settings
from coordexp.config.capacity import describe_evaluation
from coordexp.config.paths import Key
from coordexp.config.settings import Settings
from coordexp.files import advise_missing_path

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="The YAML file.", show_default=False)]


def check(
    config: ConfigOption,
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1, envvar="WORLD_SIZE", help="Learner processes of the run, for the rules that depend on them."
        ),
    ] = None,
    server_world_sizes: Annotated[
        str | None,
        typer.Option(help="Devices of each rollout server, e.g. 1,1,2, to check that all requests fit."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Also show untouched training arguments.")] = False,
) -> None:
    """Load a config. Print all its problems, or the resolved settings and where each of them comes from.

    Exits 0 if the config is valid and 2 if it is not.
    """
    world = World(world_size, _sizes(server_world_sizes))
    try:
        loaded = load_settings(config, world)
    except ConfigError as error:  # the result of this command, on standard output
        if as_json:
            typer.echo(json.dumps(_error_object(error), indent=2))
        else:
            print_violations(error, out)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(_valid_object(loaded), indent=2))
    else:
        unchecked = (
            "" if world_size else " (rules about the number of learners not checked; --world-size N checks them)"
        )
        _print_settings(loaded, show_all, unchecked)


def _sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of numbers above 0 such as 1,1,2")
    return tuple(int(part) for part in parts)


def _error_object(error: ConfigError) -> dict[str, Any]:
    return {
        "ok": False,
        "violations": [
            {"path": format_path(v.path), "problem": v.problem, "fix": v.fix, "origin": v.origin}
            for v in error.violations
        ],
    }


def _valid_object(loaded: Loaded) -> dict[str, Any]:
    origins = {
        format_path(path): loaded.origins.get(format_path(path), "default") for path, _ in _values(loaded.settings)
    }
    return {
        "ok": True,
        "settings": loaded.settings.model_dump(mode="json"),
        "origins": origins,
        "notes": list(loaded.notes),
        "files": list(loaded.files),
    }


def _print_settings(loaded: Loaded, show_all: bool, unchecked: str) -> None:
    shown, hidden = [], 0
    for path, value in _values(loaded.settings):
        origin = loaded.origins.get(format_path(path), "default")
        if path[0] == "training" and origin == "default" and not show_all:
            hidden += 1
        else:
            shown.append((path, value, origin))
    previous: tuple[Key, ...] = ()
    for path, value, origin in shown:
        _print_headings(path, previous)
        previous = path
        indent = "  " * (len(path) - 1)
        label = f"{indent}{_label(path[-1])}: {value}"
        out.print(Text(f"{label:<58}  ").append(origin, style="dim" if origin == "default" else "cyan"))
    if hidden:
        out.print(Text(f"({hidden} more training arguments are at their defaults; --all shows them)", style="dim"))
    missing = [
        f"{setting}: {name} does not exist here; {advise_missing_path(setting, name)}"
        for setting, name in missing_files(loaded.settings)
    ]
    for note in (*loaded.notes, *missing):
        out.print(Text(f"note: {note}", style="yellow"))
    if cost := describe_evaluation(loaded.settings, _records(loaded.settings.custom.val_jsonl)):
        out.print(cost, markup=False)
    out.print(Text(f"{loaded.files[-1]}: sound", style="bold green").append(unchecked, style="dim"))


def _records(file: str | None) -> int | None:
    """Return the number of records in a file, or None if there is no such file here."""
    if file is None or not Path(file).is_file():
        return None
    with Path(file).open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def missing_files(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the settings with a path that does not exist here, and the path. `coordexp check` does not treat this
    as an error: the run may be meant for another machine."""
    paths = {
        "model.path": settings.model.path,
        "custom.train_jsonl": settings.custom.train_jsonl,
        "custom.val_jsonl": settings.custom.val_jsonl,
    }
    for setting, name in paths.items():
        if name is not None and not Path(name).exists():
            yield setting, name


def _print_headings(path: tuple[Key, ...], previous: tuple[Key, ...]) -> None:
    """Print the names of the sections that begin between the previous value and this one."""
    for depth in range(len(path) - 1):
        if path[: depth + 1] != previous[: depth + 1]:
            out.print(Text("  " * depth + _label(path[depth]), style="bold"))


def _label(key: Key) -> str:
    return f"[{key}]" if isinstance(key, int) else key


def _values(settings: Settings) -> Iterator[tuple[tuple[Key, ...], str]]:
    yield from _walk((), settings.model_dump(mode="json"))


def _walk(path: tuple[Key, ...], value: Any) -> Iterator[tuple[tuple[Key, ...], str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _walk((*path, key), item)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _walk((*path, index), item)
    else:
        yield path, json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
