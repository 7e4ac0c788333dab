"""Prompts in, rewards out: sources, a resumable draw order, chat text, verifiers.

Nothing here imports torch: a reward process imports this package and must start fast.
"""

from megatron_p3o.data.cursor import DrawnPrompt, PromptCursor
from megatron_p3o.data.encoder import PromptEncoder
from megatron_p3o.data.prompts import PromptItem, PromptSet, load_prompts
from megatron_p3o.data.rewards import (
    RewardFunction,
    RewardRequest,
    RewardResult,
    RewardRunner,
    check_failures,
    resolve_reward,
)

__all__ = [
    "DrawnPrompt",
    "PromptCursor",
    "PromptEncoder",
    "PromptItem",
    "PromptSet",
    "RewardFunction",
    "RewardRequest",
    "RewardResult",
    "RewardRunner",
    "check_failures",
    "load_prompts",
    "resolve_reward",
]
