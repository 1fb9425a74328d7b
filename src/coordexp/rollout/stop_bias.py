"""The tokens that close an answer, and the bias against them (`Decode.stop_bias`). Imports no torch.

The last two characters of an answer with objects are `}}`: the end of its last object and its own end. Some
vocabularies have tokens for both (`}}` or `"}}`, as that of Qwen); others write two tokens, and then the second
one closes the answer. An empty answer, `{}`, has no `}}`, so the bias does not change whether an answer is empty.
"""

from dataclasses import dataclass

from coordexp.errors import EngineError
from coordexp.rollout.backend import Decode
from coordexp.vocab import VocabularyTable

END = b"}}"
SHORT_ANSWERS = (b'{"object_1": {"desc": "a", "bbox_2d": []}}', b'{"object_1": {"bbox_2d": [], "desc": "a"}}')


@dataclass(frozen=True)
class ClosingTokens:
    """The ids of the tokens that complete `}}`: those of `alone` after any token, and those of `after` only after
    a token of `before`."""

    alone: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, table: VocabularyTable) -> "ClosingTokens":
        pieces = [(id, piece) for id, piece in enumerate(table.pieces) if b"}" in piece]
        return cls(
            tuple(id for id, piece in pieces if END in piece),
            tuple(id for id, piece in pieces if piece.endswith(b"}")),
            tuple(id for id, piece in pieces if piece.startswith(b"}") and END not in piece),
        )


def engine_bias(decode: Decode, table: VocabularyTable) -> dict[int, float]:
    """Return what a vLLM engine adds to the logits of tokens, by id.

    An engine applies it without looking at the token before. So it reaches only tokens that close an answer
    alone. Raise EngineError if the tokenizer closes answers with others."""
    if not decode.stop_bias:
        return {}
    closing = ClosingTokens.of(table)
    if any(table.encode(answer)[-1] not in closing.alone for answer in SHORT_ANSWERS):
        raise EngineError(
            f"stop bias {decode.stop_bias:g}: this tokenizer has no single token for the end of an answer, "
            f"{END.decode()}, so a vLLM engine cannot apply it",
            "use --backend hf",
        )
    return dict.fromkeys(closing.alone, -decode.stop_bias)
