"""The web application: the JSON API and the search page."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from shortlist import __version__
from shortlist.errors import ShortlistError
from shortlist.gallery.gallery import Gallery, NoSuchItem
from shortlist.serve import api_schema as schema
from shortlist.serve.access_token import AccessToken
from shortlist.serve.api_schema import responses
from shortlist.serve.guard import Guard
from shortlist.serve.limits import Limits, RequestError, describe_errors
from shortlist.serve.observer import AccessLog, Observer
from shortlist.serve.prometheus import Metrics
from shortlist.serve.service import THUMBNAIL_SIZE, VIEW_SIZE, Service

PAGE = Path(__file__).parent / "page"
PICTURE_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/jpeg": {}}},
    304: {"description": "The client already has the current version."},
}


def create_app(
    gallery: Gallery,
    limits: Limits | None = None,
    hosts: Collection[str] | None = None,
    *,
    token: str | None = None,
    metrics: Metrics | None = None,
    access_log: AccessLog | None = None,
) -> FastAPI:
    """Create the search page and its JSON API as an ASGI application.

    Args:
        gallery: The gallery to search. Only its images are served, by their ids, and no other files.
        limits: Limits of requests.
        hosts: Host names that requests may use, such as localhost; None: any.
        token: Token that requests must carry as `Authorization: Bearer TOKEN`; the page asks for it. None: everyone who
            can connect may search.
        metrics: Counts the requests. Default: a new object.
        access_log: Logs the requests. Default: no log.

    Raises:
        ConfigError: The token has fewer than 16 characters, or characters that are not ASCII.
    """
    access = None if token is None else AccessToken(token)
    metrics = metrics or Metrics()
    service = Service(gallery, limits or Limits(), lambda by: metrics.change("requests_waiting", by))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        refreshing = asyncio.create_task(service.refresh_forever())
        yield
        refreshing.cancel()
        await service.close()

    app = FastAPI(
        title="shortlist",
        version=__version__,
        description=f"Search {'a gallery' if access else f'the gallery {gallery.name}'} by image.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page loads resources from other sites; ours is in page/
        redoc_url=None,
    )
    api = APIRouter() if access is None else APIRouter(dependencies=[Depends(access.require)], responses=responses(401))
    _add_information(api, service)
    _add_metrics(api, service, metrics)
    _add_searches(api, service)
    _add_pictures(api, service)
    if access is not None:
        _add_sign_in(api, access)
    app.include_router(api)
    _add_health(app, service)
    _add_page(app)
    _add_error_handlers(app)
    app.add_middleware(Guard, hosts=hosts)
    app.add_middleware(Observer, metrics=metrics, log=access_log)
    return app


def _add_health(app: FastAPI, service: Service) -> None:
    @app.head("/api/health", include_in_schema=False)  # some health checks use HEAD
    @app.get("/api/health", responses=responses())
    async def health() -> schema.Health:
        """Check that the server is running. It responds even while searches are in progress."""
        return schema.Health(status="ok", version=app.version)

    @app.head("/api/ready", include_in_schema=False)
    @app.get("/api/ready", responses=responses())
    async def ready() -> schema.Readiness:
        """Check that the gallery can be searched: its model is loaded, and a Milvus server answers."""
        await service.look_up(lambda: len(service.gallery))
        return schema.Readiness(status="ready")


def _add_metrics(api: APIRouter, service: Service, metrics: Metrics) -> None:
    described: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}

    @api.get("/metrics", responses=described | responses(), response_class=Response)
    async def measured() -> Response:
        """Return counts and durations of requests, and facts of the gallery, in the text format of Prometheus."""
        facts = await service.look_up(service.gallery.facts)
        labels = {"name": str(facts["name"]), "gallery": service.gallery.store.identity, "model": facts["fingerprint"]}
        text = metrics.text(
            {"gallery_images": facts["images"]}, {"gallery_info": labels, "info": {"version": __version__}}
        )
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_information(api: APIRouter, service: Service) -> None:
    gallery = service.gallery

    def describe() -> schema.GalleryFacts:
        gallery.refresh()
        return schema.GalleryFacts(
            name=gallery.name,
            images=len(gallery),
            labels=[schema.LabelFacts(label=name, images=number) for name, number in gallery.labels().items()],
            min_score=gallery.min_score,
            limits=schema.Bounds(bytes=service.limits.bytes, pixels=service.limits.pixels),
            index=schema.IndexDescription.model_validate(gallery.facts()),
        )

    @api.get("/api/gallery", responses=responses())
    async def facts() -> schema.GalleryFacts:
        """Describe the gallery in its current state: images, labels, index, and the limits of requests."""
        return await service.look_up(describe)

    @api.get("/api/items", responses=responses(422))
    async def items(
        label: schema.Label = None, offset: schema.Offset = 0, limit: schema.PageLength = 50
    ) -> schema.Items:
        """List the images of the gallery in the order of their ids, page by page."""
        found = await service.look_up(lambda: gallery.items(label=label, offset=offset, limit=limit + 1))
        return schema.Items(items=[schema.ItemFacts.of(item) for item in found[:limit]], more=len(found) > limit)

    @api.get("/api/items/{id}", responses=responses(404, 422))
    async def item(id: schema.Id) -> schema.ItemFacts:  # noqa: A002
        """Describe one image of the gallery."""
        return schema.ItemFacts.of(await service.look_up(lambda: gallery.item(id)))


def _add_searches(api: APIRouter, service: Service) -> None:
    @api.get("/api/items/{id}/similar", responses=responses(404, 422))
    async def similar(id: schema.Id, options: Annotated[schema.SearchOptions, Query()]) -> schema.Results:  # noqa: A002
        """Find the images that are most similar to an image of the gallery, without that image itself."""
        return await service.similar(id, options)

    form = {"requestBody": schema.SEARCH_FORM}

    @api.post("/api/search", responses=responses(408, 413, 415, 422), openapi_extra=form)
    async def search(request: Request) -> schema.Results:
        """Find the images that are most similar to an uploaded image, which is decoded in memory and not stored."""
        return await service.search(request)


def _add_pictures(api: APIRouter, service: Service) -> None:
    @api.get("/api/items/{id}/image", responses=PICTURE_RESPONSES | responses(404, 422), response_class=Response)
    async def image(id: schema.Id, request: Request) -> Response:  # noqa: A002
        """Return an image of the gallery as a JPEG of at most 1600 x 1600 pixels."""
        return await _picture(service, id, VIEW_SIZE, request)

    @api.get("/api/items/{id}/thumbnail", responses=PICTURE_RESPONSES | responses(404, 422), response_class=Response)
    async def thumbnail(id: schema.Id, request: Request) -> Response:  # noqa: A002
        """Return an image of the gallery as a JPEG of at most 320 x 320 pixels."""
        return await _picture(service, id, THUMBNAIL_SIZE, request)


async def _picture(service: Service, id: int, size: int, request: Request) -> Response:  # noqa: A002
    picture = await service.picture(id, size, request.headers.get("if-none-match", ""))
    headers = {"ETag": picture.version, "Cache-Control": "private, max-age=600"}
    if picture.jpeg is None:
        return Response(status_code=304, headers=headers)
    return Response(picture.jpeg, media_type="image/jpeg", headers=headers)


def _add_sign_in(api: APIRouter, access: AccessToken) -> None:
    @api.post("/api/sign-in", include_in_schema=False, status_code=204)
    async def sign_in(request: Request, response: Response) -> None:
        """Exchange the token for the cookie of the page."""
        access.set_cookie(request, response)


def _add_page(app: FastAPI) -> None:
    @app.get("/docs", include_in_schema=False)
    async def docs() -> FileResponse:
        return FileResponse(PAGE / "docs.html")

    files = StaticFiles(directory=PAGE)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    @app.api_route("/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request, name: str = "index.html") -> Response:
        return await files.get_response(name, request.scope)


def _add_error_handlers(app: FastAPI) -> None:
    """Answer all errors with {"detail": message}."""

    def error_response(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
        return JSONResponse({"detail": message}, status, headers)

    @app.exception_handler(RequestError)
    async def bad_request(_: Request, error: RequestError) -> JSONResponse:
        return error_response(error.status, str(error), dict(error.headers or {}))

    @app.exception_handler(NoSuchItem)
    async def no_such_item(_: Request, error: NoSuchItem) -> JSONResponse:
        return error_response(404, str(error))

    @app.exception_handler(ShortlistError)
    async def unavailable(_: Request, error: ShortlistError) -> JSONResponse:
        logging.getLogger(__name__).error("%s", error)
        return error_response(503, f"The gallery is not available: {error}")

    @app.exception_handler(RequestValidationError)
    async def invalid_value(_: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(422, describe_errors(error.errors()))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(error.status_code, message, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def internal_error(_: Request, error: Exception) -> JSONResponse:  # Starlette raises it again, and logs it
        return error_response(500, "Internal server error. See the log of the server.")
