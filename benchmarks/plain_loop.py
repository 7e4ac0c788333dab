"""The quickstart's task in plain transformers and torch: what `p3o train` is compared with.

    python benchmarks/plain_loop.py --steps 12 --seed 0 --json plain.json

One process, all cores. Per step: 8 prompts x 8 samples of 8 tokens by `model.generate`, reward 1
for the right sum, group z-score advantages, one REINFORCE step (token mean) with AdamW 1e-5 on the
response tokens. Sequences are trimmed to the longest response, and logits are taken only where a
response token is predicted, as a careful engineer would.
"""

import argparse
import json
import os
import random
import re
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

# Shape legend: B = prompts x samples sequences, L prompt and response tokens, R response tokens.

NUM_PROMPTS, NUM_SAMPLES, MAX_NEW_TOKENS, MICROBATCH = 8, 8, 8, 16


def draw_prompts(rng: random.Random) -> tuple[list[str], list[int]]:
    """Texts of single-digit sums, in the model's chat form without a system turn, and answers."""
    pairs = [(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(NUM_PROMPTS)]
    texts = [
        f"<|im_start|>user\nWhat is {a}+{b}? Answer with just the number.<|im_end|>\n"
        "<|im_start|>assistant\n"
        for a, b in pairs
    ]
    return texts, [a + b for a, b in pairs]


def reward(text: str, answer: int) -> float:
    """1 when the last integer of the response is the answer."""
    integers = re.findall(r"-?\d+", text)
    return float(bool(integers) and int(integers[-1]) == answer)


def response_mask(responses_BR: Tensor, eos_token_id: int) -> Tensor:
    """True up to and with the first end-of-sequence token."""
    ended_BR = (responses_BR == eos_token_id).cumsum(dim=1)
    return (ended_BR == 0) | ((ended_BR == 1) & (responses_BR == eos_token_id))


def microbatch_loss(
    model: torch.nn.Module, tokens_BL: Tensor, mask_BL: Tensor, valid_BR: Tensor, advantages: Tensor
) -> Tensor:
    """Sum over response tokens of -A log p."""
    num_response = valid_BR.shape[1]
    positions_BL = (mask_BL.cumsum(dim=1) - 1).clamp_min(0)
    logits = model(
        input_ids=tokens_BL[:, :-1],
        attention_mask=mask_BL[:, :-1],
        position_ids=positions_BL[:, :-1],
        logits_to_keep=num_response,
        use_cache=False,
    ).logits
    logp = torch.log_softmax(logits.float(), dim=-1)
    picked_BR = logp.gather(2, tokens_BL[:, -num_response:, None]).squeeze(2)
    return -(advantages[:, None] * picked_BR * valid_BR).sum()


def run_step(
    model: torch.nn.Module, tokenizer: object, optimizer: torch.optim.Optimizer, rng: random.Random
) -> dict[str, float]:
    """One rollout batch and one optimizer step; seconds and mean reward."""
    start = time.perf_counter()
    texts, answers = draw_prompts(rng)
    inputs = tokenizer(  # type: ignore[operator]
        texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
    )
    model.eval()
    with torch.inference_mode():
        output_BL = model.generate(  # type: ignore[operator]
            **inputs,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=NUM_SAMPLES,
            max_new_tokens=MAX_NEW_TOKENS,
        )
    tokens_BL = output_BL.clone()
    prompt_length = inputs["input_ids"].shape[1]
    responses_BR = tokens_BL[:, prompt_length:]
    valid_BR = response_mask(responses_BR, tokenizer.eos_token_id)  # type: ignore[attr-defined]
    decoded = tokenizer.batch_decode(responses_BR, skip_special_tokens=True)  # type: ignore[attr-defined]
    rewards = torch.tensor(
        [reward(text, answers[row // NUM_SAMPLES]) for row, text in enumerate(decoded)]
    )
    groups = rewards.view(NUM_PROMPTS, NUM_SAMPLES)
    centred = groups - groups.mean(dim=1, keepdim=True)
    advantages = (centred / (groups.std(dim=1, keepdim=True) + 1e-6)).flatten()
    generated = time.perf_counter()

    mask_BL = torch.cat(
        [inputs["attention_mask"].repeat_interleave(NUM_SAMPLES, dim=0), valid_BR.long()], dim=1
    )
    model.train()
    optimizer.zero_grad()
    for rows in torch.arange(len(tokens_BL)).split(MICROBATCH):
        loss = microbatch_loss(
            model, tokens_BL[rows], mask_BL[rows], valid_BR[rows], advantages[rows]
        )
        (loss / valid_BR.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    end = time.perf_counter()
    return {
        "reward/mean": rewards.mean().item(),
        "time/rollout_s": generated - start,
        "time/train_s": end - generated,
        "time/step_s": end - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the steps to this file")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(os.cpu_count() or 1)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0)
    rng = random.Random(args.seed)
    records = []
    for step in range(args.steps):
        record = run_step(model, tokenizer, optimizer, rng)
        records.append({"step": step, **record})
        print(
            f"step {step + 1}/{args.steps}  reward {record['reward/mean']:.3f}  "
            f"{record['time/step_s']:.1f}s (rollout {record['time/rollout_s']:.1f} "
            f"train {record['time/train_s']:.1f})",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(records, indent=2))


if __name__ == "__main__":
    main()
