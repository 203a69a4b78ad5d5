"""GET /recipes, GET /recipes/{name}, GET /gpus."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from app.api.answers import GpuList, RecipeAnswer, RecipePage
from app.api.errors import ProblemError, problem_responses
from app.problems import Problem
from app.services.answers import encode
from app.services.recipes import recipe_row, search_recipes
from estimator import SCHEMA_VERSION
from estimator.catalog import find_recipe, list_gpus
from estimator.errors import FieldProblem, JobError

router = APIRouter(tags=["catalogue"])


class RecipeFilters(BaseModel):
    """Filters and paging of GET /recipes."""

    model_config = ConfigDict(extra="forbid")

    q: str | None = Field(default=None, max_length=200, description="Words that name, alias or module contain")
    task: str | None = Field(default=None, max_length=40, description="pretrain, sft or peft")
    gpu: str | None = Field(default=None, max_length=80, description="A GPU kind (h100) or card (h100-80gb)")
    limit: int = Field(default=50, ge=1, le=1000)
    offset: int = Field(default=0, ge=0, le=1_000_000)


@router.get(
    "/recipes",
    summary="Recipes of Megatron-Bridge",
    responses={200: {"model": RecipePage}, **problem_responses(422, 500)},
)
def list_recipes_route(filters: Annotated[RecipeFilters, Query()]) -> Response:
    found = search_recipes(filters.q, filters.task, filters.gpu)
    end = filters.offset + filters.limit
    page = {
        "items": [recipe.as_dict() for recipe in found[filters.offset : end]],
        "total": len(found),
        "limit": filters.limit,
        "offset": filters.offset,
        "next_offset": end if end < len(found) else None,
        "schema_version": SCHEMA_VERSION,
    }
    return Response(encode(page), media_type="application/json")


@router.get(
    "/recipes/{name}",
    summary="One recipe with its whole configuration",
    responses={200: {"model": RecipeAnswer}, **problem_responses(404, 409, 422, 500)},
)
def read_recipe_route(
    name: Annotated[str, Path(max_length=200, examples=["llama3_8b_pretrain_config"])],
    module: Annotated[str | None, Query(max_length=200, description="Where two modules export the name")] = None,
) -> Response:
    try:
        recipe = find_recipe(name, module)
    except JobError as error:
        raise ProblemError(_of_search(error, module)) from error
    return Response(encode({**recipe_row(recipe), "schema_version": SCHEMA_VERSION}), media_type="application/json")


@router.get("/gpus", summary="GPUs by name", responses={200: {"model": GpuList}, **problem_responses(500)})
def list_gpus_route() -> Response:
    items = [gpu.as_dict() for gpu in list_gpus()]
    return Response(encode({"items": items, "schema_version": SCHEMA_VERSION}), media_type="application/json")


def _of_search(error: JobError, module: str | None) -> Problem:
    found = error.problems[0]
    is_name = found.path == "job.recipe"
    field = FieldProblem("name" if is_name else "module", found.message, found.suggestion)
    return Problem("not-found" if is_name or module is not None else "ambiguous", found.message, (field,))
