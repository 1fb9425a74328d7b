"""The number of tokens of training examples, without making the examples: for checks of whole data files. Imports
no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordexp.answers.formats import AnswerFormat
from coordexp.answers.segment import count_answer_tokens
from coordexp.data import AnyRecord, ChatRecord, Questions
from coordexp.data.doctor.examine import ExampleTokens

if TYPE_CHECKING:
    from coordexp.rollout.prompt import PromptBuilder


@dataclass(frozen=True)
class ExampleCounter:
    """Counts the tokens of the examples that training makes of records and their own requests."""

    answers: AnswerFormat
    prompts: "PromptBuilder"
    questions: Questions

    def __call__(self, record: AnyRecord) -> ExampleTokens:
        """Return the tokens of the prompt, with those of the image, and of the answer. Raise ValueError if the
        format of answers cannot express an object."""
        if isinstance(record, ChatRecord):
            return ExampleTokens(
                self._count_prompt(record), count_answer_tokens(record.answer, self.answers.table)
            )
        return ExampleTokens(self._count_prompt(record), self.answers.count(record.true_objects()))

    def _count_prompt(self, record: AnyRecord) -> int:
        question = record.question if isinstance(record, ChatRecord) else self.questions.ask(record)
        if record.image is None:
            return self.prompts.count(None, question=question)
        return self.prompts.count((record.width, record.height), record.image, question)
