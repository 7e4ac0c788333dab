"""SGLang servers that already serve the model, as an engine: nothing is published to them.

every sample -> the server with the fewest samples in flight -> checked reply
error        -> another try, there or elsewhere, up to `rollout.max_attempts`
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_p3o.config import RolloutSection, SamplingSection
from megatron_p3o.errors import InputError, RunError
from megatron_p3o.model_files import fingerprint
from megatron_p3o.rollout import Generation, GenerationRequest
from megatron_p3o.rollout.sglang import (
    GenerateClient,
    GenerateOptions,
    Reply,
    ServerControl,
    ServerError,
    ServerTimeout,
)
from megatron_p3o.rollout.sglang.client import UNPUBLISHED

_FIRST_BACKOFF_S = 0.25
_MAX_BACKOFF_S = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """What a server says it serves."""

    url: str
    model_path: str
    weight_version: str


def served_models(
    urls: Iterable[str], model_dir: Path, *, is_checkpoint: bool, api_key: str | None
) -> list[ServedModel]:
    """Ask each server; compare with the model as far as that can be told.

    Args:
        urls: of the servers.
        model_dir: whose results these are to be.
        is_checkpoint: whether the weights are a Megatron checkpoint's, and not those of
            `model_dir`; then only the shape of the model could be compared.
        api_key: of the servers.

    Raises:
        InputError: a server does not answer, holds no weights, or serves a directory of this host
            with another model.
    """
    found = []
    for url in urls:
        try:
            info = ServerControl(url, api_key=api_key).model_info()
        except ServerError as error:
            raise InputError(
                f"--servers={url} cannot be asked for its model: {error}; start it, or mend the URL"
            ) from error
        served = ServedModel(
            url=url,
            model_path=str(info.get("model_path")),
            weight_version=str(info.get("weight_version")),
        )
        if served.weight_version == UNPUBLISHED:
            raise InputError(
                f"--servers={url} waits for the weights of a run and holds none; start a server "
                "with the model's own weights"
            )
        path = Path(served.model_path)
        if is_checkpoint or not path.is_dir():
            _log.warning(
                "%s serves %s: whether that is %s cannot be told from here",
                *(url, served.model_path, model_dir),
            )
        elif path.resolve() != model_dir.resolve() and fingerprint(path) != fingerprint(model_dir):
            raise InputError(
                f"--servers={url} serves {served.model_path!r}, whose files differ from those of "
                f"MODEL_OR_RUN={str(model_dir)!r}; start it with this model, or name that one"
            )
        found.append(served)
    return found


@dataclass(kw_only=True, eq=False)
class _Place:
    url: str
    limit: asyncio.Semaphore
    in_flight: int = 0


class ServerEngine:
    """Generates on servers that hold the weights already."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        sampling: SamplingSection,
        eos_token_ids: tuple[int, ...],
        rollout: RolloutSection,
        api_key: str | None,
    ) -> None:
        self._urls = tuple(urls)
        self._sampling = sampling
        self._options = GenerateOptions(
            sampling=sampling, eos_token_ids=eos_token_ids, needs_published_weights=False
        )
        self._rollout = rollout
        self._api_key = api_key

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """See `RolloutEngine.generate`.

        Raises:
            RunError: a sample failed `rollout.max_attempts` times, or a request is wrong.
        """
        return asyncio.run(self._generate(requests))

    async def _generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        client = GenerateClient(self._options, api_key=self._api_key)
        places = [
            _Place(url=url, limit=asyncio.Semaphore(self._rollout.concurrency))
            for url in self._urls
        ]
        tasks = [
            asyncio.ensure_future(self._sample(client, places, request, index))
            for request in requests
            for index in range(request.num_samples)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await client.close()

    async def _sample(
        self,
        client: GenerateClient,
        places: Sequence[_Place],
        request: GenerationRequest,
        index: int,
    ) -> Generation:
        name, num_failures = f"{request.prompt_id}/{index}", 0
        while True:
            try:
                reply = await self._try(client, places, request)
            except ServerError as error:
                num_failures += 1
                if num_failures >= self._rollout.max_attempts:
                    raise RunError(
                        f"sample {name} failed rollout.max_attempts={num_failures} times, at last: "
                        f"{error}; nothing was written"
                    ) from error
                await asyncio.sleep(min(_FIRST_BACKOFF_S * 2**num_failures, _MAX_BACKOFF_S))
                continue
            if reply.finish_reason == "abort":
                raise RunError(
                    f"sample {name} was ended by a weight update; does a run publish to these "
                    "servers? Evaluate on servers of their own"
                )
            return Generation(
                prompt_id=request.prompt_id,
                sample_index=index,
                response_ids=reply.token_ids,
                logprobs=reply.logprobs,
                finish_reason=reply.finish_reason,
                version_spans=reply.version_spans,
            )

    async def _try(
        self, client: GenerateClient, places: Sequence[_Place], request: GenerationRequest
    ) -> Reply:
        place = min(places, key=lambda place: place.in_flight)
        place.in_flight += 1  # those that wait for the server too
        try:
            async with place.limit, asyncio.timeout(self._rollout.request_timeout_s):
                return await client.generate(
                    place.url, request.prompt_ids, self._sampling.max_new_tokens
                )
        except TimeoutError as error:
            raise ServerTimeout(f"{place.url}/generate took too long") from error
        finally:
            place.in_flight -= 1
