"""A proxy in front of a real server that can be told to misbehave."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp import web

Fault = Callable[[dict[str, Any]], None]
"""Spoils the answer of a generation in place."""


class Proxy:
    """Passes requests on; the next `num_faults` generations are spoilt in the way that `fault`
    says: `500`, `garbage`, `truncated`, `silent`, or a function of the answer."""

    def __init__(self, target: str) -> None:
        self.fault: str | Fault = "garbage"
        self.num_faults = 0
        self.refuses_weights = False
        self._target = target
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> str:
        """Its URL."""
        self._session = aiohttp.ClientSession()
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        return f"http://127.0.0.1:{port}"

    async def close(self) -> None:
        assert self._runner is not None and self._session is not None
        await self._session.close()
        await self._runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        if self.refuses_weights and request.path == "/begin_weight_update":
            return web.json_response({"success": False, "message": "no room"}, status=400)
        is_spoilt = request.path == "/generate" and self.num_faults > 0
        if is_spoilt:
            self.num_faults -= 1
            if self.fault == "500":
                return web.Response(status=500, text="boom")
            if self.fault == "silent":
                await asyncio.sleep(3600)
        body = await request.read()
        async with self._session.request(
            request.method, self._target + request.path_qs, data=body, headers=request.headers
        ) as answer:
            content = await answer.read()
            if not is_spoilt:
                return web.Response(
                    status=answer.status, body=content, content_type=answer.content_type
                )
        if self.fault == "garbage":
            return web.Response(body=b"<html>nobody home</html>")
        if self.fault == "truncated":
            return await self._truncated(request, content)
        spoilt = json.loads(content)
        assert callable(self.fault)
        self.fault(spoilt)
        return web.json_response(spoilt)

    async def _truncated(self, request: web.Request, content: bytes) -> web.StreamResponse:
        """Promises the whole answer, sends half, hangs up."""
        response = web.StreamResponse(headers={"Content-Length": str(len(content))})
        await response.prepare(request)
        await response.write(content[: len(content) // 2])
        assert request.transport is not None
        request.transport.close()
        return response
