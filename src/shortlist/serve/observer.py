"""Middleware that measures requests, and writes an access log."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shortlist.serve.prometheus import Metrics


class AccessLog:
    """Writes one line with a JSON object per request.

    Args:
        file: File to append to, or - for standard output. If another program renames the file, as logrotate does, a
            new one is created. Several processes may write to the same file.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, file: Path | str) -> None:
        to_stdout = str(file) == "-"
        self._handler = logging.StreamHandler(sys.stdout) if to_stdout else WatchedFileHandler(file, encoding="utf-8")

    def write(self, entry: dict[str, Any]) -> None:
        self._handler.handle(logging.makeLogRecord({"msg": json.dumps(entry, ensure_ascii=False)}))

    def close(self) -> None:
        self._handler.close()


class Observer:
    """Counts requests, measures their durations and writes them to the access log.

    Args:
        app: The application.
        metrics: Counts the requests.
        log: The access log, or None.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, log: AccessLog | None) -> None:
        self.app, self.metrics, self.log = app, metrics, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, sent, started = 500, 0, time.perf_counter()  # 500 if there is no response because of an exception

        async def send_and_record(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            sent += len(message.get("body", b""))
            await send(message)

        self.metrics.change("requests_in_progress", 1)
        try:
            await self.app(scope, receive, send_and_record)
        except asyncio.CancelledError:
            status = 503  # see `Draining`
            raise
        finally:
            self.metrics.change("requests_in_progress", -1)
            self._record(scope, status, sent, time.perf_counter() - started)

    def _record(self, scope: Scope, status: int, sent: int, seconds: float) -> None:
        self.metrics.record(getattr(scope.get("route"), "path", ""), status, seconds)
        if self.log is not None:
            entry = {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "client": (scope.get("client") or [None])[0],
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "bytes": sent,
                "seconds": round(seconds, 4),
                "process": os.getpid(),
            }
            self.log.write(entry)
