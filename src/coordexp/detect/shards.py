"""Predictions in shards: a pure function from the number of a shard to a file of answers, for task arrays, pods,
workers and Ray actors, and the joining of these files.

The joined files are those that one undisturbed `coordexp predict` writes, byte for byte, as long as the model
answers a batch in the same way everywhere.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordexp.config.settings import AnswerFormatName
from coordexp.data import RecordFile
from coordexp.data.shards import (
    Manifest,
    Shard,
    claim,
    finish,
    is_finished,
    result_path,
)
from coordexp.detect.answering import (
    API_KEY,
    Answering,
    AnswerOptions,
    AskedModel,
    Backend,
    Generator,
    count_per_call,
)
from coordexp.detect.predicting import Source, UnfinishedPredictions, count_answers, identify
from coordexp.errors import DataError
from coordexp.files import write_parts, write_whole
from coordexp.tasks import ignore

if TYPE_CHECKING:
    from coordexp.evaluate import ImageAnswer
    from coordexp.evaluate.predictions import Truth


@dataclass(frozen=True)
class PredictionJob:
    """The model, data and settings of a prediction in shards. It can be sent to another process."""

    model: Path
    data: Path
    folder: Path  # for the answers of all shards
    shards: int
    options: AnswerOptions
    batch: int = 16
    limit: int | None = None
    prompt: str | None = None
    answer_format: AnswerFormatName | None = None
    backend: Backend = "hf"
    server: str | None = None
    served_model: str | None = None
    suggest: dict[str, Any] | None = None  # the options of `data suggest`, if the answers are for that

    @property
    def per_call(self) -> int:
        return count_per_call(self.batch, self.backend, self.server)


class ShardPredictor:
    """Answers the images of shards, of which it reads only their records. The model is loaded for the first shard
    that is not finished. `warn` gets a message about every image that cannot be read."""

    def __init__(self, job: PredictionJob, warn: Callable[[str], None] = ignore) -> None:
        self.job, self._warn = job, warn
        self._records = RecordFile(job.data)
        self.images = min(len(self._records), job.limit or len(self._records))
        self._model = AskedModel.load(job.model, job.answer_format, job.prompt)
        job.options.check_format(self._model.answer_format.name)
        source = Source((), self._records.path.parent, self._records.sha256)
        cut = {"batch": job.per_call, "images": self.images}
        suggest = {} if job.suggest is None else {"suggest": job.suggest}
        self.request = identify(self._model, source, job.options, job.server) | cut | suggest
        self._generator: Generator | None = None
        self._longest = 0

    def __call__(self, number: int, notify: Callable[[int], None] = ignore) -> bool:
        """Write the answers to the images of a shard, and return True, or False if it was finished before. What
        was answered before an interruption is kept. `notify` gets the number of images that are answered."""
        shard, job = Shard(number, self.job.shards), self.job
        with claim(job.folder, shard):
            if is_finished(job.folder, shard, self.request, "predict"):
                return False
            part = shard.cut(self.images, job.per_call)
            images = [self._records.read_with_image_id(index) for index in part]
            unfinished = UnfinishedPredictions(job.folder / f"{shard.name}.json", self.request)
            answers: list[ImageAnswer] = []
            if unfinished.path.is_file():
                answers = unfinished.resume_batches(len(images), job.per_call, job.options)
            else:
                unfinished.begin()
            answered = len(answers) // job.options.answers_per_image
            notify(answered)
            if answered < len(images):
                answering = Answering(self._model, self._start(images), job.options)
                folder = self._records.path.parent
                for count in unfinished.answer(answers, images, answering, folder, job.per_call, self._warn):
                    answered += count
                    notify(answered)
            self._finish(shard, part, images, answers)
            unfinished.path.unlink()
        return True

    def close(self) -> None:
        """End the engine, if one was started."""
        if self._generator is not None:
            self._generator.close()
            self._generator = None

    def _start(self, images: "Truth") -> Generator:
        """Return the running model. An engine that was started for shorter prompts is started again."""
        job = self.job
        longest = self._model.count_longest_prompt(record for _, record in images) + job.options.max_new_tokens
        if self._generator is not None and (job.server or job.backend == "hf" or longest <= self._longest):
            return self._generator
        self.close()
        if job.server is None:
            self._generator = self._model.start(job.backend, job.batch, longest)
        else:
            key = os.environ.get(API_KEY)
            self._generator = self._model.connect(job.server, job.batch, key, job.served_model)
        self._longest = longest
        return self._generator

    def _finish(self, shard: Shard, part: range, images: "Truth", answers: "list[ImageAnswer]") -> None:
        from coordexp.evaluate.predictions import to_line

        job = self.job
        answered = [answer.image_id for answer in answers if answer.sample is None]
        if answered != [image_id for image_id, _ in images]:
            raise DataError(
                f"{job.folder}: the unfinished answers of shard {shard} are about other images",
                f"remove {shard.name}.unfinished.jsonl, and make the shard again",
            )
        write_whole(result_path(job.folder, shard, "predict"), "".join(map(to_line, answers)))
        place = (shard.number, shard.count, part.start, part.stop, str(job.data.absolute()))
        finish(job.folder, Manifest("predict", *place, self.request, count_answers(answers)))


def merge_shards(
    folder: Path,
    manifests: Sequence[Manifest],
    to: Path,
    categories: dict[str, int] | None = None,
    notify: Callable[[str], None] = ignore,
) -> Counter[str]:
    """Write the predictions of all shards to `to` and the files beside it, and return the counts of all shards.
    `manifests` are those of `read_finished`, and `categories` the numbers of all classes of the data, if they are
    known. Records and answers are read one by one. Raise DataError if the data have changed."""
    from coordexp.evaluate.answer import parse_answer
    from coordexp.evaluate.predictions import (
        answers_path,
        number_all_classes,
        read_checked,
        samples_path,
        to_detections,
        to_json,
    )

    first, counts = manifests[0], Counter[str]()
    records = RecordFile(Path(first.data), notify)
    if records.sha256 != first.request["data"]:
        raise DataError(f"{records} has changed since it was predicted on", "predict again")
    categories = number_all_classes(records) if categories is None else categories
    images = map(records.read_with_image_id, range(manifests[-1].end))
    separator = "["
    with ExitStack() as files:
        write = files.enter_context(write_parts(to))
        write_answer = files.enter_context(write_parts(answers_path(to)))
        write_sample: Callable[[bytes], None] = ignore
        if first.request.get("samples"):
            write_sample = files.enter_context(write_parts(samples_path(to)))
        for manifest in manifests:
            counts.update(manifest.counts)
            path = result_path(folder, Shard(manifest.shard, manifest.shards), "predict")
            for line in path.read_bytes().splitlines(keepends=True):
                answer = read_checked(parse_answer, line, str(path))
                if answer.sample is not None:
                    write_sample(line)
                    continue
                write_answer(line)
                for detection in to_detections([answer], [next(images)], categories):
                    write(f"{separator}{to_json(detection.as_dict())}")
                    separator = ",\n"
        write("[]\n" if separator == "[" else "]\n")
    return counts
