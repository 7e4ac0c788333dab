import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron_p3o.config import DataSection
from megatron_p3o.data.cursor import DrawnPrompt, PromptCursor
from megatron_p3o.data.encoder import PromptEncoder
from megatron_p3o.data.prompts import PromptItem, load_prompts
from megatron_p3o.errors import ConfigurationError, InputError


def jsonl(path: Path, **fields: Any) -> DataSection:
    return DataSection(source="jsonl", path=str(path), **fields)


# --- sources


def test_jsonl_skips_blank_lines_and_turns_numbers_into_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '\ufeff{"prompt": "1+1", "answer": 2}\r\n\n   \n'
        '{"prompt": "half\u2028", "answer": 0.5, "more": null}\n'
        '{"prompt": "big", "answer": ' + "9" * 400 + "}",
        encoding="utf-8",
    )
    assert load_prompts(jsonl(path)) == (
        PromptItem("0", "1+1", "2"),
        PromptItem("1", "half\u2028", "0.5"),
        PromptItem("2", "big", "9" * 400),
    )


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.tuples(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8"))),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
)
def test_any_text_survives_jsonl_and_parquet(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], ensure_ascii: bool
) -> None:
    folder = tmp_path_factory.mktemp("prompts")
    lines = [json.dumps({"q": q, "a": a}, ensure_ascii=ensure_ascii) for q, a in rows]
    (folder / "p.jsonl").write_bytes("\n".join(lines).encode())
    table = pyarrow.table({"a": [a for _, a in rows], "q": [q for q, _ in rows]})
    pyarrow.parquet.write_table(table, folder / "p.parquet")

    names: dict[str, Any] = {"prompt_field": "q", "answer_field": "a"}
    from_jsonl = load_prompts(jsonl(folder / "p.jsonl", **names))
    from_parquet = load_prompts(
        DataSection(source="parquet", path=str(folder / "p.parquet"), **names)
    )
    assert [(item.prompt, item.answer) for item in from_jsonl] == rows
    assert [item.prompt_id for item in from_jsonl] == [str(i) for i in range(len(rows))]
    assert from_parquet == from_jsonl
    assert from_parquet.fingerprint() == from_jsonl.fingerprint()


def test_fingerprint_tells_changed_data(tmp_path: Path) -> None:
    prints = set()
    for text in ('"ab", "answer": "c"', '"a", "answer": "bc"', '"ab", "answer": "d"'):
        path = tmp_path / "p.jsonl"
        path.write_text('{"prompt": ' + text + "}")
        prints.add(load_prompts(jsonl(path)).fingerprint())
    assert len(prints) == 3


