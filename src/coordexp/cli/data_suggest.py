"""`coordexp data suggest` and `coordexp data complete`: find labels that are missing, and add them."""

from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coordexp.cli.console import err, need, need_new, need_new_file, out, progress, sanitize
from coordexp.cli.predict import MOST_SAMPLES, need_backend, predict
from coordexp.cli.shards import predict_shard
from coordexp.detect.answering import AnswerOptions, Backend, find_whole_model
from coordexp.errors import UserError

if TYPE_CHECKING:
    from coordexp.detect.suggestions import SuggestionReport

SUGGESTIONS, PAGE, PREDICTIONS, DECISIONS = "suggestions.jsonl", "complete.html", "preds.json", "decisions.json"
SHOWN_CLASSES = 5
Placement = Literal["auto", "inside", "linked"]

DataOption = Annotated[
    Path, typer.Option("--data", "-d", exists=True, dir_okay=False, help="A file of records.", show_default=False)
]


def suggest(
    data: DataOption,
    folder: Annotated[
        Path, typer.Option("--out", "-o", help="A new folder. With --shard: of all shards.", show_default=False)
    ],
    model: Annotated[Path | None, typer.Option("--model", "-m", help="The model folder that answers.")] = None,
    preds: Annotated[
        Path | None,
        typer.Option("--preds", "-p", exists=True, dir_okay=False, help="preds.json of `coordexp predict`."),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=0, max=MOST_SAMPLES, help="Sampled answers per image, which improve the ranking.")
    ] = 0,
    iou: Annotated[
        float, typer.Option(help="A label of the same class with this IoU explains a predicted object.")
    ] = 0.3,
    other_iou: Annotated[float, typer.Option(help="The same for a label of another class.")] = 0.3,
    new_classes: Annotated[
        bool, typer.Option("--new-classes", help="Also suggest classes that no label of the data has.")
    ] = False,
    ignore_exhaustive: Annotated[
        bool, typer.Option("--ignore-exhaustive", help="Also suggest classes that a record lists as `exhaustive`.")
    ] = False,
    shuffle: Annotated[
        bool,
        typer.Option("--shuffle", help="Random order, so that those decided first stand for all, for an audit."),
    ] = False,
    page_limit: Annotated[int, typer.Option(min=1, help="Suggestions on the page, the first ones.")] = 5000,
    images: Annotated[
        Placement,
        typer.Option(help="Images inside the page, or linked from where they are. auto: linked if over 300."),
    ] = "auto",
    backend: Annotated[Backend | None, typer.Option(help="With --model, as for predict. Unset: hf.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="With --model, as for predict.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="With --model, as for predict.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --model: only the first records.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="With --model: go on after an interruption.")] = False,
    shard: Annotated[
        str | None,
        typer.Option(help="With --model, as for predict: answer only a part, before `shards merge`."),
    ] = None,
) -> None:
    """Suggest missing labels: predicted objects that no label explains, with a page to decide about them."""
    for name, value in (("--iou", iou), ("--other-iou", other_iou)):
        if not 0 < value <= 1:
            raise UserError(f"{name} {value:g} is not an IoU above 0 and at most 1", f"give e.g. {name} 0.5")
    if (model is None) == (preds is None):
        raise UserError("give either --model or --preds", "a model answers all images; preds.json has its answers")
    given = {"backend": backend, "batch": batch, "max_new_tokens": max_new_tokens, "limit": limit}
    asking: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    asking |= {"resume": True} if resume else {}
    if preds is not None and asking:
        option = next(iter(asking)).replace("_", "-")
        raise UserError(f"--{option} has no effect with --preds", "leave it out, or give --model instead")
    if shuffle and samples:
        raise UserError("--shuffle is for an audit, which is about one answer per image", "leave out --samples")
    rules: dict[str, Any] = {"iou": iou, "other_iou": other_iou, "new_classes": new_classes, "shuffle": shuffle}
    rules |= {"ignore_exhaustive": ignore_exhaustive, "page_limit": page_limit, "images": images}
    if shard is not None:
        if model is None or resume:
            name = "--preds" if model is None else "--resume"
            raise UserError(f"--shard has no effect with {name}", "leave one of them out")
        _answer_shard(shard, model, data, folder, samples, rules, asking)
        return
    need("PIL", extra="evaluate")
    if model is not None and not resume:
        need_new(folder)
    for name in (SUGGESTIONS, PAGE):
        need_new_file(folder / name)
    if model is not None:
        preds = folder / PREDICTIONS
        try:
            predict(model, preds, data, samples=samples, **asking)
        except typer.Exit as end:
            if end.exit_code:  # 0: the predictions were complete before
                raise
    assert preds is not None
    compare_with_labels(data, preds, folder, samples, **rules)


def _answer_shard(
    text: str, model: Path, data: Path, folder: Path, samples: int, suggest: dict[str, Any], asking: dict[str, Any]
) -> None:
    """Let the model answer a part of the images. `suggest` is kept for the comparison of all answers, which needs
    the classes of all labels."""
    from coordexp.data.shards import Shard
    from coordexp.detect.shards import PredictionJob

    need_backend(asking.get("backend"))
    shard = Shard.parse(text)
    given = {name: asking.pop(name) for name in ("max_new_tokens",) if name in asking}
    options = AnswerOptions(samples=samples, **given)
    job = PredictionJob(find_whole_model(model), data, folder, shard.count, options, **asking, suggest=suggest)
    predict_shard(job, shard)


def compare_with_labels(
    data: Path, preds: Path, folder: Path, samples: int, page_limit: int, images: Placement, **rules: Any
) -> None:
    """Write the suggestions and their page. `rules` are those of `SuggestionRules`."""
    from coordexp.data import RecordFile
    from coordexp.detect.suggestions import SuggestionRules, suggest_labels, write_suggestions
    from coordexp.evaluate import read_predictions, read_truth
    from coordexp.evaluate.predictions import read_samples
    from coordexp.pages.document import save_page
    from coordexp.pages.suggestions import render_suggestions

    with progress(f"reading {preds}"):
        records = RecordFile(data, partial(err.print, markup=False))
        truth = read_truth(records)
        answers = read_predictions(preds, truth)
        sampled = read_samples(preds, samples, [answer.image_id for answer in answers]) if samples else []
    with progress("comparing predictions with labels"):
        report = suggest_labels(truth, chain(answers, *sampled), SuggestionRules(**rules))
    with progress(f"writing {folder / PAGE}") as show:
        file = write_suggestions(folder / SUGGESTIONS, report.suggestions)
        options: dict[str, Any] = {"most": page_limit, "place": images, "notify": show}
        page = render_suggestions(file, dict(truth), data, target=folder, **options)
        save_page(folder / PAGE, page)
    _print_report(report, folder, len(truth))


def _print_report(report: "SuggestionReport", folder: Path, records: int) -> None:
    if report.images < records:
        err.print(
            f"{records - report.images:,} of {records:,} records get no suggestions: they have no answer, or ask "
            "for an expression"
        )
    out.print(
        f"{report.objects:,} predicted objects in {report.images:,} images: {report.explained:,} explained by a "
        f"label, {report.repeated:,} repeat a better one"
    )
    if report.complete:
        out.print(
            f"{report.complete:,} have a class of which their record states that every object is labelled "
            "(--ignore-exhaustive)"
        )
    if unknown := report.new_classes:
        names = ", ".join(sanitize(desc) for desc, _ in unknown.most_common(SHOWN_CLASSES))
        names += ", ..." if len(unknown) > SHOWN_CLASSES else ""
        out.print(
            f"{unknown.total():,} have a class that no label has and were left out (--new-classes): {names}",
            markup=False,
        )
    out.print(f"{len(report.suggestions):,} suggestions: {folder / SUGGESTIONS}", markup=False)
    out.print(f"open {folder / PAGE} to accept or reject them", markup=False)


def complete(
    data: DataOption,
    suggestions: Annotated[
        Path,
        typer.Option(
            "--suggestions", "-s", exists=True, dir_okay=False, help="suggestions.jsonl of `data suggest`."
        ),
    ],
    target: Annotated[Path, typer.Option("--out", "-o", help="A new JSONL file.", show_default=False)],
    decisions: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="decisions.json, saved from the page.")
    ] = None,
    accept_above: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Accept suggestions with at least this score that nobody has decided on."),
    ] = None,
) -> None:
    """Write a data set with the accepted and added labels. Records, ids and spaces stay as they are."""
    from coordexp.data import RecordFile
    from coordexp.detect.suggestions import accept, complete_records, read_decisions, read_suggestions
    from coordexp.files import write_whole

    if decisions is None and accept_above is None:
        raise UserError(
            "nothing says which labels to add", "give --decisions decisions.json or --accept-above SCORE"
        )
    need_new_file(target)
    with progress(f"writing {target}"):
        file = read_suggestions(suggestions)
        said = file if decisions is None else read_decisions(decisions, file)
        accepted = accept(said.suggestions, accept_above)
        records = RecordFile(data, partial(err.print, markup=False))
        completed = complete_records(records, accepted, target.parent)
        write_whole(target, (f"{record.as_json()}\n" for record in completed))
    rejected = sum(item.state == "rejected" for item in said.suggestions)
    undecided = len(said.suggestions) - len(accepted) - rejected
    out.print(
        f"wrote {target}: {len(records):,} records, {len(accepted):,} labels added; {rejected:,} suggestions were "
        f"rejected, {undecided:,} are undecided",
        markup=False,
    )
