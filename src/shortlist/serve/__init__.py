"""The search page and its JSON API."""

from shortlist.errors import ConfigError

try:
    import fastapi  # noqa: F401
    import python_multipart  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise ConfigError(f"the search page needs the package {error.name}: pip install 'shortlist[serve]'") from error

from shortlist.serve.app import create_app
from shortlist.serve.limits import Limits
from shortlist.serve.server import serve

__all__ = ["Limits", "create_app", "serve"]
