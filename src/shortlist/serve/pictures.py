"""Images that come in, checked before they are decoded; images that go out, as small as they are shown."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from shortlist.data.images import load_image
from shortlist.serve.limits import Refused

# Of Pillow's many, those that people have and that decode in this process: EPS would start Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
THUMBNAIL, VIEW = 320, 1600  # pixels of the longer side
QUALITY = 88


def check_upload(content: bytes, pixels: int) -> int:
    """How many pixels an image has; reads its header, and no more.

    Raises:
        Refused: it is no image, or has more pixels.
    """
    Image.init()
    known = [name for name in FORMATS if name in Image.OPEN]
    try:
        with Image.open(io.BytesIO(content), formats=known) as image:
            width, height = image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Refused(413, f"The image has too many pixels: at most {pixels / 1e6:g} million.") from None
    except Exception:  # Pillow's readers raise nearly everything on damaged files
        names = f"{', '.join(known[:-1])} or {known[-1]}"
        raise Refused(422, f"This file is not an image that can be read: send {names}.") from None
    if width * height > pixels:
        has = f"The image has {width} x {height} pixels"
        raise Refused(413, f"{has}, which is too many: at most {pixels / 1e6:g} million.")
    return int(width * height)


def encoded(path: Path, edge: int) -> bytes:
    """The image in a file as a JPEG of at most `edge` x `edge` pixels.

    Raises:
        ImageError: the file is gone, or cannot be read.
    """
    image = load_image(path, at_least=edge)
    image.thumbnail((edge, edge))
    out = io.BytesIO()
    image.save(out, format="JPEG", quality=QUALITY)
    return out.getvalue()
