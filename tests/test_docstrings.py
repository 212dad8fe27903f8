"""Every public object says what it is, operators say all that a caller needs, and examples run."""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import kimi_linear.conformance
import kimi_linear.reference
import kimi_linear.reference.chunked as chunked
import kimi_linear.reference.naive as naive
import kimi_linear.triton_kernels as triton_kernels

ROOT = Path(__file__).parent.parent
FOREIGN = ("fla_recurrent", "onnx_reference", "transformers_torch")  # adapters whose package need not be there
OPERATORS = [
    naive.recurrent_kda,
    naive.recurrent_kda_backward,
    chunked.chunk_kda,
    chunked.chunk_kda_backward,
    triton_kernels.chunk_kda,
    triton_kernels.fused_recurrent_kda,
    triton_kernels.decode_step,
]
PARTS = {
    "shapes": r"[Ss]hapes",
    "units": r"natural log",
    "errors": r"[Ee]rrors",
    "source": r"arXiv:2510\.26692|arXiv",
}


def modules():
    """Every module of the three packages."""
    for package in (kimi_linear.reference, kimi_linear.conformance, triton_kernels):
        yield package
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith(FOREIGN):
                yield importlib.import_module(found.name)


MODULES = list(modules())


def public_objects(module):
    """Classes and functions that a module defines, and the methods of its classes, kernels aside."""
    for name, found in vars(module).items():
        if name.startswith("_") or getattr(found, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(found) or inspect.isfunction(found):
            yield name, found


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_class_and_function_has_a_docstring_of_its_own(module):
    assert (module.__doc__ or "").strip()
    for name, found in public_objects(module):
        if ".adapters." in module.__name__ or ".mutants." in module.__name__:
            continue  # three functions that `adapter` documents; bugs that `@mutant` describes
        text = found.__doc__ or ""
        generated = text.startswith(f"{name}(")  # what dataclass and NamedTuple write where there is nothing
        assert text.strip(), f"{module.__name__}.{name} says nothing"
        assert not generated, f"{module.__name__}.{name} has only a generated docstring"


@pytest.mark.parametrize("module", [m for m in MODULES if hasattr(m, "__all__")], ids=lambda module: module.__name__)
def test_every_exported_name_is_there_and_says_what_it_is(module):
    for name in module.__all__:
        found = getattr(module, name)
        assert inspect.getdoc(found) or not callable(found), f"{module.__name__}.{name}"


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda f: f"{f.__module__}.{f.__name__}")
@pytest.mark.parametrize("part", PARTS)
def test_an_operator_says_shapes_units_errors_and_source(operator, part):
    assert re.search(PARTS[part], operator.__doc__), f"{operator.__name__} lacks its {part}"


def test_examples_in_docstrings_run():
    results = [doctest.testmod(module) for module in MODULES]
    assert sum(result.failed for result in results) == 0
    assert sum(result.attempted for result in results) >= 8


def code_blocks():
    """Python in the fences of README and the documents, by place."""
    for document in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]):
        for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", document.read_text(), flags=re.M | re.S)):
            yield pytest.param(code, id=f"{document.name}-{number}")


@pytest.mark.parametrize("code", list(code_blocks()))
def test_examples_in_documents_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "a document's example", "exec"), {"__name__": "example"})
