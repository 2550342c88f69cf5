"""Orderly end of requests that are in progress when the server is stopped."""

from __future__ import annotations

import asyncio

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Draining:
    """ASGI application that runs another one, and can end its requests with the status 503.

    Args:
        app: The application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._unanswered: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        if scope["type"] != "http" or task is None:
            await self.app(scope, receive, send)
            return

        async def send_and_record(message: Message) -> None:
            self._unanswered.discard(task)
            await send(message)

        self._unanswered.add(task)
        try:
            await self.app(scope, receive, send_and_record)
        except asyncio.CancelledError:
            if task not in self._unanswered:
                raise
            await JSONResponse({"detail": "The server is being stopped."}, 503, {"Connection": "close"})(
                scope, receive, send
            )
        finally:
            self._unanswered.discard(task)

    def end(self) -> None:
        """Answer the requests that have no response yet with 503."""
        for task in self._unanswered:
            task.cancel()
