"""Prompts that are computed, not read: `arithmetic`, `running_sums`, and functions of the user.

A generator is a function that takes `data.generator_args` as keyword arguments and returns
(prompt, answer) pairs, or dicts with the keys `data.prompt_field` and `data.answer_field`. It
must be deterministic: the draw order and a resumed run refer to prompts by their position.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from operator import add, mul, sub
from string import Formatter
from types import MappingProxyType
from typing import Any

from megatron_p3o.data.user_code import check_keywords, import_function
from megatron_p3o.errors import ConfigurationError

MAX_PROMPTS = 10_000_000  # prompts are held in memory; more is an endless generator or a slip

_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}
_TEMPLATE = "What is {a}{op}{b}? Answer with just the number."


def arithmetic(
    *,
    operations: Sequence[str] = ("+",),
    max_operand: int = 9,
    min_operand: int = 0,
    template: str = _TEMPLATE,
) -> list[tuple[str, str]]:
    """All problems `a op b` with both operands in `[min_operand, max_operand]`.

    Args:
        operations: any of `+`, `-`, `*`, each at most once.
        template: the prompt, with the fields `{a}`, `{op}` and `{b}`.

    Returns:
        (prompt, answer) pairs, ordered by operation, then a, then b.

    Raises:
        ConfigurationError: an argument breaks its rule.
    """
    _check_arithmetic(operations, max_operand, min_operand, template)
    operands = range(min_operand, max_operand + 1)
    return [
        (template.format(a=a, op=op, b=b), str(_OPERATIONS[op](a, b)))
        for op, a, b in product(operations, operands, operands)
    ]


def running_sums(
    *,
    num_prompts: int = 1000,
    num_terms: int = 4,
    max_term: int = 9,
    error_rate: float = 0.0,
    seed: int = 0,
) -> list[tuple[str, str]]:
    """Sums of several terms, with every intermediate result in the answer.

    `7+5-3+6=` has the answer `12=9=15`. No intermediate result is negative. A verifier of the last
    integer sees the result alone; supervised training sees the steps too.

    Args:
        num_prompts: drawn with replacement.
        num_terms: of each sum, at least 2.
        max_term: greatest term; the least is 1.
        error_rate: share of steps whose result is off by one or two, and carried on: answers of a
            teacher that makes mistakes, for supervised training.
        seed: of the draw.

    Returns:
        (prompt, answer) pairs.

    Raises:
        ConfigurationError: an argument is not in its range.
    """
    for name, value, least in (
        ("num_prompts", num_prompts, 1),
        ("num_terms", num_terms, 2),
        ("max_term", max_term, 1),
        ("seed", seed, 0),
    ):
        if type(value) is not int or not least <= value <= MAX_PROMPTS:
            raise ConfigurationError(
                f"data.generator_args.{name}={value!r} must be a whole number from {least} to "
                f"{MAX_PROMPTS}; mend it"
            )
    if not isinstance(error_rate, (int, float)) or not 0 <= error_rate <= 1:
        raise ConfigurationError(
            f"data.generator_args.error_rate={error_rate!r} must be a number from 0 to 1; mend it"
        )
    generator = random.Random(seed)
    return [_running_sum(generator, num_terms, max_term, error_rate) for _ in range(num_prompts)]


def _running_sum(
    generator: random.Random, num_terms: int, max_term: int, error_rate: float
) -> tuple[str, str]:
    total = said = generator.randint(1, max_term)
    prompt, results = str(total), []
    for _ in range(num_terms - 1):
        term = generator.randint(1, max_term)
        change = -term if term <= total and generator.random() < 0.5 else term
        total, said = total + change, said + change
        prompt += f"{change:+d}"
        if error_rate and generator.random() < error_rate:
            said += generator.choice((-2, -1, 1, 2))
        said = max(0, said)
        results.append(str(said))
    return f"{prompt}=", "=".join(results)


def resolve_generator(name: str, arguments: Iterable[str] = ()) -> Callable[..., Iterable[Any]]:
    """A built-in generator, or the function at the import path `module:function`.

    Args:
        name: `data.generator`.
        arguments: the names in `data.generator_args`, which the function must accept.

    Raises:
        ConfigurationError: no such generator, or it does not take these arguments.
    """
    if name in _BUILT_IN:
        function = _BUILT_IN[name]
    elif ":" in name:
        function = import_function(name, "data.generator")
    else:
        raise ConfigurationError(
            f"data.generator={name!r} must be {' or '.join(_BUILT_IN)}, or an import path "
            "module:function; mend the name"
        )
    check_keywords(function, name, "data.generator", arguments)
    return function


_BUILT_IN: Mapping[str, Callable[..., Iterable[Any]]] = MappingProxyType(
    {"arithmetic": arithmetic, "running_sums": running_sums}
)


def _check_arithmetic(operations: Any, max_operand: Any, min_operand: Any, template: Any) -> None:
    def refuse(name: str, value: Any, rule: str) -> ConfigurationError:
        return ConfigurationError(f"data.generator_args.{name}={value!r} must be {rule}; mend it")

    if (
        not isinstance(operations, (list, tuple))
        or not operations
        or any(op not in list(_OPERATIONS) for op in operations)
        or len(set(operations)) < len(operations)
    ):
        raise refuse("operations", operations, f"a list of distinct ones of {list(_OPERATIONS)}")
    for name, value in (("min_operand", min_operand), ("max_operand", max_operand)):
        if type(value) is not int:
            raise refuse(name, value, "a whole number")
    if max_operand < min_operand:
        raise refuse("max_operand", max_operand, f">= min_operand={min_operand}")
    num_prompts = len(operations) * (max_operand - min_operand + 1) ** 2
    if num_prompts > MAX_PROMPTS:
        raise refuse(
            "max_operand",
            max_operand,
            f"smaller: it gives {num_prompts} prompts, more than {MAX_PROMPTS}",
        )
    if not isinstance(template, str) or _fields(template) != {"a", "op", "b"}:
        raise refuse("template", template, "text with the fields {a}, {op} and {b}")


def _fields(template: str) -> set[str | None] | None:
    """The plain fields of a format string; None when it is malformed or a field is not plain."""
    try:
        parts = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    except ValueError:
        return None
    if any(spec or conversion for _, spec, conversion in parts):
        return None
    return {name for name, _, _ in parts}
