"""Rollout engines behind one protocol, sampling noise, and recorded rollouts."""

from megatron_p3o.rollout.answers import AnswerEngine
from megatron_p3o.rollout.buffer import StalenessBuffer, Taken
from megatron_p3o.rollout.embedded import EmbeddedEngine
from megatron_p3o.rollout.emulation import ServedNumerics
from megatron_p3o.rollout.engine import Generation, GenerationRequest, RolloutEngine
from megatron_p3o.rollout.noise import SampleNoise, invert_cdf
from megatron_p3o.rollout.record import SampleRecorder
from megatron_p3o.rollout.replay import ReplayRollouts

__all__ = [
    "AnswerEngine",
    "EmbeddedEngine",
    "Generation",
    "GenerationRequest",
    "ReplayRollouts",
    "RolloutEngine",
    "SampleNoise",
    "SampleRecorder",
    "ServedNumerics",
    "StalenessBuffer",
    "Taken",
    "invert_cdf",
]
