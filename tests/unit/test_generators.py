import re
import sys
from pathlib import Path

import pytest

from megatron_p3o.config import DataSection
from megatron_p3o.data.generators import arithmetic, resolve_generator, running_sums
from megatron_p3o.data.prompts import PromptItem, load_prompts
from megatron_p3o.data.rewards import integer_match
from megatron_p3o.errors import ConfigurationError, InputError


def generated(name: str, **arguments: object) -> DataSection:
    return DataSection(source="generator", generator=name, generator_args=arguments)


def test_arithmetic_default_is_single_digit_addition() -> None:
    problems = arithmetic()
    assert len(problems) == 100
    assert problems[0] == ("What is 0+0? Answer with just the number.", "0")
    assert problems[43] == ("What is 4+3? Answer with just the number.", "7")
    assert len(set(problems)) == 100


def test_arithmetic_order_and_values_of_several_operations() -> None:
    problems = arithmetic(
        operations=["-", "*"], min_operand=2, max_operand=3, template="{a}{op}{b}="
    )
    assert problems == [
        ("2-2=", "0"),
        ("2-3=", "-1"),
        ("3-2=", "1"),
        ("3-3=", "0"),
        ("2*2=", "4"),
        ("2*3=", "6"),
        ("3*2=", "6"),
        ("3*3=", "9"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"operations": []}, r"operations=\[\] must be a list of distinct ones of \['\+'"),
        ({"operations": "+-"}, "operations='\\+-' must be a list"),
        ({"operations": ["/"]}, r"operations=\['/'\]"),
        ({"operations": [["+"]]}, "operations="),
        ({"operations": ["+", "+"]}, "distinct"),
        ({"max_operand": 1.5}, "max_operand=1.5 must be a whole number"),
        ({"min_operand": True}, "min_operand=True must be a whole number"),
        ({"min_operand": 5, "max_operand": 4}, "max_operand=4 must be >= min_operand=5"),
        ({"max_operand": 10**6}, "more than 10000000"),
        ({"template": "{a}+{b}"}, "template='{a}\\+{b}' must be text with the fields"),
        ({"template": "{a}{op}{b}{c}"}, "template="),
        ({"template": "{a}{op}{b"}, "template="),
        ({"template": "{a!r}{op}{b:>3}"}, "template="),
        ({"template": 3}, "template=3"),
        ({"max_operands": 3}, "unexpected keyword argument 'max_operands'"),
    ],
)
def test_arithmetic_refuses_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_prompts(generated("arithmetic", **arguments))


def test_arithmetic_through_the_configuration() -> None:
    prompts = load_prompts(generated("arithmetic", operations=["-"], max_operand=1))
    assert prompts[1] == PromptItem("1", "What is 0-1? Answer with just the number.", "-1")
    assert [item.answer for item in prompts] == ["0", "-1", "1", "0"]


@pytest.mark.parametrize(("num_terms", "max_term"), [(2, 1), (4, 9), (7, 120)])
def test_running_sums_show_every_step_and_their_last_number_verifies(
    num_terms: int, max_term: int
) -> None:
    problems = running_sums(num_prompts=500, num_terms=num_terms, max_term=max_term, seed=3)
    assert len(problems) == 500
    for prompt, answer in problems:
        first, *rest = re.findall(r"[+-]?\d+", prompt)
        assert "".join([first, *rest, "="]) == prompt
        assert len(rest) == num_terms - 1
        assert all(1 <= int(term.lstrip("+-")) <= max_term for term in [first, *rest])
        total, totals = int(first), []
        for term in rest:
            total += int(term)
            totals.append(total)
        assert min(totals) >= 0
        assert answer == "=".join(map(str, totals))
        assert integer_match(prompt, answer, answer) == 1.0
        assert integer_match(prompt, str(total), answer) == 1.0
        assert integer_match(prompt, str(total + 1), answer) == 0.0
        # The wrong steps and the right end: only supervised training sees the difference.
        assert integer_match(prompt, f"0=1={total}", answer) == 1.0
    signs = "".join(prompt for prompt, _ in problems)
    assert 0.2 < signs.count("-") / (signs.count("-") + signs.count("+")) < 0.6


def test_running_sums_are_drawn_from_their_seed() -> None:
    assert running_sums(num_prompts=3, seed=1) == running_sums(num_prompts=9, seed=1)[:3]
    assert running_sums(num_prompts=9, seed=1) != running_sums(num_prompts=9, seed=2)
    prompts = load_prompts(generated("running_sums", num_prompts=2, num_terms=2, max_term=3))
    assert [(p.prompt, p.answer) for p in prompts] == running_sums(
        num_prompts=2, num_terms=2, max_term=3
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_prompts": 0}, "num_prompts=0 must be a whole number from 1 to 10000000; mend it"),
        ({"num_prompts": 10**8}, "num_prompts=100000000 must be a whole number from 1"),
        ({"num_terms": 1}, "num_terms=1 must be a whole number from 2"),
        ({"max_term": 2.0}, "max_term=2.0 must be a whole number from 1"),
        ({"max_term": True}, "max_term=True must be"),
        ({"seed": -1}, "seed=-1 must be a whole number from 0"),
        ({"terms": 3}, "unexpected keyword argument 'terms'"),
    ],
)
def test_running_sums_refuse_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_prompts(generated("running_sums", **arguments))


USER_MODULE = """
def pairs(count):
    for i in range(count):
        yield f"say {i}", i
def dicts():
    return [{"prompt": "p", "answer": "a", "more": 1}]
def broken():
    yield "p", "a"
    raise KeyError("gone")
def triples():
    return [("p", "a"), ("p", "a", "b")]
def texts():
    return ["ab"]
def wrong_type():
    return [(1, "a")]
def nothing():
    return None
def empty():
    return []
constant = 3
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_generators.py").write_text(USER_MODULE)
    (tmp_path / "broken_module.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_generators", raising=False)
    return "my_generators"


def test_user_generators_give_pairs_or_dicts(user_module: str) -> None:
    assert load_prompts(generated(f"{user_module}:pairs", count=2)) == (
        PromptItem("0", "say 0", "0"),
        PromptItem("1", "say 1", "1"),
    )
    assert load_prompts(generated(f"{user_module}:dicts")) == (PromptItem("0", "p", "a"),)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("broken", "data.generator='my_generators:broken' .* failed: KeyError: 'gone'"),
        ("nothing", "failed: TypeError: 'NoneType' object is not iterable"),
        ("triples", r"item 1 is \('p', 'a', 'b'\); it must be a pair"),
        ("texts", "item 0 is 'ab'; it must be a pair"),
        ("wrong_type", r"item 0 field 'prompt' is 1 \(int\); it must be text"),
        ("empty", "has no prompts"),
    ],
)
def test_user_generator_that_gives_something_else(
    user_module: str, function: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_prompts(generated(f"{user_module}:{function}"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fibonacci", "must be arithmetic or running_sums, or an import path"),
        ("my_generators:", "must be module:function"),
        ("no_such_module:f", "module 'no_such_module' cannot be imported .*No module named"),
        ("broken_module:f", "cannot be imported .ZeroDivisionError"),
        ("my_generators:other", "has no 'other'"),
        ("my_generators:constant", "is a int, which cannot be called"),
        ("my_generators:pairs", "keyword arguments .*missing a required argument: 'count'"),
    ],
)
def test_generator_that_cannot_be_resolved(user_module: str, name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve_generator(name)
