"""The web form: server-rendered pages that work without JavaScript, from the same services as the API."""

from app.web.routes import build_router

__all__ = ["build_router"]
