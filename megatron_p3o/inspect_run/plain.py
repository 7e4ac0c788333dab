"""Text of a model made safe to print."""

import unicodedata

# Controls, invisible formatting (also text that runs backwards), lone surrogates, separators.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def plain(text: str) -> str:
    """The text with all but newlines and tabs of what is not visible written as an escape.

    A model can answer with a terminal's control sequences, which must not reach a terminal.
    Brackets are left alone: rich gets the text as `Text`, which has no markup.
    """
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) not in _HIDDEN
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
