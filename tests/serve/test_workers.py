"""Threads that take too long are replaced."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fastapi.testclient import TestClient

from shortlist.gallery.gallery import Gallery
from shortlist.serve import Limits, create_app, workers
from shortlist.serve.limits import RequestError
from shortlist.serve.workers import Workers
from tests.processes import LONG


@pytest.fixture
def hanging() -> Any:
    """A function that does not return before the end of the test."""
    end = threading.Event()
    yield lambda: end.wait(LONG)
    end.set()


def run(check: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(check())


def test_results_and_errors() -> None:
    async def check() -> None:
        few = Workers(2, LONG)
        assert await asyncio.gather(*(few.run(pow, number, 2) for number in range(9))) == [n**2 for n in range(9)]
        with pytest.raises(TimeoutError, match="of the function"):
            await few.run(fails)
        assert few._threads == 2

    def fails() -> None:
        raise TimeoutError("of the function")

    run(check)


def test_others_continue(hanging: Callable[[], object]) -> None:
    async def check() -> None:
        few = Workers(2, 0.01)
        for _ in range(5):
            with pytest.raises(RequestError, match=r"longer than 0\.01 seconds") as error:
                await few.run(hanging)
            assert error.value.status == 503
        few.seconds = LONG
        assert await few.run(lambda: threading.current_thread().daemon)  # so that the process can end

    run(check)


def test_waiting_has_a_limit(hanging: Callable[[], object]) -> None:
    async def check() -> None:
        one = Workers(1, LONG, 0.01)
        first = asyncio.create_task(one.run(hanging))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match=r"has waited for 0\.01 seconds. Try again in 5 seconds\.") as error:
            await one.run(hanging)
        assert (error.value.status, error.value.headers) == (503, {"Retry-After": "5"})
        first.cancel()

    run(check)


def test_there_are_not_too_many(hanging: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MAX_STUCK", 2)

    async def check() -> None:
        few = Workers(1, 0.01)
        for message in ("longer than", "longer than", "longer than", "too many files"):
            with pytest.raises(RequestError, match=message):
                await few.run(hanging)

    run(check)


def test_one_that_ends_late_is_used_again(recwarn: pytest.WarningsRecorder) -> None:
    end = threading.Event()

    async def check() -> None:
        one = Workers(1, 0.01)
        with pytest.raises(RequestError):
            await one.run(late)
        end.set()
        one.seconds = LONG
        await one.close(LONG)
        assert await one.run(threading.current_thread) in threading.enumerate()
        assert one._threads == 1

    def late() -> None:
        end.wait(LONG)
        raise ValueError("nobody waits for this any more")

    run(check)
    assert not recwarn.list


@pytest.mark.parametrize("path", ["gallery", "items", "items/0", "items/0/similar", "items/0/image"])
def test_every_endpoint_has_a_bounded_time(
    gallery: Gallery, hanging: Callable[[], object], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("refresh", "items", "item"):
        monkeypatch.setattr(gallery, name, lambda *_, **__: hanging())
    with TestClient(create_app(gallery, Limits(work_seconds=0.01))) as client:
        monkeypatch.setattr("shortlist.serve.service.CLOSE_SECONDS", 0)
        assert [client.get(f"/api/{path}").status_code for _ in range(4)] == [503] * 4  # more than there are threads
        assert client.get("/api/health").status_code == 200
