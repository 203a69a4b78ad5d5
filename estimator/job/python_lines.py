"""Python override lines (``cfg.ddp.use_megatron_fsdp = True``), read with ``ast`` and never executed.

Assignments to attributes of ``cfg`` and to keys of its mappings are read; values are literals, bounded arithmetic,
other fields of ``cfg``, torch dtypes, functions and enum members by name, and calls of a fixed set of constructors:
Bridge's configuration dataclasses and its mixed-precision recipes (megatron-bridge 0.6.2, training/mixed_precision.py).
"""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Callable
from typing import Any

from estimator.catalog import fields as catalog
from estimator.job.operations import Lookup, Operation, Unreadable
from estimator.job.values import DTYPES, MAX_INTEGER

ROOTS = frozenset({"cfg", "config"})
IMPORTABLE = ("torch", "megatron", "typing", "__future__", "math", "transformer_engine")
_MAX_BRACKETS = 60
_MAX_NODES = 20_000
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.LShift: lambda a, b: a << b,
    ast.Pow: lambda a, b: a**b,
}
_SYMBOL_ROOTS = frozenset({"torch", "F", "nn", "megatron", "fusions"})


def read_python(text: str, where: str) -> list[Operation]:
    """All assignments in a piece of Python, in order. Raises Unreadable at the first thing that is not one."""
    _check_nesting(text)
    try:
        tree = ast.parse(textwrap.dedent(text))
        if sum(1 for _ in ast.walk(tree)) > _MAX_NODES:
            raise Unreadable("is too long to be an override")
        return [operation for statement in tree.body for operation in _statement(statement, where, text)]
    except SyntaxError as error:
        raise Unreadable(f"is not valid Python: {error.msg} (line {error.lineno})") from None
    except (ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable("is not valid Python: too large or too deeply nested") from None


def _check_nesting(text: str) -> None:
    """Refuse what the parser would need a deep stack for: brackets, runs of unary signs, chains of attributes."""
    if "\x00" in text:
        raise Unreadable("contains a null byte")
    depth = run = 0
    for char in text:
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        run = run + 1 if char in "+-~ \t" else 0
        if depth > _MAX_BRACKETS or run > 400:
            raise Unreadable("is nested too deeply to be an override")
    if any(line.count(".") > 400 or line.count("not ") > 200 or line.count("+") > 400 for line in text.splitlines()):
        raise Unreadable("is nested too deeply to be an override")


def _statement(node: ast.stmt, where: str, text: str) -> list[Operation]:
    line = text.splitlines()[node.lineno - 1].strip()[:200] if node.lineno <= len(text.splitlines()) else ""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        for name in names:
            if name.partition(".")[0] not in IMPORTABLE:
                raise Unreadable(
                    f"imports {name[:60]!r}; only torch and megatron names are read, and nothing is executed"
                )
        return []
    if isinstance(node, ast.Assign):
        value = functools.partial(_evaluate, node.value)
        return [Operation("set", _path(target), value, where, "python", line) for target in node.targets]
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        value = functools.partial(_evaluate, node.value)
        return [Operation("set", _path(node.target), value, where, "python", line)]
    if isinstance(node, ast.AugAssign):
        path = _path(node.target)
        value = functools.partial(_augmented, path, node)
        return [Operation("set", path, value, where, "python", line)]
    if isinstance(node, ast.Delete):
        return [Operation("delete", _path(target), None, where, "python", line) for target in node.targets]
    if isinstance(node, ast.Expr):
        return _expression(node.value, where, line)
    if isinstance(node, ast.Pass):
        return []
    raise Unreadable(
        f"only assignments to cfg are read, not {line[:60]!r} ({type(node).__name__})", "cfg.SECTION.FIELD = VALUE"
    )


def _expression(node: ast.expr, where: str, line: str) -> list[Operation]:
    """A bare string (docstring), or ``cfg.env_vars.update({...})``, ``.pop("X", None)``, ``.setdefault("X", "1")``."""
    if isinstance(node, ast.Constant):
        return []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method, owner = node.func.attr, node.func.value
        if method == "pop" and node.args and isinstance(node.args[0], ast.Constant):
            return [Operation("delete", (*_path(owner), str(node.args[0].value)), "quiet", where, "python", line)]
        if method == "update" and len(node.args) == 1 and isinstance(node.args[0], ast.Dict) and not node.keywords:
            pairs = zip(node.args[0].keys, node.args[0].values, strict=True)
            return [_item(owner, key, value, where, line) for key, value in pairs]
        if method == "update" and not node.args and node.keywords and all(k.arg for k in node.keywords):
            return [_item(owner, ast.Constant(k.arg), k.value, where, line) for k in node.keywords]
    raise Unreadable(f"only assignments to cfg are read, not {line[:60]!r}", "cfg.SECTION.FIELD = VALUE")


def _item(owner: ast.expr, key: ast.expr | None, value: ast.expr, where: str, line: str) -> Operation:
    if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
        raise Unreadable("a key of update({...}) has to be a text")
    return Operation("set", (*_path(owner), key.value), functools.partial(_evaluate, value), where, "python", line)


def _path(node: ast.expr) -> tuple[str, ...]:
    parts: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            if not isinstance(node.slice.value, str):
                raise Unreadable("items of a list cannot be set one by one; assign the whole list")
            parts.append(node.slice.value)
            node = node.value
        elif isinstance(node, ast.Name):
            if node.id not in ROOTS:
                raise Unreadable(
                    f"assigns to {node.id[:60]!r}; only fields of cfg are read", "cfg.SECTION.FIELD = VALUE"
                )
            if not parts:
                raise Unreadable("replaces cfg as a whole; assign its fields", "cfg.SECTION.FIELD = VALUE")
            return tuple(reversed(parts))
        else:
            raise Unreadable("assigns to something that is not a field of cfg", "cfg.SECTION.FIELD = VALUE")


def _augmented(path: tuple[str, ...], node: ast.AugAssign, lookup: Lookup) -> Any:
    return _calculate(node.op, lookup(path), _evaluate(node.value, lookup))


def _evaluate(node: ast.expr, lookup: Lookup) -> Any:
    if isinstance(node, ast.Constant):
        return _constant(node.value)
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return [_evaluate(item, lookup) for item in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_evaluate(k, lookup)): _evaluate(v, lookup) for k, v in pairs if k is not None}
    if isinstance(node, ast.UnaryOp):
        return _sign(node, _evaluate(node.operand, lookup))
    if isinstance(node, ast.BinOp):
        return _calculate(node.op, _evaluate(node.left, lookup), _evaluate(node.right, lookup))
    if isinstance(node, ast.Name):
        return _name(node.id)
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        return _attribute(node, lookup)
    if isinstance(node, ast.Call):
        return _call(node, lookup)
    raise Unreadable(f"has a value that is not read: {type(node).__name__}", "a number, text, list, dtype or None")


