"""Forms with an image: read into memory, never onto a disk, and no further than the limits go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from shortlist.serve.limits import Limits, Refused
from shortlist.serve.schema import Asked
from shortlist.serve.sentences import invalid

OVERHEAD = 2**16  # bytes of a form beside its image: boundaries, names, the other fields
FIELDS = 8  # more than we know; unknown ones are let pass


@dataclass(frozen=True)
class Upload:
    image: bytes
    asked: Asked


async def read_upload(request: Request, limits: Limits) -> Upload:
    """The image and what is asked about it.

    Raises:
        Refused: it is no such form, too long, or too slow.
    """
    try:
        form = await asyncio.wait_for(_read_form(request, limits), limits.seconds)
    except TimeoutError:
        raise Refused(408, f"The upload took longer than {limits.seconds:g} seconds.") from None
    except ClientDisconnect:
        raise Refused(400, "The upload ended before its end.") from None
    try:
        image = form.get("image")
        if not isinstance(image, UploadFile):
            raise Refused(422, "The form has no image: send a file in its field 'image'.")
        content = await image.read()
    finally:
        await form.close()
    if not content:
        raise Refused(422, "The file is empty.")
    if len(content) > limits.bytes:
        raise _too_long(limits)
    try:
        fields = {name: value for name in ("k", "label") if (value := form.get(name))}  # an empty one is none
        return Upload(content, Asked.model_validate(fields))
    except ValidationError as error:
        raise Refused(422, invalid(error.errors())) from None


class _InMemory(MultiPartParser):
    """Starlette's parser, which would write files of more than 1 MB to the disk."""

    def __init__(self, headers: Headers, stream: AsyncGenerator[bytes, None], most: int) -> None:
        super().__init__(headers, stream, max_files=1, max_fields=FIELDS, max_part_size=OVERHEAD)
        self.spool_max_size = most  # and the stream ends there


async def _read_form(request: Request, limits: Limits) -> FormData:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "multipart/form-data":
        raise Refused(415, "Send a form: multipart/form-data with a file in its field 'image'.")
    most = limits.bytes + OVERHEAD
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise _too_long(limits)
    try:
        return await _InMemory(request.headers, _bounded(request.stream(), limits), most).parse()
    except MultiPartException as error:
        raise Refused(422, f"The form cannot be read: {error.message.rstrip('.')}.") from None
    except ValueError as error:  # names that their own charset cannot decode
        raise Refused(422, f"The form cannot be read: {error}.") from None


async def _bounded(stream: AsyncGenerator[bytes, None], limits: Limits) -> AsyncGenerator[bytes, None]:
    received = 0
    async for chunk in stream:
        received += len(chunk)
        if received > limits.bytes + OVERHEAD:
            raise _too_long(limits)
        yield chunk


def _too_long(limits: Limits) -> Refused:
    return Refused(413, f"The file is too large: at most {limits.bytes / 2**20:g} MB.")
