"""How a run cuts its model and its batches over ranks."""

import math

from pydantic import PositiveInt, model_validator

from megatron_p3o.config.section import Section


class LayoutSection(Section):
    """Sizes of the parallel axes; `megatron_p3o.parallel.layout` turns them into ranks."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    virtual_pipeline: PositiveInt = 1
    """Model chunks of each pipeline stage, run interleaved: smaller bubbles, more messages. Needs
    pipeline >= 2; microbatch counts are filled up with empty ones to a multiple of pipeline."""
    first_stage_layers: PositiveInt | None = None
    """Layers of the first pipeline stage; None shares layers evenly."""
    last_stage_layers: PositiveInt | None = None
    """Layers of the last pipeline stage; None shares layers evenly."""
    account_for_embedding: bool = False
    """Count the embedding as a layer when layers are shared over pipeline stages."""
    account_for_loss: bool = False
    """Count the output layer and loss as a layer when layers are shared over pipeline stages."""
    context: PositiveInt = 1
    """Ranks that share every sequence's positions; each holds two of 2 x context equal parts."""
    expert: PositiveInt = 1
    """Ranks that share a layer's experts. expert x expert_tensor divides the ranks of a pipeline
    stage, tensor x context x data."""
    expert_tensor: PositiveInt = 1
    """Ranks that share each expert's matrices, as `tensor` does those of the other layers."""
    data: PositiveInt | None = None
    """None: follows from the number of ranks."""
    sequence_parallel: bool = False
    """Also share positions over tensor ranks wherever the computation is per position (norms,
    residuals), which saves their activations; needs tensor >= 2."""

    @model_validator(mode="after")
    def _sequence_parallel(self) -> "LayoutSection":
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError(
                "layout.sequence_parallel=true shares positions over tensor ranks and needs "
                "layout.tensor >= 2 (got 1); set layout.tensor=2 or remove sequence_parallel"
            )
        return self

    @model_validator(mode="after")
    def _stages(self) -> "LayoutSection":
        needs_stages = {
            "virtual_pipeline": self.virtual_pipeline > 1,
            "first_stage_layers": self.first_stage_layers is not None,
            "last_stage_layers": self.last_stage_layers is not None,
            "account_for_embedding": self.account_for_embedding,
            "account_for_loss": self.account_for_loss,
        }
        for field, is_set in needs_stages.items():
            if is_set and self.pipeline == 1:
                raise ValueError(
                    f"layout.{field}={getattr(self, field)} needs layout.pipeline >= 2 (got 1); "
                    f"set layout.pipeline=2 or remove layout.{field}"
                )
        sizes = ("first_stage_layers", "last_stage_layers")
        counts = ("account_for_embedding", "account_for_loss")
        for size in sizes:
            for count in counts:
                if needs_stages[size] and needs_stages[count]:
                    raise ValueError(
                        f"layout.{size}={getattr(self, size)} fixes a stage's layers and "
                        f"layout.{count}=true shares them; remove one"
                    )
        return self

    @property
    def model_parallel_size(self) -> int:
        """Ranks that one copy of the model takes: tensor x pipeline x context."""
        return self.tensor * self.pipeline * self.context

    @property
    def sequence_multiple(self) -> int:
        """Tokens of which every sequence, padding included, is a multiple.

        2 x context parts must be equal, and with sequence_parallel the tensor ranks must get
        equal shares of each context rank's part.
        """
        parts = 2 if self.context > 1 else 1
        return self.context * math.lcm(parts, self.tensor if self.sequence_parallel else 1)

    @property
    def microbatch_multiple(self) -> int:
        """Microbatches of an optimizer step are a multiple of it: a rule of the interleaved
        schedule."""
        return self.pipeline if self.virtual_pipeline > 1 else 1
