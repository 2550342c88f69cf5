"""Random valid and invalid requests: never a 5xx status, and never a response that OpenAPI does not describe."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, assume, given, settings

from shortlist.gallery.gallery import Gallery
from shortlist.serve import create_app
from tests.serve.conftest import LIMITS

if TYPE_CHECKING:  # importing it is slow, so only the tests do
    from schemathesis import BaseSchema, Case

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
FEW = settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def described(gallery: Gallery) -> BaseSchema:
    import schemathesis

    return schemathesis.openapi.from_asgi("/openapi.json", create_app(gallery, LIMITS))


def test_all_endpoints_are_tested(described: BaseSchema) -> None:
    operations = [each.ok() for each in described.get_all_operations()]
    assert {(each.method.upper(), each.path) for each in operations} == set(ENDPOINTS)


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_random_requests(described: BaseSchema, method: str, path: str, mode: str) -> None:
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    @FEW
    @given(case=described[path][method].as_strategy(generation_mode=GenerationMode(mode)))
    def send(case: Case) -> None:
        label = case.body.get("label") if isinstance(case.body, dict) else None
        assume(label is None or isinstance(label, str))  # all values of a form are strings: any label is valid
        # A file of random bytes satisfies the description, but is refused.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    send()
