"""`coordexp data audit`: how many labels are missing, whether at random, and what that means for training."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from coordexp.cli.console import need, out, sanitize
from coordexp.cli.data_suggest import DECISIONS, PREDICTIONS, SUGGESTIONS, DataOption
from coordexp.cli.evaluate import evaluate_file
from coordexp.errors import UserError


def audit(
    folder: Annotated[
        Path,
        typer.Argument(
            exists=True,
            file_okay=False,
            help="A folder of `data suggest`, with decisions.json.",
            show_default=False,
        ),
    ],
    data: DataOption,
    preds: Annotated[
        Path | None, typer.Option("--preds", "-p", dir_okay=False, help="Unset: preds.json in the folder.")
    ] = None,
) -> None:
    """Estimate which share of the objects is labelled, whether labels are missing at random, and closing_weight.

    A person has decided about the suggestions on their page: about all, or, with `data suggest --shuffle`, about
    the first ones. Use images that the model was not trained on, chosen at random.
    """
    need("hotcoco", extra="evaluate")
    from coordexp.detect.audit import find_judged, list_audited_objects, read_judged
    from coordexp.evaluate import incomplete

    file = read_judged(folder / SUGGESTIONS, folder / DECISIONS)
    report = evaluate_file(data, preds or folder / PREDICTIONS)
    judgements = [entry for entry in find_judged(file, report) if file.is_asked(entry[0].comparison.image_id)]
    objects, images = list_audited_objects(judgements), len(judgements)
    states = Counter(item.state for item in objects)
    known = states.total() - states["rejected"] if file.complete else states["found"] + states["accepted"]
    if images < 2 or not known:
        raise UserError(f"{data}: nothing to estimate from", "audit 50 images in which the model finds labels")
    decided = states["accepted"] + states["rejected"]
    out.print(
        f"{states['found'] + states['unseen']:,} labels in {images:,} {'complete ' * bool(file.complete)}images, "
        f"of which the model found {states['found']:,}; {decided:,} of {decided + states['undecided']:,} "
        f"suggestions judged, {states['accepted']:,} accepted; {states['added']:,} objects added"
    )
    result = incomplete.audit(objects, images, bool(file.complete))
    out.print(Text(f"labelled share: {result.share}", style="bold"))
    for title, shares in (("by size, in thirds", result.by_size), ("by class", result.by_class)):
        if shares:
            out.print(title)
        for name, share in list(shares.items())[:10]:
            out.print(f"  {sanitize(name):<24} {share}", markup=False)
    out.print("are labels missing at random?" if result.tests else "too few objects to see whether at random")
    for by, (p, least) in result.tests.items():
        group = {"size": f"{least} objects", "crowding": f"images with {least} objects"}.get(by, sanitize(least))
        answer = "no" if p < incomplete.P_RANDOM else "nothing speaks against it"
        out.print(f"  by {by:<10} {answer} (p = {p:.3f}; most are missing of {group})", markup=False)
    if any(p < incomplete.P_RANDOM for p, _ in result.tests.values()):
        interval = f"{max(0.01, result.share.low):.2f} {max(0.01, result.share.high):.2f}"
        options = f"--judged FOLDER --labelled-share {interval}"
        out.print(f"so recall on the labels is not that on all objects: `evaluate {options}`", markup=False)
    out.print(Text(f"closing_weight: {max(0.1, round(result.share.value, 1))}", style="bold"))
