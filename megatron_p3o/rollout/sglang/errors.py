"""What a server can do wrong, by what follows from it."""

from megatron_p3o.errors import RunError


class ServerError(RunError):
    """A server did not do what it was asked; another one, or the same one later, may."""


class ServerUnreachable(ServerError):
    """Nobody answers, or the connection broke."""


class ServerTimeout(ServerError):
    """No answer before the deadline."""


class CallRefused(ServerError):
    """The server answered that it did not do it."""


class BadReply(ServerError):
    """The server answered with something that is no generation."""


class WrongWeights(ServerError):
    """A generation by weights that were never published."""


class RequestRefused(RunError):
    """The request itself is at fault: every server would refuse it."""
