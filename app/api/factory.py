"""Builds the ASGI application."""

from __future__ import annotations

import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asgi_correlation_id import CorrelationIdMiddleware
from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi

from app import web
from app.api import errors, logs
from app.api.access import AccessMiddleware
from app.api.errors import ProblemDocument, ProblemMiddleware
from app.api.routes import answers, calibrations, catalog, evidence, health, runs
from app.db import migrations
from app.db.session import Database
from app.settings import Settings, get_settings
from estimator import ESTIMATOR_VERSION
from estimator.allocator import warm

DESCRIPTION = """Says why a Megatron-Bridge training job ran out of GPU memory, and hands back settings that fit.

Every address below except the service's own is also there under `/v1`. Errors are RFC 9457 problems
(`application/problem+json`) whose `errors` name each field, what is wrong with it and what would be right."""


def create_app(settings: Settings | None = None) -> FastAPI:
    """The application; it refuses to start on a database that is not at the newest migration."""
    settings = settings or get_settings()
    logs.configure(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        database = Database(settings)
        try:
            migrations.prepare(settings, database.engine)
            app.state.database = database
            _settle_memory()
            # Compiled code is loaded meanwhile; where it has to be compiled first, that takes half a minute.
            threading.Thread(target=warm, name="warm", daemon=True).start()
            yield
        finally:
            database.close()

    # The interactive pages would load scripts from another host: the document itself is served instead.
    app = FastAPI(
        title="Oombudsman",
        version=ESTIMATOR_VERSION,
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    api = APIRouter()
    api.include_router(answers.build_router(settings))
    api.include_router(evidence.build_router(settings))
    api.include_router(runs.build_router(settings))
    api.include_router(calibrations.build_router(settings))
    api.include_router(catalog.router)
    app.include_router(api)
    app.include_router(api, prefix="/v1", include_in_schema=False)
    app.include_router(health.router)
    app.include_router(web.build_router(settings))
    errors.install(app)
    # The last one added is the outermost.
    app.add_middleware(AccessMiddleware, settings=settings)
    app.add_middleware(ProblemMiddleware)
    app.add_middleware(logs.AccessLogMiddleware)
    app.add_middleware(CorrelationIdMiddleware)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _settle_memory() -> None:
    """What start has loaded is never collected again, and young objects less often: an estimate makes some hundred
    thousand small tuples without a cycle among them, which the default thresholds visit dozens of times."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _openapi(app: FastAPI) -> dict[str, object]:
    """The document, with the schema of problems, and without FastAPI's own 422 that this service never sends."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            summary="GPU memory of Megatron-Bridge jobs, and the override that fits",
            routes=app.routes,
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas["ProblemDocument"] = ProblemDocument.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schemas["ProblemDocument"].pop("$defs", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        app.openapi_schema = document
    return app.openapi_schema
