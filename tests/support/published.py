"""Signatures of functions in published wheels, read from their source: a kernel package need not be importable for that.

`make test` downloads the wheels, without what they depend on, into the virtual environment.
"""

from __future__ import annotations

import ast
import inspect
import sys
import zipfile
from pathlib import Path

import pytest

WHEELS = Path(sys.prefix) / "kernel-wheels"


def published_signature(wheel: str, source: str, function: str) -> inspect.Signature:
    """Read the signature of `function`, or of the method `Class.method`; of overloads, the one that runs.

    Args:
        wheel: how the wheel's file name begins.
        source: path of the file inside the wheel.
        function: its name there.

    Skips the test where the wheel was not downloaded.
    """
    found = sorted(WHEELS.glob(f"{wheel}-*.whl"))
    if not found:
        pytest.skip(f"no wheel {wheel} in {WHEELS}")
    with zipfile.ZipFile(found[-1]) as archive:
        tree = ast.parse(archive.read(source))
    *owner, name = function.split(".")
    body = tree.body
    for part in owner:
        (body,) = [node.body for node in body if isinstance(node, ast.ClassDef) and node.name == part]
    *_, definition = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    return _signature(definition.args)


def _signature(arguments: ast.arguments) -> inspect.Signature:
    kinds = inspect.Parameter
    positional = [
        *((argument, kinds.POSITIONAL_ONLY) for argument in arguments.posonlyargs),
        *((argument, kinds.POSITIONAL_OR_KEYWORD) for argument in arguments.args),
    ]
    first_default = len(positional) - len(arguments.defaults)
    parameters = [
        kinds(argument.arg, kind, default=kinds.empty if index < first_default else ...)
        for index, (argument, kind) in enumerate(positional)
    ]
    if arguments.vararg is not None:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    parameters += [
        kinds(argument.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else ...)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)
