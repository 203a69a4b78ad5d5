"""Which recipes, GPUs and ``ConfigContainer`` fields exist."""

from estimator.catalog import fields
from estimator.catalog.gpus import Gpu, find_gpu, list_gpus
from estimator.catalog.recipes import Recipe, find_recipe, list_recipes

__all__ = ["Gpu", "Recipe", "fields", "find_gpu", "find_recipe", "list_gpus", "list_recipes"]
