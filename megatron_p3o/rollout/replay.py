"""Reads a recorded samples.jsonl back: training without an engine, for exact comparisons."""

import json
from collections import defaultdict
from pathlib import Path

from megatron_p3o.architecture import MoeArchitecture
from megatron_p3o.errors import InputError, RunError
from megatron_p3o.types import Sample, SampleGroup


class ReplayRollouts:
    """A recording's groups by step. Holds an index of line offsets, not the samples."""

    def __init__(
        self,
        path: Path,
        *,
        max_sequence_tokens: int | None = None,
        replayed_moe: MoeArchitecture | None = None,
    ) -> None:
        """Index and check the whole file.

        Args:
            path: a recorded samples.jsonl.
            max_sequence_tokens: prompt and response tokens but the last that a microbatch can
                hold; None where any length fits.
            replayed_moe: the model's experts when their choice is replayed; every sample must
                then have it.

        Raises:
            InputError: missing, empty, not JSON on line N, a field of line N is missing or
                contradictory, its sample is too long, or its experts are not the model's.
        """
        self._path = path
        self._max_sequence_tokens = max_sequence_tokens
        self._moe = replayed_moe
        self._offsets: dict[int, list[int]] = defaultdict(list)
        try:
            with path.open("rb") as file:
                offset = 0
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        self._offsets[self._check(line, number)].append(offset)
                    offset += len(line)
        except OSError as error:
            raise InputError(
                f"rollout.replay_path={str(path)!r} cannot be read ({error.strerror}); give the "
                "samples.jsonl of a recorded run"
            ) from error
        if not self._offsets:
            raise InputError(
                f"rollout.replay_path={str(path)!r} holds no samples; record a run with "
                "run.record=true"
            )

    def steps(self) -> list[int]:
        """The recorded steps, ascending."""
        return sorted(self._offsets)

    def groups(self, step: int) -> tuple[SampleGroup, ...]:
        """The step's groups, in recorded order.

        Raises:
            RunError: the step was not recorded.
        """
        if step not in self._offsets:
            steps = self.steps()
            raise RunError(
                f"step {step} is not in {str(self._path)!r}, which holds {len(steps)} steps from "
                f"{steps[0]} to {steps[-1]}; lower train.steps"
            )
        members: dict[str, list[Sample]] = defaultdict(list)
        with self._path.open("rb") as file:
            for offset in self._offsets[step]:
                file.seek(offset)
                sample = Sample.from_json(json.loads(file.readline()))
                members[sample.prompt_id].append(sample)
        return tuple(
            SampleGroup(prompt_id=prompt_id, samples=tuple(samples))
            for prompt_id, samples in members.items()
        )

    def _check(self, line: bytes, number: int) -> int:
        where = f"rollout.replay_path={str(self._path)!r}, line {number}"
        try:
            record = json.loads(line)
            sample = Sample.from_json(record)
            step = int(record["step"])
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: not UTF-8 ({error}); record the run again") from error
        except json.JSONDecodeError as error:
            raise InputError(f"{where}: not JSON ({error}); remove or mend the line") from error
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{where}: not a recorded sample ({error!r}); remove it") from error
        length = len(sample.prompt_ids) + sample.num_response_tokens - 1
        if self._max_sequence_tokens is not None and length > self._max_sequence_tokens:
            raise InputError(
                f"{where}: sample {sample.name} has {length} tokens, more than the "
                f"{self._max_sequence_tokens} that a microbatch holds; raise "
                "train.max_tokens_per_microbatch"
            )
        if self._moe is not None:
            self._check_experts(sample, self._moe, where)
        return step

    def _check_experts(self, sample: Sample, moe: MoeArchitecture, where: str) -> None:
        experts = sample.routed_experts
        if experts is None:
            raise InputError(
                f"{where}: sample {sample.name} has no routed_experts, which model.router_replay="
                "true needs; record the run with it, or set it to false"
            )
        expected = (len(moe.layers), moe.experts_per_token)
        chosen = experts.tensor()
        if experts.shape[1:] != expected or not 0 <= chosen.min() <= chosen.max() < moe.num_experts:
            raise InputError(
                f"{where}: routed_experts of sample {sample.name} has {experts.shape[1]} layers of "
                f"{experts.shape[2]} experts up to index {int(chosen.max())}; the model has "
                f"{expected[0]} layers of {expected[1]} out of {moe.num_experts}. Replay a "
                "recording of this model, or set model.router_replay=false"
            )
