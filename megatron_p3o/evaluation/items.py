"""What an evaluation leaves behind: items.jsonl and summary.json, both whole or not at all.

<out>/items.jsonl    one JSON object a prompt, in the order of the data
<out>/summary.json   settings and figures
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_p3o.errors import InputError
from megatron_p3o.evaluation.pass_at_k import pass_at_k

ITEMS = "items.jsonl"
SUMMARY = "summary.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalItem:
    """A prompt with all its samples; lists are in sample order, [n].

    Example:
        EvalItem(prompt_id="17", prompt="1+7=", answer="8", responses=("8", "9"),
                 rewards=(1.0, 0.0), reward_errors=(None, None), lengths=(2, 2),
                 finish_reasons=("stop", "stop"))
    """

    prompt_id: str
    """Position in the data, from 0."""
    prompt: str
    answer: str
    responses: tuple[str, ...]
    rewards: tuple[float | None, ...]
    """None: the verifier raised or timed out."""
    reward_errors: tuple[str | None, ...]
    lengths: tuple[int, ...]
    """Tokens, with the one that ends the response."""
    finish_reasons: tuple[str, ...]

    @property
    def num_samples(self) -> int:
        return len(self.rewards)

    def mean_reward(self) -> float | None:
        """Over the rewards that are there; None without any."""
        present = [reward for reward in self.rewards if reward is not None]
        return sum(present) / len(present) if present else None

    def num_correct(self, threshold: float) -> int:
        """Samples whose reward is at least the threshold; a failed reward is not."""
        return sum(reward is not None and reward >= threshold for reward in self.rewards)

    def pass_at(self, k: int, threshold: float) -> float:
        """See `pass_at_k`."""
        return pass_at_k(self.num_samples, self.num_correct(threshold), k)


def check_out(out: Path) -> None:
    """Raises InputError unless the directory can be made or is empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(
            f"--out={str(out)!r} already exists; choose another directory, or remove this one"
        )


def write_results(out: Path, items: Sequence[EvalItem], summary: Mapping[str, Any]) -> None:
    """Write both files into a fresh directory, which appears whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    if partial.exists():  # an evaluation that was killed while it wrote
        shutil.rmtree(partial)
    partial.mkdir()
    lines = [json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in items]
    (partial / ITEMS).write_text("".join(lines), encoding="utf-8")
    (partial / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, out)


def read_results(out: Path) -> tuple[list[EvalItem], dict[str, Any]]:
    """The items and the summary of a finished evaluation.

    Raises:
        InputError: the directory is not one, or a file is damaged.
    """
    try:
        summary = json.loads((out / SUMMARY).read_text(encoding="utf-8"))
        lines = (out / ITEMS).read_text(encoding="utf-8").split("\n")
        items = [_item(json.loads(line)) for line in lines if line]
    except OSError as error:
        raise InputError(
            f"{str(out)!r} holds no evaluation ({error}); give an output directory of `p3o eval`"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{str(out)!r} is damaged ({error!r}); copy {ITEMS} and {SUMMARY} again, or evaluate "
            "again"
        ) from error
    return items, summary


def _item(record: Mapping[str, Any]) -> EvalItem:
    known: dict[str, Any] = {field.name: record[field.name] for field in fields(EvalItem)}
    for name, value in known.items():
        if isinstance(value, list):
            known[name] = tuple(value)
    return EvalItem(**known)
