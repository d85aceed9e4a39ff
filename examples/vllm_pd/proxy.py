"""A proxy before a prefill server and a decode server of vLLM, as small as it can be.

    request ──▶ 1. prefill server: the same request, one token ──▶ kv_transfer_params of its answer
                2. decode server: the request, with these ──▶ the answer, streamed as it comes

The parameters say how much of the prompt is stored or about to be. They are only good for a short wait: blocks are
found by their hashes, with or without them. Several servers of a kind are taken in turn. Needs aiohttp, which vLLM brings.

    python proxy.py --port 8000 --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

PREFILL, DECODE = web.AppKey("prefill", itertools.cycle), web.AppKey("decode", itertools.cycle)
SESSION = web.AppKey("session", ClientSession)
LENGTHS = ("max_tokens", "max_completion_tokens")


def for_prefill(body: dict[str, Any]) -> dict[str, Any]:
    """The same prompt, but one token and no stream."""
    left_out = ("stream", "stream_options", "min_tokens", *LENGTHS)
    kept = {key: value for key, value in body.items() if key not in left_out}
    lengths = {key: 1 for key in LENGTHS if key in body} or {"max_tokens": 1}
    return {**kept, **lengths, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}


async def complete(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    session = request.app[SESSION]
    headers = {name: request.headers[name] for name in ("Authorization",) if name in request.headers}
    try:
        prefill = next(request.app[PREFILL])
        async with session.post(prefill + request.path, json=for_prefill(body), headers=headers) as answer:
            if answer.status != 200:  # a wrong request: the client gets to read why
                return web.Response(
                    body=await answer.read(), status=answer.status, content_type="application/json"
                )
            params = (await answer.json()).get("kv_transfer_params")
        if params:
            body = {**body, "kv_transfer_params": params}
        async with session.post(
            next(request.app[DECODE]) + request.path, json=body, headers=headers
        ) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response
    except ClientError as error:
        return web.json_response({"error": {"message": f"a server behind the proxy: {error}"}}, status=502)


async def health(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def one_session(app: web.Application) -> AsyncIterator[None]:
    async with ClientSession(timeout=ClientTimeout(total=None, connect=10)) as app[SESSION]:
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL")
    args = parser.parse_args()
    app = web.Application(client_max_size=64 << 20)
    app[PREFILL], app[DECODE] = itertools.cycle(args.prefill), itertools.cycle(args.decode)
    app.cleanup_ctx.append(one_session)
    app.router.add_post("/v1/completions", complete)
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/healthcheck", health)
    web.run_app(app, host=args.host, port=args.port, print=None)


if __name__ == "__main__":
    main()
