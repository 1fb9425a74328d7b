"""`coordexp demo`: a tiny model to try everything with, and a first answer from it."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordexp.cli.console import bar, need, need_new, out, progress, stop

if TYPE_CHECKING:
    from coordexp.demo.generate import Answer

app = typer.Typer(help="A tiny Qwen3-VL and scenes to train it on, made on the spot.", no_args_is_help=True)


class Vocabulary(StrEnum):
    small = "small"
    qwen = "qwen"


class Backend(StrEnum):
    hf = "hf"
    vllm = "vllm"


@app.command("model")
def model(
    out_folder: Annotated[Path, typer.Option("--out", "-o", help="A new folder.", show_default=False)],
    vocabulary: Annotated[
        Vocabulary, typer.Option(help="About 1,300 tokens, or the real Qwen's 152,669.")
    ] = Vocabulary.small,
    tied: Annotated[bool, typer.Option(help="Share the embedding with the output head.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    spread: Annotated[
        float,
        typer.Option(min=0.0, help="Factor on the weights. 1 to train; 6 for varied answers untrained."),
    ] = 1.0,
    scenes: Annotated[
        bool,
        typer.Option("--scenes", help="Ready to learn `demo scenes`: small patches, and weights that start well."),
    ] = False,
) -> None:
    """Write a tiny random Qwen3-VL that transformers and vLLM load."""
    need("torch", "transformers", extra="train")
    need_new(out_folder)
    if scenes and spread != 1.0:
        stop("--scenes brings its own --spread\n  leave one of the two out")
    with progress("making the model"):
        from coordexp.demo.model import SCENES, make_model

        try:
            if scenes:
                make_model(
                    out_folder, vocabulary.value, tied=tied, seed=seed, spread=3.0, ordinal=True, size=SCENES
                )
            else:
                make_model(out_folder, vocabulary.value, tied=tied, seed=seed, spread=spread)
        except (OSError, ModuleNotFoundError) as error:
            stop(str(error))
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
) -> None:
    """Draw scenes with exact boxes: records for training, COCO files for other tools."""
    need("PIL", extra="train")
    from coordexp.demo.scenes import SceneSettings
    from coordexp.demo.write_scenes import write_scenes

    least, _, most = objects.partition("-")
    if not (least.isdigit() and (most or least).isdigit() and 1 <= int(least) <= int(most or least) <= 100):
        stop(f"--objects {objects} is not a range such as 1-4, from 1 to 100")
    need_new(out_folder)
    settings = SceneSettings(side, (int(least), int(most or least)), empty, rare, polygons, rotated, overlap)
    with bar("drawing", train + val) as advance:
        write_scenes(out_folder, settings, train=train, val=val, seed=seed, advance=advance)
    out.print(f"wrote {train} + {val} scenes to {out_folder}")


@app.command("generate")
def generate(
    model_folder: Annotated[Path, typer.Option("--model", "-m", help="A model folder.", show_default=False)],
    backend: Annotated[
        Backend, typer.Option(help="hf answers with transformers; vllm with vLLM, and compares the two.")
    ] = Backend.hf,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 16,
    image: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="An image file. Without one, a drawing.")
    ] = None,
) -> None:
    """Answer one image greedily. With vLLM, exits 1 unless it agrees with transformers token for token."""
    need("torch", "transformers", extra="train")
    if backend is Backend.vllm:
        need("vllm", extra="vllm")
    if not (model_folder / "config.json").is_file():
        stop(f"{model_folder} has no config.json\n  give a model folder, e.g. one made by `coordexp demo model`")
    with progress("loading transformers"):
        from coordexp.demo.generate import drawing, start_vllm, stop_vllm, with_transformers, with_vllm
        from coordexp.errors import DataError
        from coordexp.rollout.prompt import read_image

        try:
            picture = drawing() if image is None else read_image(image, str(image))
        except DataError as error:
            stop(str(error))
        (expected,) = with_transformers(model_folder, [picture], tokens)
    _show("transformers", expected)
    if backend is Backend.hf:
        return
    with progress("starting a vLLM engine (about a minute on a CPU)"):
        engine = start_vllm(model_folder)
        (answer,) = with_vllm(engine, model_folder, [picture], tokens)
        stop_vllm(engine)
    _show("vLLM", answer)
    if answer.prompt_ids != expected.prompt_ids or answer.answer_ids != expected.answer_ids:
        stop("vLLM and transformers differ")
    out.print(f"vLLM and transformers agree on all {len(answer.answer_ids)} tokens")


def _show(name: str, answer: "Answer") -> None:
    out.print(f"{name}: {len(answer.prompt_ids)} prompt tokens, answer {list(answer.answer_ids)}", markup=False)
    out.print(f"  {answer.text!r}", markup=False)
