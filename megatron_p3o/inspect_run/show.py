"""Samples as text. Everything is printed as `rich.text.Text`, in which brackets are no markup."""

import math
from collections.abc import Sequence

from rich.text import Text
from tokenizers import Tokenizer

from megatron_p3o.inspect_run.pieces import pieces
from megatron_p3o.inspect_run.plain import plain
from megatron_p3o.inspect_run.samples import RecordedSample

_UNLIKELY = ((math.log(0.01), "bold red"), (math.log(0.1), "yellow"))
_LISTED = 5  # least likely tokens named below a response


def header(step: int, shown: int, total: int, *, has_tokenizer: bool) -> Text:
    """What follows, and what the colours mean."""
    text = Text.assemble((f"step {step}: {shown} of {total} samples", "bold"), "\n")
    if has_tokenizer:
        text.append("Tokens that the rollout engine sampled with probability ")
        text.append("below 1 %", style=_UNLIKELY[0][1])
        text.append(" or ")
        text.append("below 10 %", style=_UNLIKELY[1][1])
        text.append(" are coloured. The trainer's log-probs are not recorded.")
    else:
        text.append(
            "No tokens are coloured: model.path of config.yaml has no tokenizer.json on this "
            "machine."
        )
    return text


def show(sample: RecordedSample, tokenizer: Tokenizer | None) -> Text:
    """One sample: its numbers, its prompt, its response, its least likely tokens."""
    text = Text.assemble((f"--- {plain(sample.name)}", "bold"), "\n", _numbers(sample), "\n")
    for flag in sample.flags():
        text.append(f"! {plain(flag)}\n", style="yellow")
    text.append("prompt\n", style="dim").append(_indent(plain(sample.prompt)) + "\n")
    text.append("response\n", style="dim")
    parts = None if tokenizer is None else pieces(tokenizer, sample.response_ids)
    if parts is None:
        text.append(_indent(plain(sample.response)))
    else:
        text.append("  ")
        for piece, start, stop in parts:
            least = min(sample.logprobs[start:stop], key=_rank)
            text.append(plain(piece).replace("\n", "\n  "), style=_style(least))
    text.append("\n").append(_least_likely(sample, parts))
    return text


def _numbers(sample: RecordedSample) -> str:
    reward = "none" if sample.reward is None else f"{sample.reward:g}"
    advantage = "none" if sample.advantage is None else f"{sample.advantage:.3f}"
    least, greatest = sample.versions
    versions = f"{least}" if least == greatest else f"{least} to {greatest}"
    line = (
        f"reward {reward}  advantage {advantage}  {len(sample.response_ids)} tokens  "
        f"finish {plain(sample.finish_reason)}  weight version {versions}"
    )
    if sample.spans:
        spans = ", ".join(f"{v} from token {start}" for v, start, _ in sample.spans)
        line += f" ({spans})"
    return line


def _least_likely(sample: RecordedSample, parts: Sequence[tuple[str, int, int]] | None) -> Text:
    """The least likely tokens by place, for eyes without colours."""
    places = sorted(range(len(sample.logprobs)), key=lambda i: _rank(sample.logprobs[i]))[:_LISTED]
    texts: dict[int, str] = {}
    for piece, start, stop in parts or ():
        texts |= dict.fromkeys(range(start, stop), f" {plain(repr(piece))}")
    words = [f"#{i}{texts.get(i, '')} {sample.logprobs[i]:.2f}" for i in places]
    return Text("least likely (nats)  " + ", ".join(words) if words else "", style="dim")


def _rank(logprob: float) -> float:
    return -math.inf if math.isnan(logprob) else logprob


def _style(logprob: float) -> str:
    if math.isnan(logprob):
        return _UNLIKELY[0][1]
    return next((style for bound, style in _UNLIKELY if logprob < bound), "")


def _indent(text: str) -> str:
    return "  " + text.replace("\n", "\n  ")
