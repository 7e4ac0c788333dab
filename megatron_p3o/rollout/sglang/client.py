"""One generation on one SGLang server: request, deadline, and a reply that is believed only after
it has been checked.

A reply must hold as many log-probs as tokens, of those tokens, finite and not above 0; weight
versions for every token; and an end that fits the length. Anything else is `BadReply`, since a
batch with a silently wrong log-prob trains silently wrong. Checked against SGLang 0.5.23, whose
log-probs are of logits / temperature.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Literal

import aiohttp
import numpy as np
import torch

from megatron_p3o.config import SamplingSection
from megatron_p3o.rollout.sglang.control import KEEPALIVE_S, ServerInfo, bearer
from megatron_p3o.rollout.sglang.errors import (
    BadReply,
    CallRefused,
    RequestRefused,
    ServerTimeout,
    ServerUnreachable,
    WrongWeights,
)
from megatron_p3o.types import RoutedExperts, VersionSpan

UNPUBLISHED = "unpublished"
"""Weight version of a server that was started and has not been given weights yet."""
_CONNECT_TIMEOUT_S = 10.0
# Rounding can lift the log-prob of a certain token above 0 by this much.
_LOGPROB_SLACK = 1e-3
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What one request gave: a response, or the first part of one."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """nats"""
    version_spans: tuple[VersionSpan, ...]
    """Empty only without tokens."""
    finish_reason: Literal["stop", "length", "abort"]
    """`abort`: ended from outside, by a weight update; the tokens so far are good."""
    routed_experts: RoutedExperts | None = None
    """Of all tokens that entered the model, prompt included, when they were asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayout:
    """How a server reports experts: int32 of every layer, dense ones included."""

    num_layers: int
    moe_layers: tuple[int, ...]
    experts_per_token: int

    def read(self, text: str, num_tokens: int) -> RoutedExperts:
        """
        Args:
            text: base64 of [tokens, layers, experts per token].
            num_tokens: that entered the model.

        Raises:
            BadReply: it is of another size.
            ValueError: it is no base64.
        """
        values = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
        shape = (num_tokens, self.num_layers, self.experts_per_token)
        if values.size != math.prod(shape):
            raise BadReply(
                f"{values.size} expert choices, and {shape} tokens x layers x experts are needed"
            )
        experts = values.reshape(shape)[:, list(self.moe_layers)]
        return RoutedExperts.from_tensor(torch.from_numpy(experts.copy()))


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """What is the same for every request of a run."""

    sampling: SamplingSection
    eos_token_ids: tuple[int, ...]
    experts: ExpertLayout | None = None
    """Ask for the experts of every token; None: do not."""
    needs_published_weights: bool = True
    """False: take tokens of whatever weights the server holds, and call them version 0."""

    def body(self, input_ids: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        """Spelt out in full: a server's defaults may come from the model's generation config."""
        body: dict[str, Any] = {
            "input_ids": list(input_ids),
            "return_logprob": True,
            "sampling_params": {
                "temperature": self.sampling.temperature,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
                "repetition_penalty": 1.0,
                "min_new_tokens": 0,
                "max_new_tokens": max_new_tokens,
                "stop_token_ids": list(self.eos_token_ids),
            },
        }
        if self.experts is not None:
            body["return_routed_experts"] = True
        return body


class GenerateClient:
    """Connections to the servers. Belongs to one event loop; create and close it there."""

    def __init__(self, options: GenerateOptions, *, api_key: str | None) -> None:
        """
        Args:
            options: of every request.
            api_key: sent as a bearer token and never shown.
        """
        self._options = options
        self._session = aiohttp.ClientSession(
            # The dispatcher bounds what is in flight.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            # Deadlines are the caller's, which may change them on the way.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            headers=bearer(api_key),
            trust_env=False,
        )

    async def generate(self, url: str, input_ids: Sequence[int], max_new_tokens: int) -> Reply:
        """Sample a continuation.

        Args:
            url: of a server or a router.
            input_ids: prompt, and response so far.
            max_new_tokens: greatest length of the continuation.

        Raises:
            RequestRefused: the server calls the request itself wrong.
            ServerError: anything else went wrong, by kind.
        """
        body = self._options.body(input_ids, max_new_tokens)
        status, text = await self._exchange("POST", f"{url}/generate", body)
        if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
            raise RequestRefused(
                f"{url}/generate refused a prompt of {len(input_ids)} tokens with "
                f"max_new_tokens={max_new_tokens}: {text[:_SHOWN_CHARACTERS]}"
            )
        if status != HTTPStatus.OK:
            raise CallRefused(f"{url}/generate answered {status}: {text[:_SHOWN_CHARACTERS]}")
        try:
            content = json.loads(text)
            return replace(
                parse_reply(
                    content,
                    max_new_tokens,
                    needs_published_weights=self._options.needs_published_weights,
                ),
                routed_experts=self._experts(content, len(input_ids)),
            )
        except BadReply as error:
            raise BadReply(f"{url}/generate: {error}") from error
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise BadReply(
                f"{url}/generate answered something that is no generation ({error!r}): "
                f"{text[:_SHOWN_CHARACTERS]}"
            ) from error

    def _experts(self, content: Mapping[str, Any], num_inputs: int) -> RoutedExperts | None:
        num_outputs = len(content["output_ids"])
        if self._options.experts is None or not num_outputs:
            return None
        # The last token was sampled and never entered the model.
        text = content["meta_info"]["routed_experts"]
        return self._options.experts.read(text, num_inputs + num_outputs - 1)

    async def info(self, url: str) -> ServerInfo:
        """What the server is; its scheduler answers too, so a server that cannot generate fails.

        Raises:
            ServerError: by kind.
        """
        status, text = await self._exchange("GET", f"{url}/server_info", None)
        try:
            content = json.loads(text)
        except ValueError:
            content = None
        if status != HTTPStatus.OK or not isinstance(content, dict):
            raise CallRefused(f"{url}/server_info answered {status}: {text[:_SHOWN_CHARACTERS]}")
        return ServerInfo.from_answer(url, content)

    async def is_healthy(self, url: str) -> bool:
        """Whether a router says so."""
        try:
            status, _ = await self._exchange("GET", f"{url}/health", None)
        except (ServerUnreachable, ServerTimeout):
            return False
        return status == HTTPStatus.OK

    async def close(self) -> None:
        await self._session.close()

    async def _exchange(self, method: str, url: str, body: Any) -> tuple[int, str]:
        try:
            async with self._session.request(
                method, url, json=body, allow_redirects=False
            ) as response:
                return response.status, await response.text(errors="replace")
        except (TimeoutError, aiohttp.ServerTimeoutError) as error:
            raise ServerTimeout(f"{url} gave no answer before its deadline") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnreachable(f"{url} cannot be reached: {error!r}") from error


def parse_reply(
    content: Mapping[str, Any], max_new_tokens: int, *, needs_published_weights: bool = True
) -> Reply:
    """Check what a server answered.

    Raises:
        BadReply: it contradicts itself or the request.
        WrongWeights: it was sampled with weights that were never published.
        KeyError, TypeError, ValueError, IndexError: it is something else.
    """
    meta = content["meta_info"]
    token_ids = tuple(content["output_ids"])
    entries = meta["output_token_logprobs"]
    logprobs = tuple(float(entry[0]) for entry in entries)
    if tuple(entry[1] for entry in entries) != token_ids:
        raise BadReply(f"{len(entries)} log-probs for {len(token_ids)} tokens, or of other tokens")
    if any(type(token) is not int for token in token_ids):
        raise BadReply(f"token ids {token_ids[:8]} are no integers")
    if not all(math.isfinite(value) and value <= _LOGPROB_SLACK for value in logprobs):
        worst = next(v for v in logprobs if not (math.isfinite(v) and v <= _LOGPROB_SLACK))
        raise BadReply(f"log-prob {worst} at response position {logprobs.index(worst)}")
    finish_reason = meta["finish_reason"]["type"]
    if finish_reason not in ("stop", "length", "abort"):
        raise BadReply(f"finish_reason {finish_reason!r}")
    is_long = len(token_ids) >= max_new_tokens
    if len(token_ids) > max_new_tokens or ((finish_reason == "length") and not is_long):
        raise BadReply(
            f"{len(token_ids)} tokens of at most {max_new_tokens} with finish_reason "
            f"{finish_reason!r}; is the server's --context-length too small?"
        )
    if finish_reason == "stop" and not token_ids:
        raise BadReply("no tokens at all")
    return Reply(
        token_ids=token_ids,
        logprobs=logprobs,
        version_spans=_spans(meta, len(token_ids))
        if needs_published_weights
        else (VersionSpan(0, 0, len(token_ids)),),
        finish_reason=finish_reason,
    )


def _spans(meta: Mapping[str, Any], num_tokens: int) -> tuple[VersionSpan, ...]:
    if not num_tokens:
        return ()
    spans = []
    for span in meta["weight_versions"]:
        if not str(span["version"]).isdecimal():
            raise WrongWeights(
                f"tokens by weight version {span['version']!r}, which was never published"
            )
        spans.append(VersionSpan(int(span["version"]), span["start"], span["end"]))
    edges = [0, *(span.stop for span in spans)]
    if edges[-1] != num_tokens or [span.start for span in spans] != edges[:-1]:
        raise BadReply(f"weight versions {spans} do not cover the {num_tokens} tokens")
    return tuple(spans)
