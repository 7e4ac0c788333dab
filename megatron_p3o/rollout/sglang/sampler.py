"""One sample, whatever happens to the servers on the way.

    place on a serving server -> request -> checked reply
      error:  another try, on whichever server has a place          (no tokens are kept)
      abort:  go on from the tokens so far, on whichever server     (all tokens are kept)

A reply is used once or not at all, so no sample is lost or doubled: a request that was given up
has no other reader.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_p3o.config import RolloutSection
from megatron_p3o.errors import RunError
from megatron_p3o.rollout.sglang.client import GenerateClient, Reply
from megatron_p3o.rollout.sglang.errors import BadReply, ServerError, ServerTimeout
from megatron_p3o.rollout.sglang.fleet import Fleet, Place
from megatron_p3o.types import FinishReason, RoutedExperts, VersionSpan

_FIRST_BACKOFF_S = 0.25
_MAX_BACKOFF_S = 10.0


@dataclass(slots=True)
class Response:
    """What has been sampled so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    routed_experts: RoutedExperts | None = None
    """Of the last request, which computed all tokens before its own again."""

    def extend(self, reply: Reply) -> None:
        offset = len(self.token_ids)
        self.token_ids += reply.token_ids
        self.logprobs += reply.logprobs
        self.routed_experts = reply.routed_experts or self.routed_experts
        for version, start, stop in reply.version_spans:
            last = self.version_spans[-1] if self.version_spans else None
            if last is not None and last.version == version:
                self.version_spans[-1] = VersionSpan(version, last.start, offset + stop)
            else:
                self.version_spans.append(VersionSpan(version, offset + start, offset + stop))


class Sampler:
    """Makes samples on a fleet."""

    def __init__(self, fleet: Fleet, client: GenerateClient, rollout: RolloutSection) -> None:
        """
        Args:
            fleet: of servers, on the same loop.
            client: with the run's sampling options.
            rollout: deadlines and limits.
        """
        self.num_retries = 0
        self.num_continued = 0
        """Requests that went on from the tokens of one that a weight update had ended."""
        self._fleet = fleet
        self._client = client
        self._rollout = rollout

    async def sample(self, name: str, prompt_ids: Sequence[int], max_new_tokens: int) -> Response:
        """
        Args:
            name: of the sample, for messages.
            prompt_ids: [prompt tokens]
            max_new_tokens: greatest length of the response.

        Raises:
            RunError: it failed `rollout.max_attempts` times, or the request itself is wrong.
        """
        response = Response()
        num_failures = 0
        while True:
            place = await self._fleet.acquire()
            try:
                reply = await self._request(place, prompt_ids, response, max_new_tokens)
            except ServerError as error:
                num_failures += 1
                self.num_retries += 1
                if num_failures >= self._rollout.max_attempts:
                    raise RunError(
                        f"sample {name} failed rollout.max_attempts={num_failures} times, at last: "
                        f"{error}. The last checkpoint is valid: continue with --resume"
                    ) from error
                await asyncio.sleep(min(_FIRST_BACKOFF_S * 2**num_failures, _MAX_BACKOFF_S))
                continue
            response.extend(reply)
            if reply.finish_reason != "abort":
                response.finish_reason = reply.finish_reason
                return response
            if len(response.token_ids) == max_new_tokens:
                return response
            self.num_continued += 1

    async def _request(
        self, place: Place, prompt_ids: Sequence[int], response: Response, max_new_tokens: int
    ) -> Reply:
        """One try; tells the fleet how it went and gives the place back."""
        url = self._fleet.entry(place)
        left = max_new_tokens - len(response.token_ids)
        try:
            async with asyncio.timeout(self._rollout.request_timeout_s) as deadline:
                place.deadlines.add(deadline)
                try:
                    reply = await self._client.generate(
                        url, [*prompt_ids, *response.token_ids], left
                    )
                finally:
                    place.deadlines.discard(deadline)
            self._check_version(reply, url)
        except TimeoutError as error:
            timeout = ServerTimeout(f"{url}/generate was given up: its server is lost or too slow")
            self._fleet.note_failure(place, url, timeout)
            raise timeout from error
        except ServerError as error:
            self._fleet.note_failure(place, url, error)
            raise
        finally:
            self._fleet.release(place)
        self._fleet.note_success(place)
        return reply

    def _check_version(self, reply: Reply, url: str) -> None:
        newest = self._fleet.newest_version
        for span in reply.version_spans:
            if newest is None or span.version > newest:
                raise BadReply(
                    f"{url}/generate: tokens of weight version {span.version}, and {newest} is the "
                    "newest that was published; does another run publish to this server?"
                )
