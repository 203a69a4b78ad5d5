"""Questions about the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from estimator.catalog import Recipe, find_gpu, list_recipes
from estimator.errors import JobError


def search_recipes(query: str | None = None, task: str | None = None, gpu: str | None = None) -> Sequence[Recipe]:
    """Recipes whose name, alias or module contains every word of ``query``, of this task, for this GPU kind.

    ``gpu`` is the kind in the recipe's name ("h100") or a card of it ("h100-80gb").
    """
    words = (query or "").lower().replace("-", "_").split()
    return [
        recipe
        for recipe in list_recipes()
        if all(any(word in text.lower() for text in (recipe.name, recipe.module, *recipe.aliases)) for word in words)
        and (task is None or recipe.task == task.lower())
        and (gpu is None or _is_for(recipe, gpu))
    ]


def recipe_row(recipe: Recipe) -> dict[str, Any]:
    """The whole recipe: its row of the list, and the document that it stands for."""
    return {**recipe.as_dict(), "document": recipe.document()}


def _is_for(recipe: Recipe, gpu: str) -> bool:
    if recipe.gpu is None:
        return False
    if recipe.gpu.lower() == gpu.lower():
        return True
    try:
        name = find_gpu(gpu).name
    except JobError:
        return False
    return name.split("-")[0] == recipe.gpu.lower()
