"""`coordexp check`: check a config, and show the settings that it results in, or write the schema of configs."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from coordexp.cli.console import JsonOption, count_problems, out, print_findings, print_json
from coordexp.config import ConfigError, KeyPath, Loaded, World, format_path, load_settings
from coordexp.config.rules import trains_chat
from coordexp.config.schema import editor_schema
from coordexp.config.settings import Settings
from coordexp.errors import DataError, Finding, UserError
from coordexp.files import MODEL_PATHS, RELATIVE_PATHS, describe_missing, find_model, match_files

FIRST = 100  # records of a file that are checked
ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="The YAML file.", show_default=False)]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a value of the config, e.g. training.max_steps=6. Can be repeated.",
        show_default=False,
    ),
]


def _print_schema(is_requested: bool) -> None:
    if is_requested:
        typer.echo(json.dumps(editor_schema(), indent=2))
        raise typer.Exit


def check(
    config: ConfigOption,
    overrides: SetOption = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1, envvar="WORLD_SIZE", help="Learner processes of the run, for the rules that depend on them."
        ),
    ] = None,
    as_json: JsonOption = False,
    show_all: Annotated[bool, typer.Option("--all", help="Also show settings at their defaults.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 on a warning, e.g. if a file of the config is missing here.")
    ] = False,
    schema: Annotated[
        bool,
        typer.Option(
            "--schema",
            callback=_print_schema,
            is_eager=True,
            help="Print the JSON Schema of configs, with which an editor checks and completes them.",
        ),
    ] = False,
) -> None:
    """Load a config. Print all its problems, or the settings that it changes and where each comes from.

    Exits 0 if the config is valid, and 2 if it is not. With --strict, a warning exits 1.
    """
    world = World(world_size)
    try:
        loaded = load_settings(config, world, overrides or ())
    except ConfigError as error:  # the result of this command, on standard output
        if as_json:
            print_json(error.file, error.findings, {})
        else:
            print_findings(error.findings)
            out.print(count_problems(error))
        raise typer.Exit(2) from None
    missing = list(missing_files(loaded.settings))
    findings = [*loaded.notes, *missing, *data_problems(loaded.settings)]
    code = int(strict and any(finding.severity == "warning" for finding in findings))
    if as_json:
        print_json(loaded.files[-1], findings, _describe(loaded))
        raise typer.Exit(code)
    _print_settings(loaded, show_all)
    print_findings(findings)
    unchecked = (
        "" if world_size else " (rules about the number of learners not checked; --world-size N checks them)"
    )
    but = f", but {len(missing)} file{'s are' if len(missing) > 1 else ' is'} missing" if missing else ""
    verdict = Text(f"{loaded.files[-1]}: sound{but}", style="bold yellow" if missing else "bold green")
    out.print(verdict.append(unchecked, style="dim"))
    raise typer.Exit(code)


def _describe(loaded: Loaded) -> dict[str, Any]:
    """Return the settings, where each of them comes from, and the files, for `--json`."""
    values = loaded.settings.model_dump(mode="json")
    origins = {format_path(path): _origin(loaded, path) for path, _ in _walk((), values)}
    return {"settings": values, "origins": origins, "files": list(loaded.files)}


def _origin(loaded: Loaded, path: KeyPath) -> str:
    return loaded.origins.get(format_path(path), "default")


def _print_settings(loaded: Loaded, show_all: bool) -> None:
    hidden = 0
    previous: KeyPath = ()
    for path, value in _walk((), loaded.settings.model_dump(mode="json")):
        origin = _origin(loaded, path)
        if origin == "default" and not show_all:
            hidden += 1
            continue
        _print_headings(path, previous)
        previous = path
        indent = "  " * (len(path) - 1)
        label = f"{indent}{_label(path[-1])}: {value}"
        out.print(Text(f"{label:<58}  ").append(origin, style="dim" if origin == "default" else "cyan"))
    if hidden:
        out.print(Text(f"({hidden} more settings are at their defaults; --all shows them)", style="dim"))


def use_local_model(loaded: Loaded) -> Loaded:
    """Return the settings with the folder of their model in place of its name on the Hugging Face hub. The model
    is downloaded if it is not in the cache."""
    name = loaded.settings.model.path
    folder = find_model(name)
    if folder == Path(name):
        return loaded
    model = loaded.settings.model.model_copy(update={"path": str(folder)})
    origins = loaded.origins | {"model.path": f"derived: {name} of the Hugging Face hub"}
    return replace(loaded, settings=loaded.settings.model_copy(update={"model": model}), origins=origins)


def missing_files(settings: Settings) -> Iterator[Finding]:
    """Yield a warning for each setting with a path that does not exist here. `coordexp check` does not treat this
    as an error: the run may be meant for another machine."""
    try:
        model = find_model(settings.model.path, download=False)
        if not model.exists():
            yield Finding("warning", "model.path", f"{model} does not exist", MODEL_PATHS)
    except UserError as error:
        yield Finding("warning", "model.path", error.problem, error.fix)
    for setting, names in settings.custom.data_sets.items():
        for name in names:
            if not match_files(name):
                yield Finding("warning", setting, describe_missing(name), RELATIVE_PATHS)


def data_problems(settings: Settings, readable: Sequence[Path] | None = None) -> Iterator[Finding]:
    """Yield a warning for each problem of the first records of the data files that are here. With `readable`, also
    for an image that is neither in these folders nor in those of data files: rollout servers may not read it."""
    sets = {
        setting: list(filter(Path.is_file, chain.from_iterable(map(match_files, names))))
        for setting, names in settings.custom.data_sets.items()
    }
    folders = [*(readable or ()), *(file.parent for files in sets.values() for file in files)]
    resolved = None if readable is None else [folder.resolve() for folder in folders]
    for setting, files in sets.items():
        for file in files:
            for problem, fix in _record_problems(settings, setting, file, resolved):
                yield Finding("warning", setting, problem, fix)


def _record_problems(
    settings: Settings, setting: str, file: Path, folders: list[Path] | None
) -> Iterator[tuple[str, str]]:
    """Yield the problems of the first records of a file, and what to do: what cannot be read, records of another
    kind, polygons that native answers cannot express, and images that are missing or in none of the folders."""
    from coordexp.data import Record, find_wrong_kind, read_any_records  # numpy takes a tenth of a second
    from coordexp.data.addresses import is_file, join_address, parse_address
    from coordexp.data.stores import check_allowed

    try:
        lines = list(islice(read_any_records(file), FIRST))
    except DataError as error:
        yield error.problem, error.fix or f"run `coordexp data doctor {file}`"
        return
    if not lines:
        yield f"{file} has no records", "write one JSON object per line (see `coordexp data import`)"
    if wrong := find_wrong_kind(setting, [record for _, record in lines], trains_chat(settings)):
        yield f"{file}: {wrong[0]}", wrong[1]
    images = [record.image for _, record in lines if record.image is not None]
    addresses = [(image, parse_address(join_address(file.parent, image))) for image in images]
    try:
        for address in {address.location for _, address in addresses if address.is_url}:
            check_allowed(address)
    except UserError as error:
        yield f"{file}: {error.problem}", error.fix
    missing = [image for image, place in addresses if not place.is_url and not Path(place.location).is_file()]
    if missing:
        more = f", nor do {len(missing) - 1} more of the first {len(images)}" if len(missing) > 1 else ""
        yield f"{file}: {missing[0]} does not exist{more}", "image paths are relative to the folder of the file"
    for image in filter(is_file, images if folders is not None else ()):
        target = (file.parent / image).resolve()
        if not any(map(target.is_relative_to, folders or ())):
            yield f"{file}: {image} is {target}, which servers may not read", f"add --images {target.parent}"
            break
    if settings.custom.answer_format == "native" and setting in settings.custom.train_sets:
        for line, record in lines:
            if isinstance(record, Record) and any(item.kind == "poly" for item in record.objects):
                fix = "set custom.answer_format: coord_tokens, or train on records with bbox_2d in place of poly"
                yield f"{file}:{line} has a polygon, and native answers only boxes", fix
                break


def _print_headings(path: KeyPath, previous: KeyPath) -> None:
    """Print the names of the sections that begin between the previous value and this one."""
    for depth in range(len(path) - 1):
        if path[: depth + 1] != previous[: depth + 1]:
            out.print(Text("  " * depth + _label(path[depth]), style="bold"))


def _label(key: str | int) -> str:
    return f"[{key}]" if isinstance(key, int) else key


def _walk(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _walk((*path, key), item)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _walk((*path, index), item)
    else:
        yield path, json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
