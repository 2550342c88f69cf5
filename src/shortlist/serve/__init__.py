"""The search page and its JSON API."""

from shortlist.extras import extra

with extra("serve", __name__):
    import python_multipart  # noqa: F401 - FastAPI imports it only when it receives a form

    from shortlist.serve.access_token import read_token
    from shortlist.serve.limits import Limits
    from shortlist.serve.server import serve
    from shortlist.serve.web_app import create_app

__all__ = ["Limits", "create_app", "read_token", "serve"]
