"""Whatever is asked, as the OpenAPI description allows it or not: never a 5xx, and never what is not described."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import BaseSchema, Case, GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from shortlist.gallery.gallery import Gallery
from shortlist.serve import create_app
from tests.serve.conftest import LIMITS

ENDPOINTS = [
    ("GET", "/api/health"),
    ("GET", "/api/gallery"),  # these two take nothing, so that nothing can be wrong
    ("POST", "/api/search"),
    ("GET", "/api/items"),
    ("GET", "/api/items/{id}"),
    ("GET", "/api/items/{id}/similar"),
    ("GET", "/api/items/{id}/image"),
    ("GET", "/api/items/{id}/thumbnail"),
]
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
CASES = [(*each, POSITIVE) for each in ENDPOINTS] + [(*each, NEGATIVE) for each in ENDPOINTS[2:]]
FEW = settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def described(gallery: Gallery) -> BaseSchema:
    return schemathesis.openapi.from_asgi("/openapi.json", create_app(gallery, LIMITS))


def test_all_endpoints_are_asked(described: BaseSchema) -> None:
    operations = [each.ok() for each in described.get_all_operations()]
    assert {(each.method.upper(), each.path) for each in operations} == set(ENDPOINTS)


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_whatever_is_asked(described: BaseSchema, method: str, path: str, mode: GenerationMode) -> None:
    @FEW
    @given(case=described[path][method].as_strategy(generation_mode=mode))
    def ask(case: Case) -> None:
        # A file of random bytes is what the description allows, and is refused all the same.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    ask()
