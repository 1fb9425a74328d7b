"""From a record to an example: Stage 1 is the road of Stage 2 with an empty rollout."""

from dataclasses import dataclass

from coordexp.config import Settings
from coordexp.data import RecordError, RecordFile
from coordexp.match import match_objects
from coordexp.pack import Example
from coordexp.parse import parse_rollout
from coordexp.rollout.prompt import PromptBuilder
from coordexp.target import build_segment
from coordexp.vocab import VocabularyTable


@dataclass(frozen=True)
class GroundTruth:
    """Channel A: the true objects of record `index`, all of them missed by a rollout that said nothing."""

    records: RecordFile
    prompts: PromptBuilder
    table: VocabularyTable
    settings: Settings

    def __call__(self, index: int) -> Example:
        record = self.records[index]
        try:
            truth = record.sample().objects
        except ValueError as error:
            raise RecordError(
                f"{self.records.path}, record {index + 1} ({record.image}): {error}\n"
                f"  run `coordexp data doctor {self.records.path}`"
            ) from error
        empty = parse_rollout([], self.table)
        match = match_objects([], [found.geometry for found in truth], self.settings.rollout_matching)
        segment = build_segment(
            self.prompts.ids(record.width, record.height),
            empty,
            match,
            truth,
            table=self.table,
            order=self.settings.custom.object_field_order,
            settings=self.settings.rollout_matching,
        )
        return Example(segment, str(self.records.image_path(record)), (record.width, record.height), "A")
