"""The process that reward functions run in; started by `rewards.RewardRunner`.

    python -m megatron_p3o.data.reward_worker NAME FILE_DESCRIPTOR PARENT_PID

Protocol, over a `multiprocessing` connection: first None when the function NAME was imported, or
the text of the problem. Then for each (prompt, response, answer) received, (value, None) or
(None, error). The function runs in the main thread, so that it may use signals.
"""

import logging
import sys
from math import isfinite
from multiprocessing.connection import Connection
from typing import SupportsFloat

from megatron_p3o.data.rewards import RewardFunction, resolve_reward
from megatron_p3o.data.user_code import Captured, one_line
from megatron_p3o.errors import ConfigurationError
from megatron_p3o.parent import end_with_parent


def evaluate(
    function: RewardFunction, prompt: str, response: str, answer: str
) -> tuple[float | None, str | None]:
    """(reward, None), or (None, why there is none)."""
    with Captured() as captured:
        value = function(prompt=prompt, response=response, answer=answer)
        # Anything that is a number to Python: bool, numpy scalars, one-element tensors.
        number = float(value) if isinstance(value, SupportsFloat) else None
    if captured.error is not None:
        return None, one_line(captured.error)
    if number is None or not isfinite(number):
        return None, f"ValueError: the reward is {value!r:.100}; it must be a finite number"
    return number, None


def serve(connection: Connection, name: str) -> None:
    """Answer requests until the connection is closed."""
    try:
        function = resolve_reward(name)
    except ConfigurationError as error:
        connection.send(str(error))
        return
    connection.send(None)
    while True:
        try:
            prompt, response, answer = connection.recv()
        except (EOFError, ConnectionError):
            return
        connection.send(evaluate(function, prompt, response, answer))


def main() -> None:
    name, descriptor, parent_pid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # math-verify warns that its own time limits are off; the runner's limit stands in for them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # A hung function never comes back to see that its connection is closed.
    end_with_parent(parent_pid)
    serve(Connection(descriptor), name)


if __name__ == "__main__":
    main()
