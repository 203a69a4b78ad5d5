"""Changes to a job document, each checked against the table of fields; used for config and for overrides alike."""

from __future__ import annotations

from typing import Any

from estimator.catalog import fields as catalog
from estimator.catalog.fields import TARGET_KEYS, FieldSpec
from estimator.errors import FieldProblem
from estimator.job.operations import Operation, Unreadable
from estimator.job.values import INERT_PREFIXES, check_value, describe, reduce_objects

PRECISION = "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"
PAIRED = (("fp8_param", "fp8_param_gather"), ("fp4_param", "fp4_param_gather"))
"""Fields of MixedPrecisionConfig that follow each other on assignment (megatron-bridge 0.6.2,
mixed_precision.py:72-91)."""


class Editor:
    """A document under change. ``values`` belongs to the editor; problems are collected, never raised."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.origins: dict[str, str] = {}
        self.problems: list[FieldProblem] = []
        self.notes: list[str] = []

    # ------------------------------------------------------------------ origins

    def mark(self, path: str, value: Any, source: str) -> None:
        """Remember ``source`` for a value and, where it is a mapping, for every leaf of it."""
        for known in [p for p in self.origins if p.startswith(path + ".")]:
            del self.origins[known]
        self.origins.pop(path, None)
        self._mark(path, value, source)

    def _mark(self, path: str, value: Any, source: str) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                self._mark(f"{path}.{key}", item, source)
        else:
            self.origins[path] = source

    # ------------------------------------------------------------------ config

    def merge_section(self, name: str, given: Any, where: str, source: str) -> None:
        """Lay ``given`` over one section: a mapping merges field by field, anything else replaces."""
        section = catalog.sections().get(name)
        if section is None:
            if not name.startswith("_"):
                self._unknown(where, name, catalog.sections(), "section")
            return
        if not isinstance(given, dict):
            self._replace_section(name, given, where, source)
            return
        if not section.classes:  # env_vars
            for key, value in given.items():
                self._set_env(key, value, f"{where}.{key}", source)
            return
        current = self.values[name]
        if name == "mixed_precision" and isinstance(current, str) and "_target_" not in given:
            current = catalog.precision_config(current) if self._knows_precision(current, where) else None
        target = given.get("_target_") or (
            current.get("_target_") if isinstance(current, dict) else section.default_class
        )
        if not self._check_target(name, target, where):
            return
        assert isinstance(target, str)
        if not isinstance(current, dict) or current.get("_target_") != target:
            current = catalog.new_object(target)
            self.mark(name, {"_target_": target}, source)
        self.values[name] = current
        for key, value in given.items():
            if key not in TARGET_KEYS and not key.startswith("_"):
                self._set_field(current, key, value, f"{where}.{key}", f"{name}.{key}", source)
        self._check_required(current, where)

    def _replace_section(self, name: str, value: Any, where: str, source: str) -> None:
        section = catalog.sections()[name]
        if value is None and section.nullable:
            self.values[name] = None
        elif name == "mixed_precision" and isinstance(value, str):
            if not self._knows_precision(value, where):
                return
            self.values[name] = value
        else:
            words = "a mapping or null" if section.nullable else "a mapping"
            self.problems.append(FieldProblem(where, f"must be {words}, not {describe(value)}"))
            return
        self.mark(name, value, source)

    def _knows_precision(self, value: str, where: str) -> bool:
        if value.replace("-", "_") in catalog.precision_recipes():
            return True
        self._unknown(where, value, catalog.precision_recipes(), "mixed-precision recipe")
        return False

    def _check_target(self, section: str, target: Any, where: str) -> bool:
        if isinstance(target, str) and catalog.is_known_class(target) and catalog.section_accepts(section, target):
            return True
        if isinstance(target, str) and catalog.is_known_class(target):
            message = f"{target.rpartition('.')[2]} is not a class of the section {section}"
        else:
            message = f"no class that Bridge could use here is called {str(target)[:120]!r}"
        default = catalog.sections()[section].default_class
        close = catalog.class_by_short_name(str(target).rpartition(".")[2])
        suggestion = close if close and catalog.section_accepts(section, close) else default
        self.problems.append(FieldProblem(f"{where}._target_", message, suggestion))
        return False

    # ------------------------------------------------------------------ fields

    def _set_field(self, owner: dict[str, Any], key: str, value: Any, where: str, path: str, source: str) -> None:
        target = owner.get("_target_")
        if not isinstance(target, str) or not catalog.is_known_class(target):
            owner[key] = value  # inside an object the table does not know, or a plain mapping
            self.mark(path, value, source)
            return
        spec = catalog.class_fields(target).get(key)
        if spec is None:
            self._unknown(where, key, catalog.class_fields(target), "field", path.rpartition(".")[0])
            return
        if isinstance(value, dict) and "_target_" in value and set(value) != {"_target_", "_args_"}:
            value = self._new_nested(value, owner.get(key), where)
        elif isinstance(value, dict) and isinstance(owner.get(key), dict) and "_target_" in owner[key]:
            for inner, item in value.items():
                self._set_field(owner[key], inner, item, f"{where}.{inner}", f"{path}.{inner}", source)
            return
        elif isinstance(value, dict) and spec.kinds == ("object",) and owner.get(key) is None:
            self.problems.append(FieldProblem(where, "needs a _target_ that says which class it is"))
            return
        before = len(self.problems)
        value = check_value(spec, value, where, self.problems)
        if len(self.problems) > before:
            return
        if spec.name == "recompute_modules" and isinstance(value, list):
            self._check_texts(value, where)
        owner[key] = value
        if target == PRECISION:
            for pair in PAIRED:
                if key in pair:
                    owner.update(dict.fromkeys(pair, value))
        self.mark(path, value, source)

    def _check_texts(self, items: list[Any], where: str) -> None:
        for index, item in enumerate(items):
            if not isinstance(item, str):
                self.problems.append(FieldProblem(f"{where}[{index}]", f"must be a text, not {describe(item)}"))

    def _new_nested(self, given: dict[str, Any], current: Any, where: str) -> dict[str, Any]:
        target = given["_target_"]
        if not isinstance(target, str) or not (catalog.is_known_class(target) or target.startswith(INERT_PREFIXES)):
            self.problems.append(FieldProblem(f"{where}._target_", f"no known class is called {str(target)[:120]!r}"))
            return given
        if not catalog.is_known_class(target):
            return given
        fresh = catalog.new_object(target)
        for key, value in given.items():
            if key not in TARGET_KEYS and not key.startswith("_"):
                self._set_field(fresh, key, value, f"{where}.{key}", f"_.{key}", "config")
        for path in [p for p in self.origins if p.startswith("_.")]:
            del self.origins[path]
        self._check_required(fresh, where)
        return fresh

    def _check_required(self, owner: dict[str, Any], where: str) -> None:
        """Constructor arguments without a default; the ones that a whole job may leave open are checked in the end."""
        target = str(owner.get("_target_"))
        if target.endswith("CommOverlapConfig") and "tp_comm_overlap" not in owner:
            self.problems.append(FieldProblem(f"{where}.tp_comm_overlap", "is required and not given", "true or false"))

    def _set_env(self, key: Any, value: Any, where: str, source: str) -> None:
        """An environment variable; scalars only, as ``apply_environment_variables`` demands (config.py:1832-1850)."""
        if not isinstance(key, str) or not key or "=" in key or "\x00" in key:
            self.problems.append(FieldProblem(where, "is not the name of an environment variable"))
        elif value is None or not isinstance(value, (str, int, float, bool)):
            self.problems.append(FieldProblem(where, f"must be a text or a number, not {describe(value)}", '"1"'))
        else:
            self.values["env_vars"][key] = value
            self.origins[f"env_vars.{key}"] = source

    def _unknown(self, where: str, name: object, known: Any, what: str, owner: str = "") -> None:
        close = catalog.nearest(str(name), known, 1)
        inside = f" in {owner}" if owner else ""
        self.problems.append(
            FieldProblem(where, f"no {what}{inside} is called {str(name)[:120]!r}", close[0] if close else None)
        )

    # ------------------------------------------------------------------ overrides

    def lookup(self, path: tuple[str, ...]) -> Any:
        """Current value at a path; KeyError if there is none."""
        value: Any = self.values
        for part in path:
            if not isinstance(value, dict):
                raise KeyError(part)
            value = value[part]
        return value

    def apply(self, operation: Operation) -> None:
        """One override, as Bridge's command line or the Python line itself would do it."""
        before = len(self.problems)
        self._apply(operation)
        for index in range(before, len(self.problems)):
            problem = self.problems[index]
            subject = ".".join(
                (*operation.path, *problem.path.removeprefix(operation.where).strip(".").split("."))
            ).rstrip(".")
            self.problems[index] = FieldProblem(operation.where, f"{subject}: {problem.message}", problem.suggestion)

    def _apply(self, operation: Operation) -> None:
        where = operation.where
        try:
            value = reduce_objects(operation.evaluate(self.lookup))
        except (Unreadable, ValueError) as error:
            self.problems.append(FieldProblem(where, str(error), getattr(error, "suggestion", None)))
            return
        dotted = ".".join(operation.path)
        if operation.path[0] not in catalog.sections():
            self._unknown(where, operation.path[0], catalog.sections(), "section")
            return
        if operation.kind == "delete":
            self._delete(operation, dotted)
        elif len(operation.path) == 1:
            self._assign_section(operation, value)
        else:
            self._assign_field(operation, value, dotted)

    def _assign_section(self, operation: Operation, value: Any) -> None:
        name, where = operation.path[0], operation.where
        if isinstance(value, dict) and operation.syntax == "python":
            if name == "env_vars":
                self.values[name] = {}
            elif "_target_" not in value:
                self.problems.append(FieldProblem(where, f"must be a configuration object, not {describe(value)}"))
                return
            else:
                self.values[name] = None  # a new object: what it does not say has its class default
        self.merge_section(name, value, where, "overrides")

    def _assign_field(self, operation: Operation, value: Any, dotted: str) -> None:
        owner = self._owner(operation, dotted)
        if owner is None:
            return
        key, where = operation.path[-1], operation.where
        if operation.kind == "set" and operation.syntax == "hydra" and key not in owner and "_target_" not in owner:
            self.problems.append(FieldProblem(where, f"{dotted} is not there yet", f"+{operation.line.lstrip('+')}"))
            return
        if operation.kind == "add" and owner.get(key) is not None and not isinstance(owner[key], (dict, list)):
            message = f"{dotted} is there already, + only adds"
            self.problems.append(FieldProblem(where, message, operation.line.lstrip("+")))
            return
        if owner is self.values["env_vars"]:
            self._set_env(key, value, where, "overrides")
            return
        target = owner.get("_target_")
        if isinstance(target, str) and catalog.is_known_class(target):
            spec = catalog.class_fields(target).get(key)
            if operation.syntax == "hydra" and spec is not None:
                self._note_text_dtype(spec, owner.get(key), value, dotted)
            if operation.syntax == "python" and isinstance(value, dict) and "_target_" not in value:
                owner[key] = None
        self._set_field(owner, key, value, where, dotted, "overrides")

    def _note_text_dtype(self, spec: FieldSpec, current: Any, value: Any, dotted: str) -> None:
        """Bridge turns a text into a dtype only where a dtype stood before (omegaconf_utils.py:491-503)."""
        if "dtype" in spec.kinds and current is None and isinstance(value, str):
            self.notes.append(f"{dotted}={value} on the command line stays a text in Bridge; set it in Python or YAML")

    def _owner(self, operation: Operation, dotted: str) -> dict[str, Any] | None:
        """The mapping that holds the last part of the path; problems say which part is missing."""
        owner: Any = self.values
        for depth, part in enumerate(operation.path[:-1]):
            here = ".".join(operation.path[: depth + 1])
            if part not in owner:
                target = owner.get("_target_")
                known = (
                    catalog.class_fields(target)
                    if isinstance(target, str) and catalog.is_known_class(target)
                    else owner
                )
                self._unknown(operation.where, part, known, "field", ".".join(operation.path[:depth]))
                return None
            owner = owner[part]
            if owner is None:
                hint = f"set {here} as a whole first"
                self.problems.append(FieldProblem(operation.where, f"{here} is null, so {dotted} cannot be set", hint))
                return None
            if isinstance(owner, str) and here == "mixed_precision" and operation.syntax == "hydra":
                hint = f"mixed_precision={{_target_:{PRECISION},...}}, or Python: cfg.mixed_precision = {owner}()"
                self.problems.append(
                    FieldProblem(operation.where, f"{here} is the name {owner!r}, not an object", hint)
                )
                return None
            if not isinstance(owner, dict):
                advice = f"cfg.{here} = {owner}() first" if here == "mixed_precision" else None
                message = f"{here} is {describe(owner)}, not an object"
                self.problems.append(FieldProblem(operation.where, message, advice))
                return None
        assert isinstance(owner, dict)
        return owner

    def _delete(self, operation: Operation, dotted: str) -> None:
        owner = self._owner(operation, dotted) if len(operation.path) > 1 else self.values
        if owner is None:
            return
        key = operation.path[-1]
        if isinstance(owner.get("_target_"), str) or owner is self.values:
            if key not in owner or (operation.syntax == "hydra" and owner[key] is None):
                known = [k for k in owner if k != "_target_"]
                self._unknown(operation.where, key, known, "field", ".".join(operation.path[:-1]))
            elif operation.syntax == "hydra":
                self.notes.append(
                    f"~{dotted} has no effect in Bridge: a field of a configuration object cannot be removed"
                )
            else:
                self.problems.append(
                    FieldProblem(operation.where, f"a field cannot be deleted: {dotted}", f"cfg.{dotted} = None")
                )
            return
        if key in owner:
            if operation.syntax == "hydra" and operation.value is not None and owner[key] != operation.value:
                self.problems.append(FieldProblem(operation.where, f"{dotted} is not {describe(operation.value)}"))
                return
            del owner[key]
            self.origins[dotted] = "overrides"
        elif operation.value != "quiet":
            self._unknown(operation.where, key, owner, "key", ".".join(operation.path[:-1]))

    def settle(self) -> None:
        """What the objects themselves do once everything is set."""
        precision = self.values.get("mixed_precision")
        if isinstance(precision, dict):
            for param, gather in PAIRED:
                precision[param] = precision.get(gather)
