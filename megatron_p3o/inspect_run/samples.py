"""Reads one step of a samples.jsonl, and chooses which of its samples to look at."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_p3o.errors import InputError
from megatron_p3o.run_dir import parse_record

EXTREME_LOGPROB = -15.0
"""nats. A sampler draws a token this unlikely less than once in 3 million times."""
# How the recorder begins a line; other writers' lines are parsed to find their step.
_STEP = re.compile(rb'\{"step": (\d+), ')


class Order(Enum):
    RECORDED = "recorded"
    WORST = "worst"
    BEST = "best"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedSample:
    """A line of samples.jsonl, as far as it is shown.

    Example:
        RecordedSample(step=3, name="0-7/1", prompt="1+1=", response="2", response_ids=(17, 2),
                       logprobs=(-0.1, -0.02), finish_reason="stop", reward=1.0, reward_error=None,
                       advantage=0.7, versions=(3, 3), spans=())
    """

    step: int
    name: str
    """prompt_id/sample_index."""
    prompt: str
    response: str
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """nats, under the distribution that the rollout engine sampled from."""
    finish_reason: str
    reward: float | None
    """None when the reward failed."""
    reward_error: str | None
    advantage: float | None
    """None for a sample that was left out of the loss."""
    versions: tuple[int, int]
    """Least and greatest weight version of its tokens."""
    spans: tuple[tuple[int, int, int], ...]
    """(version, first token, one past the last), where the version changed on the way."""

    def flags(self) -> list[str]:
        """What may be wrong with it."""
        found = []
        if self.reward is None:
            found.append(f"reward failed: {self.reward_error or 'no reason recorded'}")
        if self.finish_reason == "length":
            found.append("truncated")
        odd = [i for i, value in enumerate(self.logprobs) if not EXTREME_LOGPROB <= value <= 0]
        if odd:
            # The least; NaN before all others, since nothing else is as wrong.
            index = min(odd, key=lambda i: (not math.isnan(self.logprobs[i]), self.logprobs[i]))
            found.append(
                f"{len(odd)} tokens of extreme log-prob: {self.logprobs[index]:.1f} at {index}"
            )
        return found


def read_step(path: Path, step: int | None) -> list[RecordedSample]:
    """The samples of a step, in recorded order. Lines of other steps are not checked.

    Args:
        path: a samples.jsonl; a half-written last line is left out.
        step: counted from 0; None for the last that was recorded.

    Raises:
        InputError: the file cannot be read or holds no such step, or a line is no sample.
    """
    try:
        with path.open("rb") as file:
            places: dict[int, list[tuple[int, int]]] = defaultdict(list)
            offset = 0
            for number, line in enumerate(file, start=1):
                found = _step_of(line, path, number)
                if found is not None:
                    places[found].append((offset, number))
                offset += len(line)
            if not places:
                raise InputError(f"{str(path)!r} holds no samples yet; wait for the first step")
            chosen = max(places) if step is None else step
            if chosen not in places:
                raise InputError(
                    f"--step {chosen} is not in {str(path)!r}, which holds {len(places)} steps "
                    f"from {min(places)} to {max(places)}; choose one of them"
                )
            samples = []
            for offset, number in places[chosen]:
                file.seek(offset)
                samples.append(_sample(file.readline(), path, number))
            return samples
    except OSError as error:
        raise InputError(
            f"{str(path)!r} cannot be read ({error.strerror}); give the dir of a run with "
            "run.record=true"
        ) from error


def choose(
    samples: Sequence[RecordedSample], order: Order, *, only_flagged: bool, limit: int
) -> list[RecordedSample]:
    """The first so many by reward, equal ones as recorded. Failed rewards come last."""
    chosen = [sample for sample in samples if not only_flagged or sample.flags()]
    if order is not Order.RECORDED:
        sign = 1 if order is Order.WORST else -1
        chosen.sort(key=lambda s: math.inf if s.reward is None else sign * s.reward)
    return chosen[:limit]


def _step_of(line: bytes, path: Path, number: int) -> int | None:
    """The line's step; None for an empty line and a half-written last one."""
    if not line.strip():
        return None
    is_whole = line.endswith(b"\n")
    if is_whole and (match := _STEP.match(line)):
        return int(match[1])
    record = parse_record(line)
    if record is None and is_whole:
        raise InputError(
            f"{str(path)!r}, line {number}: not a JSON object with a step; remove or mend the line"
        )
    return None if record is None else record["step"]


def _sample(line: bytes, path: Path, number: int) -> RecordedSample:
    where = f"{str(path)!r}, line {number}"
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON ({error}); remove or mend the line") from error
    try:
        sample = RecordedSample(
            step=int(record["step"]),
            name=f"{record['prompt_id']}/{record['sample_index']}",
            prompt=str(record.get("prompt_text", "")),
            response=str(record.get("response_text", "")),
            response_ids=tuple(map(int, record["response_ids"])),
            logprobs=tuple(map(float, record["rollout_logprobs"])),
            finish_reason=str(record["finish_reason"]),
            reward=_number(record.get("reward")),
            reward_error=record.get("reward_error"),
            advantage=_number(record.get("advantage")),
            versions=(int(record["weight_version_min"]), int(record["weight_version_max"])),
            spans=tuple((int(v), int(a), int(b)) for v, a, b in record.get("version_spans", ())),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where}: not a recorded sample ({error!r}); remove it") from error
    if len(sample.response_ids) != len(sample.logprobs):
        raise InputError(
            f"{where}: {len(sample.response_ids)} response_ids but {len(sample.logprobs)} "
            "rollout_logprobs; remove the line, or record the run again"
        )
    return sample


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
