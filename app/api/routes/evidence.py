"""POST /diagnose, POST /evidence."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from app.api.answers import DiagnoseAnswer, EvidenceAnswer
from app.api.body import StrictRoute
from app.api.errors import ProblemError, problem_responses
from app.problems import Problem
from app.schemas import DiagnoseBody
from app.services import diagnosis, evidence
from app.services.answers import encode
from app.settings import Settings
from estimator import SCHEMA_VERSION
from estimator.errors import FieldProblem

JSON = "application/json"
EXAMPLE = {
    "pasted text": {
        "summary": "A pasted out-of-memory text",
        "value": {
            "log": "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total "
            "capacity of 79.11 GiB of which 1.25 GiB is free.",
            "job": {"recipe": "llama3_8b_pretrain_config"},
            "cluster": {"gpu": "h100-80gb", "num_gpus": 2},
        },
    }
}


def build_router(settings: Settings) -> APIRouter:
    """The routes, with the limits of these settings."""
    router = APIRouter(tags=["diagnosis"])
    strict = APIRouter(route_class=StrictRoute)

    @strict.post(
        "/diagnose",
        summary="Why a run failed, from what it left",
        max_body_size=settings.max_recommend_body_bytes,
        responses={200: {"model": DiagnoseAnswer}, **problem_responses(400, 413, 415, 422, 500)},
    )
    def diagnose(body: Annotated[DiagnoseBody, Body(openapi_examples=EXAMPLE)]) -> Response:
        return Response(encode(diagnosis.diagnose(body, settings)), media_type=JSON)

    @router.post(
        "/evidence",
        summary="Keep a log or a memory snapshot for a while, to be named by its id",
        status_code=201,
        max_body_size=settings.max_evidence_body_bytes,
        responses={201: {"model": EvidenceAnswer}, **problem_responses(413, 422, 500, 507)},
        openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": _BINARY}}}},
    )
    async def upload(request: Request) -> Response:
        try:
            stored = await evidence.keep(settings, request.stream())
        except evidence.EvidenceRefused as refused:
            error = FieldProblem("body", str(refused), refused.suggestion)
            raise ProblemError(Problem(refused.slug, str(refused), (error,))) from refused
        answer = {
            "evidence_id": stored.evidence_id,
            "kind": stored.kind,
            "size_bytes": stored.size_bytes,
            "expires_at": dt.datetime.fromtimestamp(stored.expires_at, dt.UTC).isoformat(),
            "schema_version": SCHEMA_VERSION,
        }
        return Response(encode(answer), status_code=201, media_type=JSON)

    router.include_router(strict)
    return router


_BINARY = {"type": "string", "format": "binary"}
