"""The job document: recipe < config < overrides, merged into one ``ConfigContainer``-shaped mapping and checked.

Every problem is collected before JobError is raised. Names and types come from the generated table
(``estimator.catalog.fields``); nothing of the input is imported or executed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from estimator.catalog import fields as catalog
from estimator.catalog.recipes import find_recipe
from estimator.errors import FieldProblem, JobError
from estimator.job.editing import Editor
from estimator.job.overrides import read_overrides
from estimator.job.values import MAX_ITEMS, reduce_objects

CONTAINER = "megatron.bridge.training.config.ConfigContainer"
MAX_YAML_CHARS = 400_000
MAX_YAML_DEPTH = 60


@dataclass(frozen=True, slots=True)
class JobDocument:
    """A whole configuration, before Bridge's ``runtime_config_update``."""

    values: dict[str, Any]
    """Section -> field -> value; nested objects carry ``_target_``."""
    origins: dict[str, str] = field(default_factory=dict)
    """Dotted path -> "recipe" | "config" | "overrides"; a path that is not here has Bridge's default."""
    notes: tuple[str, ...] = ()
    """What was read, but does something else in Bridge than it seems to."""

    def origin(self, path: str) -> str:
        """Where a value comes from; a section given as a whole counts for its fields."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path.rpartition(".")[0]
        return "default"


def build_document(
    recipe: str | None = None,
    module: str | None = None,
    config: Mapping[str, Any] | str | None = None,
    overrides: Sequence[str] | None = None,
) -> JobDocument:
    """Merge and check. ``config`` is a mapping or YAML text (Bridge's ``run_config.yaml``, whole or partial).

    Raises JobError with all problems found: unknown names with the nearest known one, wrong types, impossible numbers,
    and what is missing for a model of any kind.
    """
    base = find_recipe(recipe, module) if recipe is not None else None
    editor = Editor(base.document() if base else default_document())
    if base:
        for name, section in base.differences().items():
            editor.mark(name, section, "recipe")
    if config is not None:
        _merge_config(editor, _read_config(config))
    if overrides:
        try:
            operations = read_overrides(overrides)
        except JobError as error:
            editor.problems.extend(error.problems)
            operations = []
        for operation in operations:
            editor.apply(operation)
    editor.settle()
    if not editor.problems:
        _check_complete(editor)
    if editor.problems:
        raise JobError(editor.problems)
    return JobDocument(editor.values, editor.origins, tuple(dict.fromkeys(editor.notes)))


def default_document() -> dict[str, Any]:
    """Every section with its class defaults; what may be null is null. Source: megatron-bridge 0.6.2,
    config.py:919-971."""
    document: dict[str, Any] = {}
    for name, section in catalog.sections().items():
        if section.nullable:
            document[name] = None
        elif section.default_class:
            document[name] = catalog.new_object(section.default_class)
        else:
            document[name] = {}
    return document


def _read_config(config: Mapping[str, Any] | str) -> Mapping[str, Any]:
    if isinstance(config, str):
        config = _read_yaml(config)
    if not isinstance(config, Mapping):
        raise JobError([FieldProblem("job.config", f"must be a mapping of sections, not {type(config).__name__}")])
    _check_extent(config)
    try:
        reduced = reduce_objects(dict(config))
    except (ValueError, RecursionError) as error:
        raise JobError([FieldProblem("job.config", str(error)[:200])]) from None
    target = reduced.pop("_target_", CONTAINER)
    if target != CONTAINER:
        raise JobError([FieldProblem("job.config._target_", f"is {str(target)[:120]!r}", CONTAINER)])
    return {str(name): section for name, section in reduced.items()}


def _read_yaml(text: str) -> Any:
    """YAML text by the safe loader (libyaml's where there is one); what would be slow or deep is refused first."""
    import yaml

    if len(text) > MAX_YAML_CHARS:
        raise JobError([FieldProblem("job.config", f"is longer than {MAX_YAML_CHARS} characters")])
    if _nests_deeply(text):
        raise JobError([FieldProblem("job.config", "is too deeply nested to be a configuration")])
    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 (both are safe)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise JobError([FieldProblem("job.config", f"is not valid YAML: {str(error)[:200]}")]) from None


def _nests_deeply(text: str) -> bool:
    """More brackets open than any configuration has, deep indentation, or a run of ``- - - -``."""
    depth = 0
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if depth > MAX_YAML_DEPTH:
            return True
    lines = text.splitlines()
    return any(len(line) - len(line.lstrip(" -?")) > 4 * MAX_YAML_DEPTH for line in lines)


def _check_extent(config: Mapping[str, Any]) -> None:
    """Bound the size before anything recurses into it."""
    stack: list[tuple[Any, int]] = [(config, 0)]
    seen = 0
    while stack:
        value, depth = stack.pop()
        seen += 1
        if seen > MAX_ITEMS or depth > 40:
            raise JobError([FieldProblem("job.config", "is too large or too deeply nested to be a configuration")])
        if isinstance(value, Mapping):
            stack.extend((item, depth + 1) for item in value.values())
        elif isinstance(value, (list, tuple)):
            stack.extend((item, depth + 1) for item in value)


def _merge_config(editor: Editor, config: Mapping[str, Any]) -> None:
    for name, section in config.items():
        editor.merge_section(name, section, f"job.config.{name}", "config")


def _check_complete(editor: Editor) -> None:
    """What no model can be estimated without; the rest has Bridge's defaults."""
    values, problems = editor.values, editor.problems
    model, train = values["model"], values["train"]
    if not isinstance(model, dict) or not isinstance(train, dict):
        return
    if "num_layers" in model or "hidden_size" in model:
        for name in ("num_layers", "hidden_size", "num_attention_heads"):
            pattern = model.get("hybrid_layer_pattern") or model.get("hybrid_override_pattern")
            if not model.get(name) and not (name == "num_layers" and pattern):
                problems.append(
                    FieldProblem(f"job.config.model.{name}", "is required and not given", "a positive integer")
                )
        tokenizer = values.get("tokenizer") or {}
        known = model.get("vocab_size") or tokenizer.get("vocab_size") or tokenizer.get("tokenizer_model")
        if "vocab_size" in model and not known:
            message = "is required and not given (neither here nor as tokenizer.vocab_size)"
            problems.append(
                FieldProblem("job.config.model.vocab_size", message, "the size of the tokenizer's vocabulary")
            )
    for name in ("micro_batch_size", "global_batch_size"):
        if not train.get(name):
            problems.append(FieldProblem(f"job.config.train.{name}", "is required and not given", "a positive integer"))
    dataset = values["dataset"]
    if isinstance(dataset, dict) and "seq_length" not in dataset and "seq_length" in model:
        dataset["seq_length"] = model["seq_length"]
