"""Who may ask, and what a browser may do with the answer."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """Refuses requests for other hosts and from pages of other sites, and sends HEADERS with every answer.

    Args:
        app: what answers.
        hosts: names by which it may be called, without ports; None: any. A page elsewhere whose name was made to lead
            to this computer (DNS rebinding) calls it by that name.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-cache")
            await send(message)

        await (self._refusal(scope["method"], Headers(scope=scope)) or self.app)(scope, receive, send_guarded)

    def _refusal(self, method: str, headers: Headers) -> JSONResponse | None:
        host = headers.get("host", "")
        if self.hosts is not None and _name(host) not in self.hosts:
            sentence = f"This page is for {' and '.join(sorted(self.hosts))} only, not for {host[:100] or 'no host'}."
            return JSONResponse({"detail": sentence}, 400)
        link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site") == "cross-site" and not link:
            return JSONResponse({"detail": "Pages of other sites may not ask here."}, 403)
        return None


def _name(host: str) -> str:
    """A host without its port.

    >>> _name("LocalHost:8080"), _name("[::1]:8080"), _name("::1")
    ('localhost', '[::1]', '::1')
    """
    name, _, port = host.rpartition(":")
    return (name if port.isdecimal() and (":" not in name or name.endswith("]")) else host).lower()
