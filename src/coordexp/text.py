"""Text that can be written as UTF-8. Imports nothing, so that every module can ask."""


def encodable(text: str) -> bool:
    """Whether it holds no half of a character, a lone surrogate, which UTF-8 cannot say."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
