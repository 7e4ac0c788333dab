"""Prompt sources: JSONL, parquet and generators, read eagerly and checked item by item.

Everything is read at the start, so that a bad line stops the run before anything heavy begins and
a position in the set means the same prompt for the whole run. Streaming sources are left out.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from megatron_p3o.config import DataSection
from megatron_p3o.data.generators import MAX_PROMPTS, resolve_generator
from megatron_p3o.data.user_code import Captured, one_line
from megatron_p3o.errors import InputError, UserError

_Rows = Iterator[tuple[str, Mapping[str, Any]]]  # (where it is, for messages; field -> value)


@dataclass(frozen=True, slots=True)
class PromptItem:
    """One problem: `prompt` is what the model is asked, `answer` what the verifier compares with.

    Example:
        PromptItem(prompt_id="17", prompt="What is 1+7?", answer="8")
    """

    prompt_id: str
    """The item's position in its source, from 0; blank lines do not count."""
    prompt: str
    answer: str


class PromptSet(tuple[PromptItem, ...]):
    """All prompts of a run, in source order; `prompts[i].prompt_id == str(i)`. Never empty."""

    def fingerprint(self) -> str:
        """Hex digest of all prompts and answers: equal for equal data, whatever its file format."""
        digest = hashlib.sha256()
        for item in self:
            digest.update(json.dumps([item.prompt, item.answer]).encode())
        return digest.hexdigest()


def load_prompts(config: DataSection) -> PromptSet:
    """Read and check every prompt of the configured source.

    Answers that are numbers become text (7 -> "7"). Blank lines of a JSONL file are skipped.

    Raises:
        ConfigurationError: the generator cannot be imported or does not take its arguments.
        InputError: the source is missing, unreadable or empty, or an item lacks a field or holds
            a wrong type; the message names file, line or row, and field.
    """
    rows = {"jsonl": _jsonl_rows, "parquet": _parquet_rows, "generator": _generator_rows}
    items = PromptSet(
        PromptItem(
            prompt_id=str(index),
            prompt=_text(row, config.prompt_field, "prompt_field", where, numbers=False),
            answer=_text(row, config.answer_field, "answer_field", where, numbers=True),
        )
        for index, (where, row) in enumerate(rows[config.source](config))
    )
    if not items:
        raise InputError(f"{_source_name(config)} has no prompts; it needs at least one")
    return items


def _source_name(config: DataSection) -> str:
    if config.source == "generator":
        return f"data.generator={config.generator!r}"
    return f"data.path={config.path!r}"


def _existing_file(config: DataSection) -> Path:
    path = Path(str(config.path))
    if not path.is_file():
        state = "is a directory" if path.is_dir() else "does not exist"
        raise InputError(
            f"{_source_name(config)} {state} (as seen from {Path.cwd()}); "
            f"give a {config.source} file"
        )
    return path


def _jsonl_rows(config: DataSection) -> _Rows:
    path = _existing_file(config)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{_source_name(config)} cannot be read as UTF-8: {error}") from error
    # Not splitlines(): JSON text may hold U+2028 and its like, which that takes for line ends.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{_source_name(config)} line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{where} column {error.colno} is not JSON: {error.msg}; "
                "each line must be one JSON object"
            ) from error
        except (ValueError, RecursionError) as error:  # an endless integer; nested too deeply
            raise InputError(f"{where} cannot be read: {error}; mend the line") from error
        if not isinstance(row, dict):
            raise InputError(
                f"{where} is a JSON {type(row).__name__}, not an object; each line must look like "
                f'{{"{config.prompt_field}": "...", "{config.answer_field}": "..."}}'
            )
        yield where, row


def _parquet_rows(config: DataSection) -> _Rows:
    path = _existing_file(config)
    try:
        present = pyarrow.parquet.read_schema(path).names
        # Only the two columns are read; when one is missing, row 0 says which are there.
        wanted = [name for name in (config.prompt_field, config.answer_field) if name in present]
        table = pyarrow.parquet.ParquetFile(path).read(columns=wanted)
        columns = {name: table.column(name).to_pylist() for name in wanted}
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{_source_name(config)} cannot be read as parquet: {error}; "
            "give a parquet file, or set data.source=jsonl"
        ) from error
    for number in range(table.num_rows):
        row = dict.fromkeys(present) | {name: columns[name][number] for name in wanted}
        yield f"{_source_name(config)} row {number}", row


def _generator_rows(config: DataSection) -> _Rows:
    name = str(config.generator)
    function = resolve_generator(name, config.generator_args)
    with Captured() as captured:
        outputs = list(islice(function(**config.generator_args), MAX_PROMPTS + 1))
    if captured.error is not None:
        if isinstance(captured.error, UserError):
            raise captured.error
        raise InputError(
            f"{_source_name(config)} with data.generator_args={config.generator_args} failed: "
            f"{one_line(captured.error)}; it must return an iterable of (prompt, answer)"
        ) from captured.error
    if len(outputs) > MAX_PROMPTS:
        raise InputError(
            f"{_source_name(config)} gives more than {MAX_PROMPTS} prompts; it must end"
        )
    for number, output in enumerate(outputs):
        where = f"{_source_name(config)} item {number}"
        if isinstance(output, (tuple, list)) and len(output) == 2:
            yield where, dict(zip((config.prompt_field, config.answer_field), output, strict=True))
        elif isinstance(output, Mapping):
            yield where, output
        else:
            raise InputError(
                f"{where} is {output!r:.100}; it must be a pair (prompt, answer) or a dict with "
                f"{config.prompt_field!r} and {config.answer_field!r}"
            )


def _text(row: Mapping[str, Any], name: str, option: str, where: str, *, numbers: bool) -> str:
    if name not in row:
        raise InputError(
            f"{where} has no field {name!r} (data.{option}); its fields are {list(row)}; "
            f"set data.{option} to one of them"
        )
    value = row[name]
    if numbers and isinstance(value, (int, float)) and not isinstance(value, bool):
        if isinstance(value, int) or math.isfinite(value):
            return str(value)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{where} field {name!r} is not valid text: {error}") from error
        return value
    allowed = "text or a finite number" if numbers else "text"
    raise InputError(
        f"{where} field {name!r} is {value!r:.100} ({type(value).__name__}); it must be {allowed}"
    )
