"""The config that a training run keeps beside its weights: read as text, never run."""

import ast
from collections.abc import Mapping
from typing import Any

PACKAGE = "tlalign_mm"


def backbone_config(text: object) -> dict[str, Any] | None:
    """The fields of ``model.backbone``, as far as they are plain values.

    Args:
        text: A config as mmengine prints it, or anything else.

    Returns:
        The fields, or None where there are none.
    """
    keyword = _backbone(_parse(text))
    try:
        found = None if keyword is None else _value(keyword.value)
    except (ValueError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def with_backbone(text: object, backbone: Mapping[str, Any]) -> str | None:
    """The config with another backbone; it imports this package only for a backbone of it.

    Args:
        text: A config as mmengine prints it.
        backbone: Fields of the new backbone.

    Returns:
        The config, or None where the text holds no ``model.backbone``.
    """
    tree = _parse(text)
    keyword = _backbone(tree)
    if tree is None or keyword is None:
        return None
    keyword.value = ast.parse(to_source(backbone), mode="eval").body
    if not str(backbone["type"]).startswith(f"{PACKAGE}."):
        tree.body = [s for s in map(_without_package, tree.body) if s is not None]
    return ast.unparse(tree) + "\n"


def to_source(value: object) -> str:
    """A value as configs write it, with ``dict(…)``; keys are identifiers."""
    if isinstance(value, Mapping):
        return f"dict({', '.join(f'{key}={to_source(v)}' for key, v in value.items())})"
    if isinstance(value, list | tuple):
        inside = ", ".join(map(to_source, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    return repr(value)


def _parse(text: object) -> ast.Module | None:
    try:
        return ast.parse(text) if isinstance(text, str) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _assigned(statement: ast.stmt) -> str | None:
    """Name that a statement gives a value."""
    is_one = isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    return statement.targets[0].id if is_one else None


def _backbone(tree: ast.Module | None) -> ast.keyword | None:
    """The backbone's place in ``model = dict(…)``."""
    for statement in tree.body if tree else ():
        if _assigned(statement) == "model" and _is_dict(statement.value):
            return next((k for k in statement.value.keywords if k.arg == "backbone"), None)
    return None


def _is_dict(node: ast.expr) -> bool:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return is_call and node.func.id == "dict" and not node.args


def _value(node: ast.expr) -> Any:
    """A plain value; ``ValueError`` for anything that would have to be run."""
    if _is_dict(node):
        return {keyword.arg: _value(keyword.value) for keyword in node.keywords}
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = map(ast.literal_eval, node.keys)
        return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, ast.List):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_value(element) for element in node.elts)
    return ast.literal_eval(node)


def _without_package(statement: ast.stmt) -> ast.stmt | None:
    """``custom_imports`` without this package; None where it imports nothing else."""
    if _assigned(statement) != "custom_imports":
        return statement
    for keyword in statement.value.keywords if _is_dict(statement.value) else ():
        if keyword.arg == "imports" and isinstance(keyword.value, ast.List | ast.Tuple):
            keyword.value.elts = [e for e in keyword.value.elts if PACKAGE not in ast.unparse(e)]
            return statement if keyword.value.elts else None
    return statement
