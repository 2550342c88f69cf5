"""Middleware that checks where requests come from, and adds security headers to responses."""

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
    """Refuses requests for other hosts and from pages of other sites, and adds HEADERS to every response.

    Args:
        app: The application.
        hosts: Host names, without ports, that requests may use; None: any. This prevents DNS rebinding, where the name
            of another site is made to point to this computer.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-cache")
            await send(message)

        await (self._refusal(scope["method"], Headers(scope=scope)) or self.app)(scope, receive, send_with_headers)

    def _refusal(self, method: str, headers: Headers) -> JSONResponse | None:
        host = headers.get("host", "")
        if self.hosts is not None and _host_name(host) not in self.hosts:
            allowed = ", ".join(sorted(self.hosts))
            return JSONResponse({"detail": f"The host {host[:100]!r} is not allowed. Allowed hosts: {allowed}."}, 400)
        link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site") == "cross-site" and not link:
            return JSONResponse({"detail": "Requests from pages of other sites are not allowed."}, 403)
        return None


def _host_name(host: str) -> str:
    """Return the value of a Host header without the port.

    >>> _host_name("LocalHost:8080"), _host_name("[::1]:8080"), _host_name("::1")
    ('localhost', '[::1]', '::1')
    """
    name, _, port = host.rpartition(":")
    return (name if port.isdecimal() and (":" not in name or name.endswith("]")) else host).lower()
