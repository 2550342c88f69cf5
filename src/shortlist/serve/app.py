"""The JSON API, and the page that asks it."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from shortlist import __version__
from shortlist.errors import ShortlistError
from shortlist.gallery.gallery import Gallery, Hit, Item, NoSuchItem
from shortlist.serve import schema
from shortlist.serve.guard import Guard
from shortlist.serve.limits import Limits, Refused
from shortlist.serve.pictures import THUMBNAIL, VIEW
from shortlist.serve.schema import responses
from shortlist.serve.sentences import invalid
from shortlist.serve.service import Service

PAGE = Path(__file__).parent / "page"
PICTURE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/jpeg": {}}},
    304: {"description": "The picture that the browser has is the same."},
}


def create_app(gallery: Gallery, limits: Limits | None = None, hosts: Collection[str] | None = None) -> FastAPI:
    """The search page and its JSON API, as an ASGI application.

    Args:
        gallery: what is searched. Its files are served, by their ids; nothing else is.
        limits: of uploads.
        hosts: names by which it may be called, such as localhost; None: any.
    """
    app = FastAPI(
        title="shortlist",
        version=__version__,
        description=f"Search the gallery {gallery.name} by image.",
        docs_url=None,  # loads from elsewhere: ours is in page/
        redoc_url=None,
    )
    service = Service(gallery, limits or Limits())
    _add_facts(app, service)
    _add_searches(app, service)
    _add_pictures(app, service)
    _add_page(app)
    _add_problems(app)
    app.add_middleware(Guard, hosts=hosts)
    return app


def _add_facts(app: FastAPI, service: Service) -> None:
    gallery = service.gallery

    @app.head("/api/health", include_in_schema=False)  # as some health checks ask
    @app.get("/api/health", responses=responses())
    async def health() -> schema.Health:
        """Whether the server answers. It does while it is busy, too."""
        return schema.Health(status="ok", version=app.version)

    @app.get("/api/gallery", responses=responses(503))
    def facts() -> schema.GalleryFacts:
        """What there is to search, as it is now, its labels, and the bounds of uploads."""
        gallery.refresh()
        return schema.GalleryFacts(
            name=gallery.name,
            images=len(gallery),
            labels=[schema.LabelFacts(label=name, images=number) for name, number in gallery.labels().items()],
            limits=schema.Bounds.of(service.limits),
            index=schema.IndexFacts.model_validate(gallery.facts()),
        )

    @app.get("/api/items", responses=responses(422, 503))
    def items(label: schema.Label = None, offset: schema.Offset = 0, limit: schema.PageLength = 50) -> schema.Items:
        """The gallery's images in the order of their ids, a page at a time."""
        found = gallery.items(label=label, offset=offset, limit=limit + 1)
        return schema.Items(items=[schema.ItemFacts.of(item) for item in found[:limit]], more=len(found) > limit)

    @app.get("/api/items/{id}", responses=responses(404, 422, 503))
    def item(id: schema.Id) -> schema.ItemFacts:  # noqa: A002
        """One image of the gallery."""
        return schema.ItemFacts.of(gallery.item(id))


def _add_searches(app: FastAPI, service: Service) -> None:
    @app.get("/api/items/{id}/similar", responses=responses(404, 422, 503))
    async def similar(id: schema.Id, k: schema.K = 10, label: schema.Label = None) -> schema.Results:  # noqa: A002
        """The nearest of an image of the gallery, which is not among them itself."""
        item, hits = await service.similar(id, k, label)
        return _results(hits, item)

    form = {"requestBody": schema.SEARCH_FORM}

    @app.post("/api/search", responses=responses(408, 413, 415, 422, 503), openapi_extra=form)
    async def search(request: Request) -> schema.Results:
        """The nearest of an image that you send. It is decoded in memory and not stored."""
        return _results(await service.search(request), None)


def _results(hits: list[Hit], query: Item | None) -> schema.Results:
    asked = None if query is None else schema.ItemFacts.of(query)
    return schema.Results(query=asked, results=[schema.Result.of_hit(hit) for hit in hits])


def _add_pictures(app: FastAPI, service: Service) -> None:
    @app.get("/api/items/{id}/image", responses=PICTURE | responses(404, 422, 503), response_class=Response)
    async def image(id: schema.Id, request: Request) -> Response:  # noqa: A002
        """An image of the gallery as a JPEG, at most 1600 pixels wide and high."""
        return await _picture(service, id, VIEW, request)

    @app.get("/api/items/{id}/thumbnail", responses=PICTURE | responses(404, 422, 503), response_class=Response)
    async def thumbnail(id: schema.Id, request: Request) -> Response:  # noqa: A002
        """An image of the gallery as a JPEG, at most 320 pixels wide and high."""
        return await _picture(service, id, THUMBNAIL, request)


async def _picture(service: Service, id: int, edge: int, request: Request) -> Response:  # noqa: A002
    picture = await service.picture(id, edge, request.headers.get("if-none-match", ""))
    headers = {"ETag": picture.version, "Cache-Control": "private, max-age=600"}
    if picture.jpeg is None:
        return Response(status_code=304, headers=headers)
    return Response(picture.jpeg, media_type="image/jpeg", headers=headers)


def _add_page(app: FastAPI) -> None:
    @app.get("/docs", include_in_schema=False)
    async def docs() -> FileResponse:
        return FileResponse(PAGE / "docs.html")

    files = StaticFiles(directory=PAGE)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    @app.api_route("/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request, name: str = "index.html") -> Response:
        return await files.get_response(name, request.scope)


def _add_problems(app: FastAPI) -> None:
    """Every answer that is no result has one shape: {"detail": a sentence}."""

    def said(status: int, sentence: str, headers: dict[str, str] | None = None) -> JSONResponse:
        return JSONResponse({"detail": sentence}, status, headers)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return said(error.status, str(error))

    @app.exception_handler(NoSuchItem)
    async def no_such_item(_: Request, error: NoSuchItem) -> JSONResponse:
        return said(404, str(error))

    @app.exception_handler(ShortlistError)
    async def cannot_answer(_: Request, error: ShortlistError) -> JSONResponse:
        logging.getLogger(__name__).error("%s", error)
        return said(503, f"The gallery cannot answer now: {error}")

    @app.exception_handler(RequestValidationError)
    async def bad_value(_: Request, error: RequestValidationError) -> JSONResponse:
        return said(422, invalid(error.errors()))

    @app.exception_handler(HTTPException)
    async def no_such_page(request: Request, error: HTTPException) -> JSONResponse:
        where = f"{request.method} {request.url.path}"
        return said(error.status_code, f"{where}: {error.detail}", dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def our_mistake(_: Request, error: Exception) -> JSONResponse:  # it is raised again, and so logged
        return said(500, "That is a mistake of the server: its log says more.")
