"""What running SGLang servers answer, asked without torch."""

from dataclasses import dataclass

import httpx

_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """One of rollout.servers."""

    url: str
    problem: str | None = None
    """Why it cannot be used; the rest is then not known."""
    version: str = ""
    tensor_parallel_size: int = 0
    device: str = ""


def ask_server(
    url: str,
    *,
    api_key: str | None,
    timeout_s: float,
    transport: httpx.BaseTransport | None = None,
) -> ServerFacts:
    """Ask /health, then /server_info.

    Args:
        url: of the server.
        api_key: sent as a bearer token and never shown.
        timeout_s: of each question.
        transport: for tests.
    """
    url = url.rstrip("/")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    # As the trainer's own client: no proxies, no redirections.
    with httpx.Client(
        headers=headers,
        trust_env=False,
        follow_redirects=False,
        timeout=timeout_s,
        transport=transport,
    ) as client:
        try:
            health, answer = client.get(f"{url}/health"), client.get(f"{url}/server_info")
        except httpx.TimeoutException:
            return ServerFacts(url=url, problem=f"gave no answer within {timeout_s:g} s")
        except httpx.TransportError as error:
            return ServerFacts(url=url, problem=f"cannot be reached ({error})")
    for path, response in (("/health", health), ("/server_info", answer)):
        if response.status_code != httpx.codes.OK:
            said = response.text[:_SHOWN_CHARACTERS].strip()
            problem = f"{path} answered {response.status_code} {said}".rstrip()
            return ServerFacts(url=url, problem=problem)
    try:
        content = answer.json()
        return ServerFacts(
            url=url,
            version=str(content["version"]),
            tensor_parallel_size=int(content["tp_size"]),
            device=str(content["device"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        return ServerFacts(url=url, problem=f"/server_info is not SGLang's ({error!r})")
