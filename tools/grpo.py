"""Train a model with GRPO, with the F1 of its answers as the reward. This is a control for Stage 2.

    python tools/grpo.py --model examples/stage2-cpu/model --train scenes-few/train.jsonl \
        --val scenes-few/val.jsonl --out runs/grpo --steps 100

It needs TRL (tested: trl 1.16.0 with datasets 5.2.0), which is not part of the project's environment. TRL's
GRPOTrainer samples the answers with transformers and makes the updates. The prompt and the evaluation are those of
`coordexp train`, and the reward counts objects as the evaluation does.

In every step the model answers each of `--images-per-step` images `--group` times. The reward of an answer is
its F1 at IoU 0.5 with class against the labels of its image. With `--ignore-unmatched`, predictions that overlap
no label by half do not count, because their labels may be missing. Its advantage is (reward - mean of the group)
/ (standard deviation of the group + 1e-4), for all of its tokens. The loss is the mean over all tokens of the
step (the normalisation of DAPO; GRPO's first version took the mean over the tokens of each answer first), plus
`--kl` times the k3 estimate of the divergence from the first weights (as published with GRPO; by default, TRL
multiplies it by the probability ratio). Answers that are cut off are trained on like the others. The optimizer
is AdamW without weight decay, with gradients clipped to a norm of 1, 10 warm-up steps and a cosine schedule.
Weights are float32.

The folder gets `metrics.jsonl` with a line per step (`reward`, `rollout/mean_tokens`, `generated_tokens` so far,
`kl` and others of TRL) and a line per evaluation, named as in training (`eval_f1_50`); the predictions of every
evaluation on `--val`; and at the end `checkpoint-STEPS`, a model folder for `coordexp predict`. `coordexp report`
compares it with the folders of other runs.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoProcessor, PrinterCallback, Qwen3VLForConditionalGeneration, TrainerCallback

from coordexp.answers.formats import NOTE_FILE, CoordTokenAnswers
from coordexp.answers.parse import parse_rollout
from coordexp.answers.table import VocabularyTable
from coordexp.config import RolloutMatching
from coordexp.config.settings import Custom
from coordexp.data import Questions, Record, RecordFile
from coordexp.errors import UserError
from coordexp.evaluate.answer import build_answer
from coordexp.evaluate.comparison import compare_images
from coordexp.evaluate.matching import MatchCounts, match_image
from coordexp.files import is_free, write_json, write_whole
from coordexp.logs import say, show_messages
from coordexp.rollout.backend import Rollout
from coordexp.rollout.hugging_face import HuggingFaceBackend
from coordexp.rollout.prompt import PromptBuilder, open_image
from coordexp.train.evaluation import AnswerEvaluation, Asking
from coordexp.train.folder import fingerprint, git_state
from coordexp.train.sinks import MetricsFile

WARMUP_STEPS = 10
IOU = 0.5  # of the reward
DECODE_BATCH = 64  # images that an evaluation answers at once
# The numbers that are printed, with their formats.
SHOWN = dict.fromkeys(("eval_f1_50", "eval_recall_50", "eval_precision_50", "reward"), ".3f")
SHOWN |= {"kl": ".2g", "rollout/mean_tokens": ".0f", "generated_tokens": ",.0f", "step_time": ".1f"}


def main() -> None:
    options = read_options(sys.argv[1:])
    try:
        train(options)
    except UserError as error:
        sys.exit(str(error))


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="The model folder to start from.")
    parser.add_argument("--train", type=Path, required=True, help="The records to train on.")
    parser.add_argument("--val", type=Path, help="The records to evaluate on. Without it: no evaluation.")
    parser.add_argument("--out", type=Path, required=True, help="A new folder.")
    parser.add_argument("--steps", type=int, required=True, help="Updates of the weights.")
    parser.add_argument("--group", type=int, default=8, help="Answers per image.")
    parser.add_argument("--images-per-step", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--kl", type=float, default=0.01, help="Weight of the divergence from the first weights.")
    parser.add_argument("--max-new-tokens", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ignore-unmatched", action="store_true", help="The reward is for incomplete labels.")
    parser.add_argument("--eval-every", type=int, help="Steps. Without it: at the start and at the end only.")
    return parser.parse_args(arguments)


def train(options: argparse.Namespace) -> None:
    """Train, evaluate and save the last weights."""
    if not is_free(options.out):
        raise UserError(f"{options.out} is not an empty folder", "give another --out, or remove this one")
    trainer = make_trainer(options)
    write_run_files(options)
    trainer.train()
    save_model(trainer.model, options, options.out / f"checkpoint-{options.steps}")


def make_trainer(options: argparse.Namespace) -> Any:
    """Return TRL's trainer with our prompt, images, reward and evaluation. Raise UserError if TRL is missing."""
    try:
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as error:
        raise UserError(
            f"TRL cannot be imported: {error}",
            "pip install trl==1.16.0 datasets==5.2.0 beside coordexp[train], in a virtual environment of its own",
        ) from error
    records, table = RecordFile(options.train), VocabularyTable.from_folder(options.model)
    # TRL pads prompts on the left. The processor must do the same, or a batch with images of several sizes fails.
    processor = AutoProcessor.from_pretrained(options.model, padding_side="left")
    model = Qwen3VLForConditionalGeneration.from_pretrained(options.model, dtype=torch.float32)
    question = read_question(options.model)
    config = GRPOConfig(
        output_dir=str(options.out),
        max_steps=options.steps,
        num_generations=options.group,
        per_device_train_batch_size=options.group * options.images_per_step,
        steps_per_generation=1,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=WARMUP_STEPS,
        max_grad_norm=1.0,
        temperature=options.temperature,
        max_completion_length=options.max_new_tokens,
        beta=options.kl,
        use_bias_correction_kl=False,
        loss_type="dapo",
        scale_rewards="group",
        mask_truncated_completions=False,
        seed=options.seed,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    evaluation = options.val and AnswerEvaluation(
        RecordFile(options.val),
        Questions.of(Custom(prompt=question)),
        HuggingFaceBackend(lambda: model, PromptBuilder(processor, question), table, DECODE_BATCH),
        model.named_parameters,
        CoordTokenAnswers(table),
        RolloutMatching(max_new_tokens=options.max_new_tokens),
        Asking(options.out),
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=processor,
        args=config,
        train_dataset=make_dataset(records, question),
        reward_funcs=F1Reward(records, table, options.ignore_unmatched).score,
        callbacks=[Journal(options.out / "metrics.jsonl", evaluation, options.eval_every or options.steps)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def make_dataset(records: RecordFile, question: str) -> Any:
    """Return the records as a dataset of TRL: prompt, image and index. An image is read when it is needed. The
    fingerprint is given because to compute it, dill pickles all of pyarrow, which fails outside site-packages."""
    from datasets import Dataset
    from pyarrow import table

    def load(rows: dict[str, list[int]]) -> dict[str, list[Any]]:
        chosen = [records[index] for index in rows["index"]]
        images = [open_image(records.image_address(record), (record.width, record.height)) for record in chosen]
        return rows | {"image": images, "prompt": [[{"role": "user", "content": question}] for _ in chosen]}

    return Dataset(table({"index": range(len(records))}), fingerprint="records").with_transform(load)


class F1Reward:
    """Rewards answers with their F1, and counts the generated tokens as `rollout/tokens` of `coordexp train` does:
    without the end of turn."""

    def __init__(self, records: RecordFile, table: VocabularyTable, ignore_unmatched: bool = False) -> None:
        self.records, self.table, self.ignore_unmatched = records, table, ignore_unmatched
        self.generated_tokens = 0

    def score(
        self,
        completion_ids: Sequence[Sequence[int]],
        index: Sequence[int],
        log_metric: Callable[[str, float], None],
        **_: Any,
    ) -> list[float]:
        """Return the rewards of the answers to the records with these indices. TRL calls this by the names of its
        arguments, once for all answers of a step."""
        answers = [self._cut_at_end(ids) for ids in completion_ids]
        tokens = sum(map(len, answers))
        self.generated_tokens += tokens
        log_metric("rollout/tokens", tokens)
        log_metric("rollout/mean_tokens", tokens / len(answers))
        log_metric("generated_tokens", self.generated_tokens)
        truth = [self.records.read_with_image_id(k) for k in index]
        return [
            reward_answer(ids, *image, self.table, self.ignore_unmatched)
            for ids, image in zip(answers, truth, strict=True)
        ]

    def _cut_at_end(self, ids: Sequence[int]) -> list[int]:
        stop = self.table.end_of_turn
        return list(ids[: ids.index(stop)] if stop in ids else ids)


def reward_answer(
    ids: Sequence[int], image_id: int, record: Record, table: VocabularyTable, ignore_unmatched: bool = False
) -> float:
    """Return F1 at IoU 0.5 with class, as evaluation counts it for this image. An answer that cannot be read has
    no objects, so its F1 is 0. Where there is nothing to detect, a complete answer without objects gets 1.
    `ignore_unmatched` leaves out predictions that overlap no label; repeats and wrong names still count."""
    rollout = Rollout.of(table, (), ids, [0.0] * len(ids), "stop")
    answer = build_answer(image_id, record.image, rollout, CoordTokenAnswers(table))
    (comparison,) = compare_images([(image_id, record)], [answer])
    (pairs,) = match_image(comparison, thresholds=(IOU,)).with_class
    predicted = len(comparison.predicted)
    if ignore_unmatched and comparison.overlap.size:
        predicted = int((comparison.overlap >= IOU).any(axis=1).sum())
    f1 = MatchCounts(len(pairs), predicted, len(comparison.true)).f1
    return float(_is_empty_answer(ids, table)) if f1 is None else f1


def _is_empty_answer(ids: Sequence[int], table: VocabularyTable) -> bool:
    """Return True for a complete answer without objects, valid or not."""
    parsed = parse_rollout(ids, table)
    return not (parsed.fallback or parsed.truncated or parsed.objects or parsed.unread)


class Journal(TrainerCallback):
    """Writes `metrics.jsonl`, prints the main numbers, and evaluates, if there is an evaluation, before the first
    step, after every `every` steps and after the last one."""

    def __init__(self, path: Path, evaluation: AnswerEvaluation | None, every: int) -> None:
        self.file, self.evaluation, self.every = MetricsFile(path), evaluation, every

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.file.begin(state)
        self._evaluate(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.every == 0 or state.global_step == args.max_steps:
            self._evaluate(args, state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        known = {name: value for name, value in (logs or {}).items() if value is not None}
        if state.is_world_process_zero:
            self.file.log(state, known)
        numbers = [f"{name} {known[name]:{style}}" for name, style in SHOWN.items() if name in known]
        if numbers:
            say(f"step {state.global_step}/{args.max_steps}: {', '.join(numbers)}")

    def _evaluate(self, args: Any, state: Any, control: Any) -> None:
        if self.evaluation:
            metrics = self.evaluation(state.global_step)
            self.on_log(args, state, control, {f"eval_{name}": value for name, value in metrics.items()})


def read_question(model: Path) -> str:
    """Return the prompt that the model was trained with, or the default one."""
    note = model / NOTE_FILE
    return str(json.loads(note.read_text())["prompt"] if note.is_file() else Custom.model_fields["prompt"].default)


def save_model(model: Any, options: argparse.Namespace, folder: Path) -> None:
    """Write the weights, with the processor and the prompt of the model that training started from."""
    model.save_pretrained(folder)
    AutoProcessor.from_pretrained(options.model).save_pretrained(folder)
    write_json(folder / NOTE_FILE, {"prompt": read_question(options.model)})


def write_run_files(options: argparse.Namespace) -> None:
    """Write `resolved.yaml` and `run.json`, with which `coordexp report` compares this run with others."""
    values = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    training = {"output_dir": values.pop("out"), "seed": values.pop("seed"), "max_steps": values.pop("steps")}
    settings = {"training": training, "grpo": values}
    write_whole(options.out / "resolved.yaml", yaml.safe_dump(settings, sort_keys=False))
    start = {
        "command": sys.argv,
        "packages": {name: version(name) for name in ("trl", "datasets", "transformers", "torch")},
        "git": git_state(),
        "data": {
            name: fingerprint(RecordFile(path)) for name in ("train", "val") if (path := vars(options)[name])
        },
    }
    write_json(options.out / "run.json", [start])


if __name__ == "__main__":
    show_messages()
    main()
