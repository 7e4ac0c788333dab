"""From a YAML file and command-line words to a validated tree, and back."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_p3o.config.objectives import OBJECTIVE_NAMES
from megatron_p3o.config.sections import RunConfig
from megatron_p3o.errors import ConfigurationError


class _Loader(yaml.SafeLoader):
    """YAML whose numbers are those of YAML 1.2 and JSON: `1e-5` is a number, not text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply `--section.field value` overrides, validate.

    Args:
        path: the YAML file.
        overrides: command-line words, such as `["--optimizer.lr", "1e-5", "--run.seed=3"]`.
            Values are read as YAML.

    Raises:
        ConfigurationError: the file is missing or no YAML mapping, an override is malformed, or
            any rule is broken; the message names every offending field.
    """
    tree = read_mapping(path, sections="run, model, data, train")
    for dotted, value in parse_overrides(overrides):
        set_dotted(tree, dotted, value)
    return parse_config(tree)


def read_mapping(path: str | Path, *, sections: str) -> dict[str, Any]:
    """The YAML mapping in a file, not validated.

    Args:
        path: the YAML file.
        sections: what a right one holds, for the message.

    Raises:
        ConfigurationError: the file is missing, no text, or no YAML mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"configuration file {str(path)!r} cannot be read: {error}"
        ) from error
    try:
        tree = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigurationError(
            f"configuration file {str(path)!r} is not YAML: {error}"
        ) from error
    if not isinstance(tree, dict):
        raise ConfigurationError(
            f"configuration file {str(path)!r} must hold a mapping with sections such as "
            f"{sections}; it holds {type(tree).__name__}"
        )
    return tree


def parse_config(tree: Mapping[str, Any]) -> RunConfig:
    """Validate a nested mapping.

    Raises:
        ConfigurationError: names every field that breaks a rule.
    """
    try:
        objective = tree.get("objective", {})
        if isinstance(objective, Mapping):
            tree = {**tree, "objective": {"name": "p3o", **objective}}
        # JSON mode, strict: "8" or true is no integer, 1 is a float, a list is a tuple.
        return RunConfig.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise ConfigurationError(explain(error, hidden=OBJECTIVE_NAMES)) from error


def parse_overrides(words: Sequence[str]) -> list[tuple[str, Any]]:
    """`["--a.b", "1", "--c.d=x"]` -> `[("a.b", 1), ("c.d", "x")]`; values are read as YAML.

    Raises:
        ConfigurationError: a word is not `--section.field`, or its value is missing or no YAML.
    """
    pairs = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--") or "." not in word.partition("=")[0]:
            raise ConfigurationError(
                f"override {word!r} must be --section.field VALUE, such as --optimizer.lr 1e-5"
            )
        dotted, equals, raw = word[2:].partition("=")
        if not equals:
            if not remaining:
                raise ConfigurationError(f"override --{dotted} needs a value; add one after it")
            raw = remaining.pop(0)
        try:
            pairs.append((dotted, yaml.load(raw, _Loader)))
        except yaml.YAMLError as error:
            raise ConfigurationError(f"override --{dotted} {raw!r} is not YAML: {error}") from error
    return pairs


def to_yaml(config: RunConfig) -> str:
    """The resolved configuration; `load_config` of it gives an equal tree."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def json_schema() -> str:
    """JSON schema of the configuration, for editors and documentation."""
    return json.dumps(RunConfig.model_json_schema(), indent=2)


def set_dotted(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set `section.field` in a nested mapping, making sections on the way.

    Raises:
        ConfigurationError: a part before the last is a value.
    """
    *parents, leaf = dotted.split(".")
    node = tree
    for depth, name in enumerate(parents):
        child = node.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigurationError(
                f"override --{dotted}: {'.'.join(parents[: depth + 1])} is a value, not a section"
            )
        node = child
    node[leaf] = value


def explain(error: ValidationError, *, hidden: Collection[str] = ()) -> str:
    """One line for each field that breaks a rule.

    Args:
        error: of pydantic.
        hidden: parts of a location to leave out: a discriminated union adds its tag, and the
            user's file has no such level.
    """
    lines = []
    for item in error.errors():
        location = [str(part) for part in item["loc"] if part not in hidden]
        field = ".".join(location)
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "value_error":
            # Rules name fields from the top, but a section may also stand inside of another.
            is_nested = field.startswith("eval.")
            lines.append(f"{field}: {message}" if is_nested else message)
        elif item["type"] == "extra_forbidden":
            lines.append(f"{field}={item['input']!r}: no such field; remove it or mend its name")
        elif item["type"] == "union_tag_invalid":
            known = ", ".join(OBJECTIVE_NAMES)
            lines.append(f"{field}.name={item['ctx']['tag']!r} must be one of {known}")
        elif item["type"] == "missing":
            lines.append(f"{field} is missing; set it")
        else:
            lines.append(f"{field}={item['input']!r}: {message}")
    return "\n".join(lines)
