"""Control calls to one SGLang server: pause, update weights, check, continue.

Every call has a deadline and ends in an answer or in one of three errors, so that the caller can
tell a dead server from a slow one and from one that said no. Calls go to the server itself; the
router does not pass them on. Checked against SGLang 0.5.23.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import httpx

from megatron_p3o.rollout.sglang.errors import CallRefused, ServerTimeout, ServerUnreachable

PauseMode = Literal["abort", "in_place", "retract"]
# Servers close idle connections after 5 s (uvicorn); one that is closing must not be used again.
KEEPALIVE_S = 2.0
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerInfo:
    """What a server says of itself."""

    version: str
    tensor_parallel_size: int
    device: str
    instance: str
    """The same for as long as the server's process lives, and another one afterwards."""

    @classmethod
    def from_answer(cls, url: str, content: Mapping[str, Any]) -> Self:
        """From what `/server_info` answers.

        Raises:
            CallRefused: it is not that of an SGLang server.
        """
        try:
            return cls(
                version=str(content["version"]),
                tensor_parallel_size=int(content["tp_size"]),
                device=str(content["device"]),
                # Seconds that the parts of start-up took, to the nanosecond.
                instance=json.dumps(content["startup_time"], sort_keys=True),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CallRefused(
                f"{url}/server_info lacks what this needs to know ({error!r}); is it an SGLang "
                "server?"
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDescription:
    """A tensor that a server is about to receive."""

    name: str
    dtype: str
    """Of torch, without its prefix: `bfloat16`."""
    shape: tuple[int, ...]


def bearer(api_key: str | None) -> dict[str, str]:
    """The header that carries an API key."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


class ServerControl:
    """The control plane of one server. Safe to use from several threads."""

    def __init__(
        self,
        url: str,
        *,
        call_timeout_s: float = 60.0,
        update_timeout_s: float = 300.0,
        api_key: str | None = None,
    ) -> None:
        """
        Args:
            url: http://host:port or https://host:port of the server.
            call_timeout_s: deadline of calls that move no weights, seconds.
            update_timeout_s: deadline of calls that move or hash weights, seconds.
            api_key: sent as a bearer token and never shown.
        """
        self.url = url.rstrip("/")
        self._call_timeout_s = call_timeout_s
        self._update_timeout_s = update_timeout_s
        # Weights go to the host that the configuration names and nowhere else: neither to a proxy
        # of the environment nor where a redirection points.
        self._client = httpx.Client(
            headers=bearer(api_key),
            trust_env=False,
            follow_redirects=False,
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
        )

    @property
    def host(self) -> str:
        host = urlsplit(self.url).hostname
        assert host is not None, self.url
        return host

    def info(self) -> ServerInfo:
        """What the server was started as.

        Raises:
            CallRefused: the answer is not that of an SGLang server.
        """
        content = self._call("GET", "/server_info", None, self._call_timeout_s)
        return ServerInfo.from_answer(self.url, content)

    def weight_version(self) -> str:
        """As the server was last told."""
        return str(self.model_info().get("weight_version"))

    def model_info(self) -> Mapping[str, Any]:
        """What the server says of its model: `model_path`, `weight_version` and more."""
        return self._call("GET", "/model_info", None, self._call_timeout_s)

    def pause(self, mode: PauseMode) -> None:
        """Stop generating: end requests with what they have (`abort`), keep them with their KV
        cache (`in_place`), or put them back in the queue (`retract`)."""
        self._post("/pause_generation", {"mode": mode}, self._update_timeout_s)

    def continue_generation(self) -> None:
        self._post("/continue_generation", {}, self._call_timeout_s)

    def flush_cache(self, *, wait_s: float = 0.0) -> None:
        """Drop the KV cache of prefixes.

        Args:
            wait_s: how long the server may wait for running requests to end.

        Raises:
            CallRefused: requests are still running.
        """
        self._post(f"/flush_cache?timeout={wait_s}", {}, self._call_timeout_s + wait_s)

    def begin_weight_update(self) -> None:
        """Open the session that tensor and distributed updates need."""
        self._post("/begin_weight_update", {}, self._update_timeout_s)

    def end_weight_update(self) -> None:
        """Close it: the server prepares the weights for use."""
        self._post("/end_weight_update", {}, self._update_timeout_s)

    def update_from_tensor(
        self, payloads: Sequence[str], *, flush_cache: bool, version: str | None
    ) -> None:
        """One bucket, as one base64 payload for each tensor rank.

        Args:
            payloads: see `megatron_p3o.rollout.sglang.payload`.
            flush_cache: drop the KV cache afterwards.
            version: the weight version from here on; None: unchanged.
        """
        body = {
            "serialized_named_tensors": list(payloads),
            "load_format": "flattened_bucket",
            "flush_cache": flush_cache,
            "weight_version": version,
        }
        self._post("/update_weights_from_tensor", body, self._update_timeout_s)

    def init_update_group(
        self, *, address: str, port: int, world_size: int, name: str, backend: str
    ) -> None:
        """Join the process group whose store listens at address:port; the sender is rank 0."""
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        self._post("/init_weights_update_group", body, self._call_timeout_s)

    def destroy_update_group(self, name: str) -> None:
        self._post("/destroy_weights_update_group", {"group_name": name}, self._call_timeout_s)

    def update_from_group(
        self,
        tensors: Sequence[TensorDescription],
        *,
        group: str,
        flush_cache: bool,
        version: str | None,
    ) -> None:
        """One bucket, which the group's rank 0 broadcasts meanwhile."""
        body = {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": flush_cache,
            "weight_version": version,
        }
        self._post("/update_weights_from_distributed", body, self._update_timeout_s)

    def update_from_disk(self, model_dir: str, *, flush_cache: bool, version: str) -> None:
        """Load a model directory that the server can read at this path."""
        body = {
            "model_path": model_dir,
            # Else that of the server's start, which for FP8 blocks reads no files.
            "load_format": "auto",
            "flush_cache": flush_cache,
            "weight_version": version,
        }
        self._post("/update_weights_from_disk", body, self._update_timeout_s)

    def checksums(self) -> list[dict[str, str]]:
        """Checksum of every parameter by the server's name, for each tensor rank in order."""
        content = self._post("/weights_checker", {"action": "checksum"}, self._update_timeout_s)
        ranks = content.get("ranks", [])
        ranks = sorted(ranks, key=lambda rank: rank["parallelism_info"][0]["tp_rank"])
        return [rank["checksums"] for rank in ranks]

    def _post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        return self._call("POST", path, body, timeout_s)

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> Mapping[str, Any]:
        """The JSON answer; {} for a text.

        Raises:
            ServerUnreachable, ServerTimeout, CallRefused: see `errors`.
        """
        where = f"{self.url}{path.partition('?')[0]}"
        try:
            response = self._client.request(
                method, f"{self.url}{path}", json=body, timeout=timeout_s
            )
        except httpx.TimeoutException as error:
            raise ServerTimeout(f"{where} gave no answer within {timeout_s:g} s") from error
        except httpx.TransportError as error:
            raise ServerUnreachable(f"{where} cannot be reached: {error!r}") from error
        return _accepted(where, response)


def _accepted(where: str, response: httpx.Response) -> Mapping[str, Any]:
    try:
        content = response.json()
    except ValueError:
        content = {}
    if not isinstance(content, dict):
        content = {}
    if response.status_code != httpx.codes.OK or content.get("success") is False:
        said = str(content.get("message") or content.get("error") or response.text)
        raise CallRefused(f"{where} answered {response.status_code}: {said[:_SHOWN_CHARACTERS]}")
    return content
