"""The pages' addresses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile

from app.api.dependencies import DatabaseDependency
from app.api.errors import ProblemError
from app.db.session import Database
from app.problems import Problem, of_estimator_error, of_validation_error
from app.schemas import DiagnoseBody, OutcomeBody
from app.services import answers, calibrations, diagnosis, evidence, outcomes, storage
from app.settings import Settings
from app.web import forms, measured, result
from app.web.forms import StartForm
from app.web.pages import HEADERS, PageRoute, error_page, page, static_file
from estimator.catalog import list_gpus, list_recipes
from estimator.errors import EstimatorError, FieldProblem

MAX_FORM_PART_BYTES = 2 << 20
UPLOAD_PIECE_BYTES = 1 << 18

Identity = Annotated[str, Path(max_length=64)]


def build_router(settings: Settings) -> APIRouter:
    """All pages, with the limits of these settings."""
    router = APIRouter(route_class=PageRoute, include_in_schema=False)

    @router.get("/")
    def start(request: Request) -> Response:
        return _start(forms.from_values(request.query_params))

    @router.post("/", max_body_size=settings.max_evidence_body_bytes)
    async def ask(request: Request, database: DatabaseDependency) -> Response:
        async with request.form(max_files=1, max_fields=40, max_part_size=MAX_FORM_PART_BYTES) as posted:
            form = forms.from_values({k: v for k, v in posted.items() if isinstance(v, str)})
            form = await _with_upload(form, posted, settings)
        if form.errors:
            return _start(form, 422)
        if posted.get("action") == "read":
            return await run_in_threadpool(_read, form, settings)
        return await run_in_threadpool(_recommend, form, settings, database)

    _add_answer_pages(router, settings)
    _add_measured_pages(router, settings)

    @router.get("/static/{name}")
    def static(name: Annotated[str, Path(max_length=80)]) -> Response:
        found = static_file(name)
        if found is None:
            return error_page(404, "Not found", "There is no such file.", "Go to the start page.")
        content, media_type = found
        headers = {**HEADERS, "Cache-Control": "public, max-age=3600"}
        return Response(content, media_type=media_type, headers=headers)

    return router


def _add_answer_pages(router: APIRouter, settings: Settings) -> None:
    """An answer at its permalink, what-if on it, and feedback."""

    @router.get("/r/{recommendation_id}")
    def show(recommendation_id: Identity, request: Request, database: DatabaseDependency) -> Response:
        row = _kept(recommendation_id, database)
        reports = outcomes.of(database, row.id)
        return page(
            "result.html",
            **result.context(
                row, request.query_params, reports, str(request.url), calibrations.of_answer(database, row)
            ),
        )

    @router.get("/r/{recommendation_id}/what-if")
    def what_if(recommendation_id: Identity, request: Request, database: DatabaseDependency) -> Response:
        row = _kept(recommendation_id, database)
        return page(
            "_whatif.html", **result.what_if_context(row, request.query_params, calibrations.of_answer(database, row))
        )

    @router.post("/r/{recommendation_id}/outcome", max_body_size=settings.max_recommend_body_bytes)
    async def report(recommendation_id: Identity, request: Request, database: DatabaseDependency) -> Response:
        row = await run_in_threadpool(_kept, recommendation_id, database)
        async with request.form(max_files=0, max_fields=10, max_part_size=MAX_FORM_PART_BYTES) as posted:
            values = {k: v for k, v in posted.items() if isinstance(v, str)}
        body, message = _outcome(values)
        if body is not None:
            try:
                await run_in_threadpool(outcomes.report, database, row, body)
            except EstimatorError as error:
                message = of_estimator_error(error).detail
            else:
                return RedirectResponse(f"/r/{row.id}#feedback", 303, headers=HEADERS)
        context = result.context(
            row, {}, outcomes.of(database, row.id), str(request.url), calibrations.of_answer(database, row)
        )
        return page("result.html", 422, **context | {"feedback_error": message, "feedback": values})


def _add_measured_pages(router: APIRouter, settings: Settings) -> None:
    """Measured runs: list and upload."""

    @router.get("/measured")
    def runs_page(request: Request, database: DatabaseDependency) -> Response:
        return page("measured.html", **measured.context(database, request.query_params))

    @router.post("/measured", max_body_size=settings.max_evidence_body_bytes)
    async def upload_runs(request: Request, database: DatabaseDependency) -> Response:
        async with request.form(max_files=1, max_fields=4, max_part_size=MAX_FORM_PART_BYTES) as posted:
            file = posted.get("file")
            if not isinstance(file, UploadFile) or not file.filename:
                context = await run_in_threadpool(measured.context, database, {})
                return page("measured.html", 422, **context | {"upload_error": "Choose a file first."})
            stored = await evidence.keep(settings, _pieces(file))
        try:
            done = await run_in_threadpool(measured.import_upload, database, stored.path)
        finally:
            stored.path.unlink(missing_ok=True)
        context = await run_in_threadpool(measured.context, database, {})
        return page("measured.html", 200 if not done.bad else 422, **context | {"imported": done})


def _start(form: StartForm, status: int = 200, seen: dict[str, Any] | None = None) -> Response:
    return page(
        "start.html",
        status,
        form=form,
        seen=seen if seen is not None else {},
        recipes=[recipe.name for recipe in list_recipes()],
        aliases=sorted({alias for recipe in list_recipes() for alias in recipe.aliases}),
        gpus=list_gpus(),
    )


async def _with_upload(form: StartForm, posted: FormData, settings: Settings) -> StartForm:
    """A file that came with the form is kept as evidence; its id travels with the form from then on."""
    file = posted.get("file")
    if not isinstance(file, UploadFile) or not file.filename:
        return form
    try:
        stored = await evidence.keep(settings, _pieces(file))
    except evidence.EvidenceRefused as refused:
        text = f"{refused}." + (f" {refused.suggestion}." if refused.suggestion else "")
        return replace(form, errors={"log": text[:1].upper() + text[1:]})
    return replace(form, evidence_id=stored.evidence_id, evidence_name=file.filename[:200])


async def _pieces(file: UploadFile) -> AsyncIterator[bytes]:
    while piece := await file.read(UPLOAD_PIECE_BYTES):
        yield piece


def _read(form: StartForm, settings: Settings) -> Response:
    if not (form.log or form.evidence_id):
        return _start(replace(form, errors={"log": "Paste a text or choose a file first."}), 422)
    try:
        body = DiagnoseBody(log=form.log or None, evidence_id=form.evidence_id or None)
        answer = diagnosis.diagnose(body, settings)
    except ValidationError as error:
        return _start(forms.with_problem(form, of_validation_error(error, DiagnoseBody)), 422)
    except EstimatorError as error:
        return _start(forms.with_problem(form, of_estimator_error(error)), 422)
    return _start(forms.filled_from(form, answer), seen=answer)


def _recommend(form: StartForm, settings: Settings, database: Database) -> Response:
    body = forms.request_of(form)
    if isinstance(body, StartForm):
        return _start(body, 422)
    try:
        answer = answers.recommend(body, settings, calibrations.active(database))
    except EstimatorError as error:
        return _start(forms.with_problem(form, of_estimator_error(error)), 422)
    storage.store(database, body, answer)
    return RedirectResponse(f"/r/{answer['id']}", 303, headers=HEADERS)


def _kept(recommendation_id: str, database: Database) -> Any:
    known = recommendation_id.isascii() and recommendation_id.startswith("rec_") and recommendation_id.isprintable()
    row = storage.load(database, recommendation_id) if known else None
    if row is None:
        text = "There is no answer at this address: it was mistyped, or removed."
        suggestion = "Ask again on the start page: an answer takes a second."
        raise ProblemError(Problem("not-found", text, (FieldProblem("recommendation_id", text, suggestion),)))
    return row


def _outcome(values: dict[str, str]) -> tuple[OutcomeBody | None, str]:
    """The report, or what is wrong with it."""
    peak = values.get("peak", "").strip().replace(",", ".")
    rank = values.get("rank", "")
    if values.get("ran") not in ("yes", "no"):
        return None, "Say whether it ran."
    if not rank.isascii() or not rank.isdigit():
        return None, "Say which recommendation was tried."
    size: int | None = None
    if peak:
        try:
            size = round(float(peak) * (1 << 30))
        except (ValueError, OverflowError):
            return None, f"The peak {peak[:40]!r} is not a number of GiB."
    try:
        return OutcomeBody(rank=int(rank[:4]), ran=values["ran"] == "yes", peak=size, log=values.get("log") or None), ""
    except ValidationError as error:
        return None, of_validation_error(error, OutcomeBody).detail
