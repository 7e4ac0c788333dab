"""Which part of a response's text each of its tokens is."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from megatron_p3o.config import read_mapping
from megatron_p3o.errors import ConfigurationError

_REPLACEMENT = "\ufffd"
# UTF-8 has no longer character, and a byte-level token has at least one byte.
_MAX_TOKENS_OF_CHARACTER = 4


def read_tokenizer(config: Path) -> Tokenizer | None:
    """The tokenizer of the model in a config.yaml, read without transformers and torch.

    None where there is no config.yaml, or no tokenizer.json in model.path, which may be of another
    machine.
    """
    try:
        model = read_mapping(config, sections="run, model").get("model")
    except ConfigurationError:
        return None
    path = model.get("path") if isinstance(model, dict) else None
    file = Path(str(path)) / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if path and file.is_file() else None


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[tuple[str, int, int]]:
    """The text of each token, special tokens included: (text, first token, one past the last).

    Tokens that are only together a whole character make one piece. Each is decoded behind its
    predecessor, since some tokenizers drop the space that begins a text.
    """
    found = []
    start = 0
    while start < len(ids):
        before = list(ids[max(0, start - 1) : start])
        head = tokenizer.decode(before, skip_special_tokens=False)
        for stop in range(start + 1, min(start + _MAX_TOKENS_OF_CHARACTER, len(ids)) + 1):
            whole = tokenizer.decode([*before, *ids[start:stop]], skip_special_tokens=False)
            if not whole.endswith(_REPLACEMENT):
                break
        else:  # broken for good: the token alone
            stop = start + 1
            whole = tokenizer.decode([*before, ids[start]], skip_special_tokens=False)
        text = whole.removeprefix(head) if whole.startswith(head) else whole
        found.append((text, start, stop))
        start = stop
    return found