GOOD = b'{"prompt": "p", "answer": "a"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no prompts"),
        (b"\n \n", "has no prompts"),
        (GOOD + b"\n{'prompt': 1}", "line 3 column 2 is not JSON: Expecting property name"),
        (GOOD + b'{"prompt": "p", "answer": "a"', "line 2 column 30 is not JSON"),
        (GOOD + b"[" * 100_000, "line 2 cannot be read"),
        (b'{"prompt": "p", "answer": ' + b"9" * 5000 + b"}", "line 1 cannot be read: Exceeds"),
        (b"[1]", 'line 1 is a JSON list, not an object; each line must look like {"prompt"'),
        (
            GOOD + b'{"question": "p", "answer": "a"}',
            r"line 2 has no field 'prompt' \(data.prompt_field\); "
            r"its fields are \['question', 'answer'\]; set data.prompt_field",
        ),
        (b'{"prompt": "p"}', r"line 1 has no field 'answer' \(data.answer_field\)"),
        (b'{"prompt": 3, "answer": "a"}', r"field 'prompt' is 3 \(int\); it must be text"),
        (b'{"prompt": "p", "answer": true}', r"is True \(bool\); it must be text or a finite"),
        (b'{"prompt": "p", "answer": null}', r"field 'answer' is None \(NoneType\)"),
        (b'{"prompt": "p", "answer": NaN}', r"field 'answer' is nan \(float\)"),
        (b'{"prompt": "\\ud800", "answer": "a"}', "field 'prompt' is not valid text"),
        (b"\xff\xfe", "cannot be read as UTF-8"),
    ],
)
def test_bad_jsonl(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load_prompts(jsonl(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_missing_file_and_directory(tmp_path: Path, source: Any) -> None:
    with pytest.raises(InputError, match=r"no\.file' does not exist"):
        load_prompts(DataSection(source=source, path=str(tmp_path / "no.file")))
    with pytest.raises(InputError, match="is a directory"):
        load_prompts(DataSection(source=source, path=str(tmp_path)))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": ["p", None], "answer": [1, 2]}, r"row 1 field 'prompt' is None"),
        ({"prompt": ["p"], "answer": [[1]]}, r"row 0 field 'answer' is \[1\] \(list\)"),
        ({"prompt": ["p"], "reply": [1]}, r"no field 'answer'.*are \['prompt', 'reply'\]"),
        ({"prompt": pyarrow.array([], "string"), "answer": []}, "has no prompts"),
    ],
)
def test_bad_parquet(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(InputError, match=message):
        load_prompts(DataSection(source="parquet", path=str(path)))


def test_parquet_numbers_and_other_columns(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    columns = {"prompt": ["p", "q"], "answer": [7, -1], "extra": [{"x": 1}, None]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    prompts = load_prompts(DataSection(source="parquet", path=str(path)))
    assert prompts == (PromptItem("0", "p", "7"), PromptItem("1", "q", "-1"))


def test_file_that_is_not_parquet(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    path.write_bytes(GOOD)
    with pytest.raises(InputError, match="cannot be read as parquet"):
        load_prompts(DataSection(source="parquet", path=str(path)))


# --- cursor

cursors = st.tuples(st.integers(1, 20), st.integers(0, 2**63 - 1), st.booleans())


@settings(deadline=None)
@given(cursors, st.lists(st.integers(0, 30), max_size=5), st.integers(0, 60))
def test_restored_cursor_goes_on_identically(
    arguments: tuple[int, int, bool], steps: list[int], more: int
) -> None:
    straight = PromptCursor(*arguments)
    for count in steps:
        straight.take(count)
    saved = json.loads(json.dumps(straight.state()))
    resumed = PromptCursor(*arguments)
    resumed.load_state(saved)
    assert resumed.take(more) == straight.take(more)
    assert resumed.state() == straight.state()


@settings(deadline=None)
@given(cursors, st.lists(st.integers(0, 30), max_size=5))
def test_draws_do_not_depend_on_the_step_size_and_keys_are_unique(
    arguments: tuple[int, int, bool], steps: list[int]
) -> None:
    cursor = PromptCursor(*arguments)
    drawn = [prompt for count in steps for prompt in cursor.take(count)]
    assert drawn == PromptCursor(*arguments).take(sum(steps))
    assert len({prompt.key for prompt in drawn}) == len(drawn)


@settings(deadline=None)
@given(cursors)
def test_every_epoch_draws_every_prompt_once(arguments: tuple[int, int, bool]) -> None:
    num_prompts = arguments[0]
    drawn = PromptCursor(*arguments).take(3 * num_prompts)
    for epoch in range(3):
        part = drawn[epoch * num_prompts : (epoch + 1) * num_prompts]
        assert {prompt.epoch for prompt in part} == {epoch}
        assert sorted(prompt.index for prompt in part) == list(range(num_prompts))


def test_order_is_fixed_for_all_time() -> None:
    """A checkpoint of another Python or library version must go on with the same prompts."""
    order = [prompt.index for prompt in PromptCursor(6, seed=3, shuffle=True).take(12)]
    assert order == [3, 1, 0, 5, 4, 2, 1, 5, 4, 0, 2, 3]
    assert [p.index for p in PromptCursor(6, seed=4, shuffle=True).take(12)] != order


def test_unshuffled_cursor_and_keys() -> None:
    drawn = PromptCursor(2, seed=0, shuffle=False).take(3)
    assert drawn == [DrawnPrompt(0, 0), DrawnPrompt(1, 0), DrawnPrompt(0, 1)]
    assert [prompt.key for prompt in drawn] == ["0-0", "0-1", "1-0"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_prompts": 9}, r"data \(number of prompts\) is 10 but was 9"),
        ({"seed": 1}, "run.seed is 0 but was 1"),
        ({"shuffle": False}, "data.shuffle is True but was False"),
        ({"position": 10}, "damaged"),
        ({"position": "3"}, "damaged"),
        ({"epoch": -1}, "damaged"),
        ({"other": 1}, "damaged"),
    ],
)
def test_state_of_another_order_is_refused(change: dict[str, Any], message: str) -> None:
    cursor = PromptCursor(10, seed=0, shuffle=True)
    first = cursor.take(4)
    with pytest.raises(InputError, match=message):
        cursor.load_state(cursor.state() | change)
    assert cursor.take(6) == PromptCursor(10, 0, True).take(10)[4:]
    assert first == PromptCursor(10, 0, True).take(4)


@pytest.mark.parametrize("name", ["seed", "epoch"])
def test_state_without_a_field_is_refused(name: str) -> None:
    cursor = PromptCursor(10, seed=0, shuffle=True)
    state = cursor.state()
    del state[name]
    with pytest.raises(InputError, match="damaged"):
        cursor.load_state(state)


# --- encoder

TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
ANSWER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}" + ANSWER
# As SmolLM2 and Qwen2.5: words of its own when no system turn is given.
CHATML_DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful model<|im_end|>\n' }}{% endif %}" + CHATML
)
# As Llama 3: a bos token, and a system turn that is always printed, with a date in it.
HEADERS = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set s = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% else %}{% set s = '' %}{% endif %}"
    "{{ '<|system|>\nDate: 26 Jul\n\n' + s + '<|eot|>' }}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# As Llama 2: the system text goes into the user turn.
INST = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ '[INST] <<SYS>>' + messages[0]['content'] + '<</SYS>> ' + messages[1]['content'] }}"
    "{% else %}{{ '[INST] ' + messages[0]['content'] }}{% endif %}{{ ' [/INST]' }}"
)
# As Gemma: no system role.
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ bos_token }}{% for m in messages %}{{ '<t>' + m['content'] + '</t>' }}{% endfor %}"
)
BARE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
LAST_ONLY = "{{ messages[-1]['content'] }}="


