"""Random valid and invalid requests: never a 5xx status, and never a response that OpenAPI does not describe."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import unquote

import hypothesis
import pytest
from hypothesis import HealthCheck, assume, given

from shortlist.gallery.gallery import Gallery
from shortlist.serve import create_app
from tests.chaos.extent import SEED, times
from tests.chaos.test_fuzzing import survives
from tests.serve.conftest import LIMITS
from tests.serve.galleries import small_gallery

if TYPE_CHECKING:  # importing it is slow, so only the tests do
    from schemathesis import Case
    from schemathesis.schemas import APIOperation

ENDPOINTS = [
    ("GET", "/api/ready"),
    ("GET", "/metrics"),
    ("GET", "/api/health"),
    ("GET", "/api/gallery"),  # these have no parameters, so that no request is invalid
    ("POST", "/api/search"),
    ("GET", "/api/items"),
    ("GET", "/api/items/{id}"),
    ("GET", "/api/items/{id}/similar"),
    ("GET", "/api/items/{id}/image"),
    ("GET", "/api/items/{id}/thumbnail"),
]
CASES = [(*each, "positive") for each in ENDPOINTS] + [(*each, "negative") for each in ENDPOINTS[4:]]
settings = hypothesis.settings(
    max_examples=times(12, 1000), deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    return small_gallery(tmp_path_factory.mktemp("requests"))


@pytest.fixture(scope="module")
def operations(gallery: Gallery) -> list[APIOperation]:
    """All operations, without an application. This imports most of schemathesis, once for all tests."""
    from schemathesis import openapi

    return [each.ok() for each in openapi.from_dict(create_app(gallery).openapi()).get_all_operations()]


def test_all_endpoints_are_tested(operations: list[APIOperation]) -> None:
    assert {(each.method.upper(), each.path) for each in operations} == set(ENDPOINTS)


def is_valid_as_text(name: str, value: object) -> bool:
    """Whether a value is valid although it has another type than described: URLs and forms contain only texts."""
    if name == "label":
        return True
    if isinstance(value, list):
        return True  # a field that is repeated, or absent
    try:
        return isinstance(value, str) and (not value or isinstance(float(unquote(value)), float))  # such as " 1_0"
    except ValueError:
        return False


def send_requests(gallery: Gallery, method: str, path: str, mode: str) -> None:
    """Send random requests. This starts a thread that schemathesis uses as long as the process exists."""
    from schemathesis import GenerationMode, openapi
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    described = openapi.from_asgi("/openapi.json", create_app(gallery, LIMITS))

    @hypothesis.seed(SEED)
    @settings
    @given(case=described[path][method].as_strategy(generation_mode=GenerationMode(mode)))
    def send(case: Case) -> None:
        if mode == "negative":
            parts = [part for part in (case.path_parameters, case.query, case.body) if isinstance(part, Mapping)]
            assume(not any(is_valid_as_text(*field) for part in parts for field in part.items()))
        # A file of random bytes satisfies the description, but is refused.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    send()


@pytest.mark.usefixtures("operations")
@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_random_requests(gallery: Gallery, method: str, path: str, mode: str) -> None:
    def cases() -> Iterator[str]:
        try:
            send_requests(gallery, method, path, mode)
        except BaseException:  # schemathesis raises groups
            yield traceback.format_exc()

    survives(cases)
