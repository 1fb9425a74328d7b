"""The meaning of each token id: bytes, a coordinate or a stop. `expand` adds coordinate tokens to a checkpoint."""

from coordexp.vocab.table import COORD_TOKENS, VocabularyError, VocabularyTable

__all__ = ["COORD_TOKENS", "VocabularyError", "VocabularyTable"]
