"""Uploaded images: forms are read into memory, never to disk, and checked against the limits before decoding."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator

from fastapi import Request
from PIL import Image
from pydantic import ValidationError
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from shortlist.data.images import COMMON_FORMATS, ImageError, open_image, readable
from shortlist.serve.api_schema import SearchOptions
from shortlist.serve.limits import Limits, RequestError, describe_errors
from shortlist.serve.upload_memory import Arrival

FORM_OVERHEAD = 2**16  # bytes of a form in addition to its image: boundaries, names, other fields
MAX_FIELDS = 8  # unknown fields are ignored


def max_form_bytes(limits: Limits) -> int:
    """Return the maximum size of a form."""
    return limits.bytes + FORM_OVERHEAD


def check_form(request: Request, limits: Limits) -> None:
    """Check the headers of a search request, before its form is read.

    Raises:
        RequestError: It is not a form, or its declared size is too large.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "multipart/form-data":
        raise RequestError(415, "Send a form: multipart/form-data with a file in the field 'image'.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_form_bytes(limits):
        raise _too_large(limits)


async def read_upload(request: Request, limits: Limits, arrival: Arrival) -> tuple[bytes, SearchOptions]:
    """Read the form of a search request: the contents of an image file, and the other fields.

    Raises:
        RequestError: The form is invalid, too large, too slow, or took too long, or there is no memory for it.
    """
    try:
        async with arrival.arriving():
            form = await _read_form(request, limits, arrival)
    except ClientDisconnect:
        raise RequestError(400, "The upload was interrupted.") from None
    try:
        image = form.get("image")
        if not isinstance(image, UploadFile):
            raise RequestError(422, "The form has no image: send a file in the field 'image'.")
        content = await image.read()
    finally:
        await form.close()
    if not content:
        raise RequestError(422, "The file is empty.")
    if len(content) > limits.bytes:
        raise _too_large(limits)
    try:
        fields = {
            name: value for name in ("k", "label", "min_score") if (value := form.get(name))
        }  # empty fields are ignored
        return content, SearchOptions.model_validate(fields)
    except ValidationError as error:
        raise RequestError(422, describe_errors(error.errors())) from None


def check_image(content: bytes, max_pixels: int) -> int:
    """Return the number of pixels of an image. Only its header is read.

    Raises:
        RequestError: The file is not an image, or the image has too many pixels.
    """
    limit = f"at most {max_pixels / 1e6:g} million pixels are allowed"
    try:
        with open_image("upload", io.BytesIO(content), COMMON_FORMATS) as image:
            width, height = image.size
    except ImageError as error:
        if isinstance(error.__cause__, Image.DecompressionBombError | Image.DecompressionBombWarning):
            raise RequestError(413, f"The image is too large: {limit}.") from None
        *others, last = readable(COMMON_FORMATS)
        names = f"{', '.join(others)} or {last}"
        raise RequestError(422, f"This file is not an image that can be read: send {names}.") from None
    if width * height > max_pixels:
        raise RequestError(413, f"The image has {width} x {height} pixels, but {limit}.")
    return int(width * height)


class _InMemoryParser(MultiPartParser):
    """Starlette's parser, which by default writes files of more than 1 MB to disk."""

    def __init__(self, headers: Headers, stream: AsyncGenerator[bytes, None], max_bytes: int) -> None:
        super().__init__(headers, stream, max_files=1, max_fields=MAX_FIELDS, max_part_size=FORM_OVERHEAD)
        self.spool_max_size = max_bytes  # the stream is not longer than this


async def _read_form(request: Request, limits: Limits, arrival: Arrival) -> FormData:
    stream = _bounded(request.stream(), limits, arrival)
    try:
        return await _InMemoryParser(request.headers, stream, max_form_bytes(limits)).parse()
    except MultiPartException as error:
        raise RequestError(422, f"The form cannot be read: {error.message.rstrip('.')}.") from None
    except ValueError as error:  # for example names that cannot be decoded with the declared charset
        raise RequestError(422, f"The form cannot be read: {error}.") from None


async def _bounded(
    stream: AsyncGenerator[bytes, None], limits: Limits, arrival: Arrival
) -> AsyncGenerator[bytes, None]:
    while True:
        slow = limits.grace + arrival.received / limits.rate
        try:
            async with asyncio.timeout(min(slow, limits.seconds) - arrival.seconds):
                with arrival.reading():
                    chunk = await anext(stream, None)
        except TimeoutError:
            if slow < limits.seconds:
                raise RequestError(408, f"The upload is slower than {limits.rate / 1000:g} kB per second.") from None
            raise RequestError(408, f"The upload took longer than {limits.seconds:g} seconds.") from None
        if chunk is None:
            return
        if arrival.received + len(chunk) > max_form_bytes(limits):
            raise _too_large(limits)
        await arrival.receive(len(chunk))
        yield chunk


def _too_large(limits: Limits) -> RequestError:
    return RequestError(413, f"The file is too large: at most {limits.bytes / 2**20:g} MB are allowed.")