def tokenizer(template: str | None, bos: str | None = "<s>") -> PreTrainedTokenizerFast:
    """Byte-level, no merges: the tokens of a text are its bytes and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos)
    made.chat_template = template
    return made


def data(**fields: Any) -> DataSection:
    return DataSection(source="generator", generator="arithmetic", **fields)


@pytest.mark.parametrize(
    ("template", "bos", "expected"),
    [
        (CHATML, "<s>", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML_DEFAULT, None, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML_DEFAULT, "<|im_start|>", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (HEADERS, "<s>", "<s><|user|>\nHi<|eot|><|assistant|>\n"),
        (INST, "<s>", "<s>[INST] Hi [/INST]"),
        (NO_SYSTEM, "<s>", "<s><t>Hi</t>"),
        (BARE, "<s>", "Hi"),
        (LAST_ONLY, "<s>", "Hi="),
    ],
)
def test_no_system_turn_with_any_template(template: str, bos: str | None, expected: str) -> None:
    made = tokenizer(template, bos)
    encoder = PromptEncoder(made, data())
    assert encoder.render("Hi") == expected
    ids = encoder.encode(PromptItem("0", "Hi", ""))
    assert list(ids) == made(expected, add_special_tokens=False)["input_ids"]
    assert made.decode(list(ids)) == expected


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_removing_the_default_turn_keeps_every_prompt(prompt: str) -> None:
    """Also prompts that hold turn marks or the marker texts themselves."""
    hostile = f"{prompt}<|im_end|>\nSYSTEM-TURN-MARKER<|im_start|>USER-TURN-MARKER{prompt}"
    cut = PromptEncoder(WITH_DEFAULT, data())
    never = PromptEncoder(WITHOUT_DEFAULT, data())
    assert cut.render(hostile) == never.render(hostile)


WITH_DEFAULT = tokenizer(CHATML_DEFAULT)
WITHOUT_DEFAULT = tokenizer(CHATML)


def test_configured_system_prompt_is_printed() -> None:
    encoder = PromptEncoder(WITH_DEFAULT, data(system_prompt="Be brief."))
    assert encoder.render("Hi") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_plain_text_has_the_tokenizers_own_special_tokens_and_chat_has_not() -> None:
    made = tokenizer(CHATML)
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $0", special_tokens=[("<s>", made.bos_token_id)]
    )
    plain = PromptEncoder(made, data(chat=False)).encode(PromptItem("0", "Hi", ""))
    assert made.decode(list(plain)) == "<s>Hi"
    chat = PromptEncoder(made, data()).encode(PromptItem("0", "Hi", ""))
    assert chat[0] != made.bos_token_id


@pytest.mark.parametrize(
    ("template", "fields", "message"),
    [
        (None, {}, "data.chat=true needs .* set data.chat=false"),
        (NO_SYSTEM, {"system_prompt": "S"}, "refuses a system and user turn: no system role"),
        (LAST_ONLY, {"system_prompt": "Be kind"}, "'Be kind' is not printed"),
        ("{{ raise_exception('never') }}", {}, "refuses a user turn: never"),
        (
            "S: {{ messages[0]['content'] if messages[0]['role'] == 'system' else 'x' }}, "
            "U: {{ messages[-1]['content'] }}.",
            {},
            "cannot be told from the user turn; set data.system_prompt",
        ),
    ],
)
def test_template_that_does_not_fit(
    template: str | None, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PromptEncoder(tokenizer(template), data(**fields))


def test_prompt_length_limits() -> None:
    encoder = PromptEncoder(tokenizer(None), data(chat=False, max_prompt_tokens=4))
    assert len(encoder.encode(PromptItem("0", "1234", ""))) == 4
    with pytest.raises(InputError, match=r"prompt 17 has 5 tokens, .*max_prompt_tokens=4; shorten"):
        encoder.encode(PromptItem("17", "12345", ""))
    with pytest.raises(InputError, match="prompt 3 has 0 tokens"):
        encoder.encode(PromptItem("3", "", ""))
