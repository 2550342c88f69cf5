"""A token that requests must carry, in a header or, from the search page, in a cookie."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from shortlist.errors import ConfigError
from shortlist.serve.limits import RequestError

MIN_LENGTH = 16
COOKIE_SECONDS = 365 * 24 * 3600
Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


class AccessToken:
    """A token that is compared in constant time.

    Browsers do not send a header when they load a picture. The page therefore exchanges the token for a cookie that
    scripts cannot read. Its name and value are derived from the token, so that the cookies of two servers on different
    ports of a computer do not replace each other, and a new token invalidates them.

    Args:
        token: At least 16 ASCII letters, digits and punctuation characters.

    Raises:
        ConfigError: The token is too short, or has other characters.
    """

    def __init__(self, token: str) -> None:
        if not re.fullmatch(rf"[!-~]{{{MIN_LENGTH},}}", token):
            raise ConfigError(
                f"`token` must have at least {MIN_LENGTH} characters, only ASCII letters, digits and punctuation. "
                "To generate one: python -c 'import secrets; print(secrets.token_urlsafe())'"
            )
        self._key = token.encode()
        self._cookie_name = f"shortlist-{self._derived('name')[:16]}"
        self._cookie_value = self._derived("value")

    def require(self, request: Request, bearer: Bearer) -> None:
        """Refuse a request that has neither the token nor the cookie."""
        given = "" if bearer is None else bearer.credentials
        cookie = request.cookies.get(self._cookie_name, "")
        if not (_equal(given, self._key.decode()) | _equal(cookie, self._cookie_value)):
            problem = "is wrong" if given else "is missing: send the header 'Authorization: Bearer TOKEN'"
            raise RequestError(401, f"The token {problem}.", {"WWW-Authenticate": "Bearer"})

    def set_cookie(self, request: Request, response: Response) -> None:
        """Set the cookie in the browser of a request that has the token."""
        response.set_cookie(
            self._cookie_name,
            self._cookie_value,
            max_age=COOKIE_SECONDS,
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )

    def _derived(self, purpose: str) -> str:
        return hmac.digest(self._key, f"shortlist serve cookie {purpose}".encode(), "sha256").hex()


def read_token(file: Path) -> str:
    """Read a token from a file, without white space around it.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise ConfigError(f"Cannot read the token file {file}: {reason}.") from None


def _equal(one: str, other: str) -> bool:
    """Compare in a time that depends neither on the contents nor, because of the digests, on the lengths."""
    digests = (hashlib.sha256(each.encode("utf-8", "surrogateescape")).digest() for each in (one, other))
    return hmac.compare_digest(*digests)
