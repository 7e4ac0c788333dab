"""The frozen model that `reference.kl_coefficient` pulls the policy towards.

Its weights come from its model directory at every start and never change, so checkpoints do not
hold them; a resumed run must name the same model, which its identity checks. Each rollout batch
is scored once, when it is first consumed, and keeps those log-probs for all its optimizer steps.
"""

from collections.abc import Sequence

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.config import RunConfig
from megatron_p3o.parallel.batching import Microbatch
from megatron_p3o.parallel.model import build_model
from megatron_p3o.parallel.setup import ParallelContext
from megatron_p3o.parallel.step import HeadOptions, StepRunner
from megatron_p3o.trainer.loading import load_model_dir


class ReferenceModel:
    """A Megatron model in the policy's layout that only scores. Every method is collective."""

    def __init__(
        self,
        config: RunConfig,
        architecture: ModelArchitecture,
        context: ParallelContext,
        head: HeadOptions,
    ) -> None:
        """Build this rank's part and load its weights.

        Args:
            config: names the model directory; layout and precision are the policy's.
            architecture: of that directory.
            context: where this rank stands.
            head: as the policy's, so that both log-probs are of the same distribution.
        """
        model = build_model(architecture, context, config, frozen=True)
        load_model_dir(model, config.reference_path, architecture, context)
        self._runner = StepRunner(model, context, head)

    def attach(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """The same microbatches with reference log-probs; off the last stage unchanged."""
        scores = self._runner.score(microbatches, with_entropy=False)
        if not scores:
            return list(microbatches)
        return [m.with_reference(s.logprobs) for m, s in zip(microbatches, scores, strict=True)]
