"""`coordexp demo`: a tiny model to try everything with, and a first answer from it."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordexp.cli.console import need, out, progress, stop

if TYPE_CHECKING:
    from coordexp.demo.generate import Answer

app = typer.Typer(help="A tiny Qwen3-VL, made on the spot.", no_args_is_help=True)


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
) -> None:
    """Write a tiny random Qwen3-VL that transformers and vLLM load."""
    need("torch", "transformers", extra="train")
    if out_folder.exists() and (not out_folder.is_dir() or any(out_folder.iterdir())):
        stop(f"{out_folder} exists and is not an empty folder\n  give another one, or remove it")
    with progress("making the model"):
        from coordexp.demo.model import make_model

        try:
            make_model(out_folder, vocabulary.value, tied=tied, seed=seed, spread=spread)
        except (OSError, ModuleNotFoundError) as error:
            stop(str(error))
    out.print(f"wrote {out_folder}")


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
        from PIL import Image

        from coordexp.demo.generate import drawing, start_vllm, stop_vllm, with_transformers, with_vllm

        try:
            picture = drawing() if image is None else Image.open(image).convert("RGB")
        except OSError as error:
            stop(f"{image} is not an image: {error}")
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
