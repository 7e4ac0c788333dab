"""The data's own answers in the place of samples."""

from pathlib import Path

import torch
from transformers import AutoTokenizer

from megatron_p3o.architecture import read_architecture
from megatron_p3o.config import RunConfig, parse_config
from megatron_p3o.data.generators import running_sums
from megatron_p3o.preflight import check_run
from megatron_p3o.rollout import AnswerEngine, Generation, GenerationRequest
from megatron_p3o.trainer.answers import answer_engine
from megatron_p3o.types import VersionSpan

ANSWERS = {"0-0": (5, 6, 2), "0-1": (7, 8, 9, 10, 2)}


def request(prompt_id: str, num_samples: int) -> GenerationRequest:
    return GenerationRequest(prompt_id=prompt_id, prompt_ids=(1,), num_samples=num_samples, step=0)


def test_every_sample_is_the_answer_cut_to_what_fits() -> None:
    engine = AnswerEngine(ANSWERS.__getitem__, max_new_tokens=3)
    engine.update_weights([("w", torch.zeros(1))], version=4)

    def generation(prompt_id: str, index: int, finish: str) -> Generation:
        return Generation(
            prompt_id=prompt_id,
            sample_index=index,
            response_ids=ANSWERS[prompt_id][:3],
            logprobs=(0.0, 0.0, 0.0),
            finish_reason="stop" if finish == "stop" else "length",
            version_spans=(VersionSpan(4, 0, 3),),
        )

    assert engine.generate([request("0-1", 2), request("0-0", 1)]) == [
        generation("0-1", 0, "length"),
        generation("0-1", 1, "length"),
        generation("0-0", 0, "stop"),
    ]


def sft_config(model: Path, directory: Path) -> RunConfig:
    return parse_config(
        {
            "run": {"dir": str(directory / "run")},
            "model": {"path": str(model)},
            "data": {
                "source": "generator",
                "generator": "running_sums",
                "generator_args": {"num_prompts": 20, "num_terms": 3, "seed": 5},
                "chat": False,
            },
            "train": {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 1},
            "objective": {"name": "sft"},
            "rollout": {"engine": "answers"},
        }
    )


def test_a_runs_answers_end_as_the_model_ends_its_responses(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = sft_config(tiny_model_dir, tmp_path)
    inputs = check_run(config, resume=False)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    engine = answer_engine(config, inputs, tokenizer)
    # The same prompts in another epoch have the same answers.
    requests = [request(f"{index % 3}-{index}", 1) for index in range(20)]
    generations = engine.generate(requests)
    ends = read_architecture(str(tiny_model_dir)).eos_token_ids
    expected = running_sums(num_prompts=20, num_terms=3, seed=5)
    for generation, (_, answer) in zip(generations, expected, strict=True):
        *ids, end = generation.response_ids
        assert end in ends
        assert tokenizer.decode(ids) == answer
        assert generation.finish_reason == "stop"
