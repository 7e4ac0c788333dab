"""The boundary to functions that the user names by import path, `module:function`.

User code may raise anything. `Captured` turns whatever it raises into a value, which the caller
must report; nothing is swallowed. The current directory is importable, as with `python -m`.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from megatron_p3o.errors import ConfigurationError


class Captured:
    """Context manager that keeps what its block raised, for the caller to report.

    Example:
        with Captured() as captured:
            value = function()
        if captured.error is not None:
            ...
    """

    error: Exception | None = None

    def __enter__(self) -> "Captured":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False  # KeyboardInterrupt and SystemExit go on; None is no error
        self.error = error
        return True


def one_line(error: Exception) -> str:
    """`type: message`, on one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def import_function(path: str, field: str) -> Callable[..., Any]:
    """The function at `module:function`.

    Args:
        path: the import path; modules of the current directory count.
        field: the configuration field that holds it, for the message.

    Raises:
        ConfigurationError: the path is malformed, its module cannot be imported, has no such
            attribute, or the attribute is not callable.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigurationError(
            f"{field}={path!r} must be module:function, such as my_task:my_function"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with Captured() as captured:
        module = importlib.import_module(module_name)
    if captured.error is not None:
        raise ConfigurationError(
            f"{field}={path!r}: module {module_name!r} cannot be imported "
            f"({one_line(captured.error)}); mend it, or start in its directory, or install it"
        ) from captured.error
    function = getattr(module, name, None)
    if function is None:
        raise ConfigurationError(
            f"{field}={path!r}: module {module_name!r} ({getattr(module, '__file__', None)}) has "
            f"no {name!r}; mend the name"
        )
    if not callable(function):
        raise ConfigurationError(
            f"{field}={path!r} is a {type(function).__name__}, which cannot be called; "
            "name a function"
        )
    return function


def check_keywords(
    function: Callable[..., Any], path: str, field: str, keywords: Iterable[str]
) -> None:
    """Check that `function` can be called with exactly these keyword arguments.

    Raises:
        ConfigurationError: it cannot, or it has no signature to tell.
    """
    keywords = list(keywords)
    try:
        inspect.signature(function).bind(**dict.fromkeys(keywords))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{field}={path!r} cannot be called with the keyword arguments {keywords}: {error}; "
            "mend the function or its arguments"
        ) from error
