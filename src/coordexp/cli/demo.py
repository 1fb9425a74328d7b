"""`coordexp demo`: a tiny model, and scenes to train it on."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from coordexp.cli.console import bar, need, need_new, out, progress
from coordexp.errors import UserError, explain
from coordexp.families import FAMILIES

app = typer.Typer(help="A tiny model and scenes to train it on, made on the spot.", no_args_is_help=True)


@app.command("model")
def model(
    out_folder: Annotated[Path, typer.Option("--out", "-o", help="A new folder.", show_default=False)],
    family: Annotated[str, typer.Option(help=f"Kind of model: {', '.join(FAMILIES)}.")] = "qwen3_vl",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    spread: Annotated[
        float, typer.Option(min=0.0, help="Factor on the weights. 1 to train; 6 for varied answers untrained.")
    ] = 1.0,
    scenes: Annotated[
        bool,
        typer.Option("--scenes", help="Ready to learn `demo scenes`: small patches, and weights that start well."),
    ] = False,
    native: Annotated[
        bool, typer.Option("--native", help="For native answers: without coordinate tokens, as Qwen is published.")
    ] = False,
) -> None:
    """Write a tiny random model that transformers and vLLM load."""
    need("torch", "transformers", extra="train")
    need_new(out_folder)
    if family not in FAMILIES:
        raise UserError(f"--family {family} is unknown", f"use one of these: {', '.join(FAMILIES)}")
    if scenes and spread != 1.0:
        raise UserError("--scenes sets --spread itself", "leave one of the two out")
    with progress("making the model"):
        from coordexp.demo.model import SCENES, make_model

        with explain(OSError, f"{out_folder} cannot be written", "give another --out"):
            make = partial(make_model, out_folder, family=family, seed=seed, coords=not native, native=native)
            if scenes:
                make(spread=3.0, ordinal=True, size=SCENES)
            else:
                make(spread=spread)
    out.print(f"wrote {out_folder}")


@app.command("scenes")
def scenes(
    out_folder: Annotated[Path, typer.Option("--out", "-o", help="A new folder.", show_default=False)],
    train: Annotated[int, typer.Option(min=1, help="Scenes to train on.")] = 2000,
    val: Annotated[int, typer.Option(min=1, help="Held-out scenes.")] = 200,
    seed: Annotated[int, typer.Option(help="Everything follows from it.")] = 0,
    side: Annotated[int, typer.Option(min=32, max=4096, help="Width and height in pixels.")] = 64,
    objects: Annotated[str, typer.Option(help="Least and most objects of a scene.")] = "1-4",
    empty: Annotated[float, typer.Option(min=0, max=1, help="Share of scenes with nothing in them.")] = 0.0,
    rare: Annotated[float, typer.Option(min=0, max=1, help="Share of objects of rare shapes.")] = 0.0,
    polygons: Annotated[float, typer.Option(min=0, max=1, help="Share of objects given as polygons.")] = 0.0,
    rotated: Annotated[float, typer.Option(min=0, max=1, help="Share of objects that are turned.")] = 0.0,
    overlap: Annotated[float, typer.Option(min=0, max=1, help="Share of a box that others may cover.")] = 0.0,
    ask: Annotated[float, typer.Option(min=0, max=1, help="Share of scenes that ask for some classes.")] = 0.0,
    names: Annotated[
        Literal["colour-shape", "shape", "colour"],
        typer.Option(help="What a class is: red circle, circle or red."),
    ] = "colour-shape",
    questions: Annotated[
        int, typer.Option(min=0, help="Most questions about each scene, in *.questions.jsonl: colours, counts.")
    ] = 0,
) -> None:
    """Draw scenes with exact boxes: records for training, COCO files for other tools, and questions about them."""
    need("PIL", extra="train")
    from coordexp.demo.scenes import SceneSettings, write_scenes

    least, _, most = objects.partition("-")
    if not (least.isdigit() and (most or least).isdigit() and 1 <= int(least) <= int(most or least) <= 100):
        raise UserError(f"--objects {objects} is not a range such as 1-4, from 1 to 100")
    if questions and names != "colour-shape":
        raise UserError("--questions needs the colours and shapes as names", "leave --names out, or --questions")
    need_new(out_folder)
    counts = (int(least), int(most or least))
    settings = SceneSettings(side, counts, empty, rare, polygons, rotated, overlap, ask, names)
    with bar("drawing", train + val) as advance:
        write_scenes(out_folder, settings, train=train, val=val, seed=seed, questions=questions, advance=advance)
    out.print(f"wrote {train} + {val} scenes to {out_folder}")
