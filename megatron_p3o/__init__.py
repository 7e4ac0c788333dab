"""RL post-training on Megatron-Core with the P3O objective and exact distributed ESS."""

__version__ = "0.1.0"
