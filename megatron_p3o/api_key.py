"""Where the key of the rollout servers comes from: never from the configuration itself."""

import os
from pathlib import Path

from megatron_p3o.config import RolloutSection
from megatron_p3o.errors import InputError


def read_api_key(rollout: RolloutSection) -> str | None:
    """The key that the configuration points at.

    Raises:
        InputError: the variable is not set, or the file cannot be read or is empty.
    """
    if rollout.api_key_env is not None:
        key = os.environ.get(rollout.api_key_env, "").strip()
        if not key:
            raise InputError(
                f"rollout.api_key_env={rollout.api_key_env!r} names an environment variable that "
                "is not set; export it"
            )
        return key
    if rollout.api_key_file is not None:
        try:
            key = Path(rollout.api_key_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"rollout.api_key_file={rollout.api_key_file!r} cannot be read ({error})"
            ) from error
        if not key:
            raise InputError(f"rollout.api_key_file={rollout.api_key_file!r} is empty")
        return key
    return None
