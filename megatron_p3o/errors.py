"""Errors a user can act on, by the exit code the command line gives them.

`UserError` and its subclasses mean bad configuration or input: exit code 2, the message alone on
stderr. Everything else that stops a run is exit code 1.
"""


class UserError(ValueError):
    """Bad configuration or input. The message states field, value, rule and remedy."""


class ConfigurationError(UserError):
    """The run's configuration is wrong or contradicts itself."""


class InputError(UserError):
    """A file or directory that the configuration names cannot be used."""


class RunError(RuntimeError):
    """The run cannot go on; the last checkpoint is valid."""


class NonFiniteError(RunError):
    """A log-prob, ratio or gradient is NaN or infinite; nothing has been stepped."""


class RewardError(RunError):
    """More rewards failed or timed out than `data.reward.max_failure_fraction` allows."""