def _constant(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str, float)):
        return value
    if isinstance(value, int):
        return _bounded(value)
    raise Unreadable(f"has a value that is not read: {type(value).__name__}")


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise Unreadable("has a number that is too large for any field")
    return value


def _sign(node: ast.UnaryOp, value: Any) -> Any:
    if isinstance(node.op, ast.Not) and isinstance(value, bool):
        return not value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or isinstance(node.op, (ast.Not, ast.Invert)):
        raise Unreadable("applies a sign to something that is not a number")
    return -value if isinstance(node.op, ast.USub) else value


def _calculate(operator: ast.operator, left: Any, right: Any) -> Any:
    """Arithmetic on two numbers, kept small before it is done."""
    function = _ARITHMETIC.get(type(operator))
    if function is None or any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in (left, right)):
        raise Unreadable("has arithmetic other than + - * / // % ** << on two numbers")
    if isinstance(operator, (ast.Pow, ast.LShift)) and (abs(right) > 64 or abs(left) > 1e12):
        raise Unreadable("has a power that is too large for any field")
    try:
        return _bounded(function(left, right))
    except (ArithmeticError, ValueError, TypeError):
        raise Unreadable("has arithmetic without a usable result") from None


def _name(name: str) -> Any:
    if name in DTYPES and not name.isdigit():
        return DTYPES[name]
    if name in ("silu", "gelu", "relu", "quick_gelu", "fast_gelu", "squared_relu", "sigmoid"):
        return name
    raise Unreadable(f"uses the name {name[:60]!r}, which is not read", "write the value itself")


def _attribute(node: ast.expr, lookup: Lookup) -> Any:
    root = node
    while isinstance(root, (ast.Attribute, ast.Subscript)):
        root = root.value
    if not isinstance(root, ast.Name):
        raise Unreadable("has a value that is not read")
    if root.id in ROOTS:
        path = _path(node)
        try:
            return lookup(path)
        except KeyError:
            raise Unreadable(f"reads {'.'.join(path)[:80]!r}, which cfg does not have") from None
    if isinstance(node, ast.Attribute) and (root.id in _SYMBOL_ROOTS or root.id[:1].isupper()):
        if root.id == "torch" and isinstance(node.value, ast.Name):
            if node.attr not in DTYPES:
                if node.attr in ("tanh", "sigmoid", "relu"):
                    return node.attr
                raise Unreadable(f"uses torch.{node.attr[:60]}, which is no dtype", "torch.float32 or torch.bfloat16")
            return DTYPES[node.attr]
        return node.attr  # a function or an enum member
    raise Unreadable(f"uses {ast.unparse(node)[:60]!r}, which is not read", "write the value itself")


def _call(node: ast.Call, lookup: Lookup) -> Any:
    function = node.func
    name = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    if any(keyword.arg is None for keyword in node.keywords):
        raise Unreadable("passes **keywords, which are not read")
    keywords = {keyword.arg: _evaluate(keyword.value, lookup) for keyword in node.keywords if keyword.arg}
    arguments = [_evaluate(argument, lookup) for argument in node.args]
    if name in ("int", "float", "str", "bool") and len(arguments) == 1 and not keywords:
        return arguments[0] if name == "str" and isinstance(arguments[0], str) else _convert(name, arguments[0])
    if name == "get_mixed_precision_config" and len(arguments) == 1 and isinstance(arguments[0], str):
        name, arguments = arguments[0].replace("-", "_"), []
    if name in catalog.precision_recipes() and not arguments:
        return {**catalog.precision_config(name), **keywords}
    if name in ("min", "max") and len(arguments) > 1 and all(type(a) in (int, float) for a in arguments):
        return min(arguments) if name == "min" else max(arguments)
    if name in ("list", "tuple", "dict") and not arguments:
        return keywords if name == "dict" else []
    target = catalog.class_by_short_name(name) if name.isidentifier() else None
    if target is not None and not arguments:
        return {"_target_": target, **keywords}
    if target is not None:
        raise Unreadable(f"calls {name} with positional arguments; name them")
    close = catalog.nearest(name, [*catalog.precision_recipes(), "CommOverlapConfig", "MixedPrecisionConfig"], 1)
    raise Unreadable(f"calls {name[:60]!r}, which is not read (nothing is executed)", close[0] if close else None)


def _convert(name: str, value: Any) -> Any:
    try:
        return _bounded({"int": int, "float": float, "str": str, "bool": bool}[name](value))
    except (TypeError, ValueError, OverflowError):
        raise Unreadable(f"cannot be converted with {name}()") from None
