"""The package as others meet it: built, installed, imported, type-checked and read."""

import importlib
import inspect
import os
import pkgutil
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
import typing
import venv
from pathlib import Path

import pytest

import kimi_linear.reference
from kimi_linear.reference import chunked, model, naive

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = [
    "kimi_linear.reference",
    "kimi_linear.reference.naive",
    "kimi_linear.reference.chunked",
    "kimi_linear.reference.model",
    "kimi_linear.triton_kernels",
    "kimi_linear.conformance",
    "kimi_linear.conformance.adapters",
    "kimi_linear.conformance.mutants",
    "kimi_linear.cli",
]
SCRIPTS = "findings"  # run by hand from a checkout, beside the package that they show a fault of: not installed
FUNCTION_LINES, MODULE_LINES = 60, 300  # what fits a screen or two, and a sitting


def run(*command, cwd=None):
    """Run a command outside this process and its settings; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_"))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(code, *, executable=sys.executable, cwd=None):
    return run(str(executable), "-I", "-c", textwrap.dedent(code), cwd=cwd)


# Installed from a wheel, with no checkout near


def package_settings():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


class Install(typing.NamedTuple):
    python: Path
    purelib: Path
    scripts: Path
    elsewhere: Path  # a folder that is no checkout


@pytest.fixture(scope="module")
def install(tmp_path_factory):
    """A fresh environment that has our wheel, and of this environment the dependencies only.

    The dependencies come by a plain path line. Such a folder's own .pth files are not read, so an editable
    install of this package there stays out of sight.
    """
    here = tmp_path_factory.mktemp("install")
    skip = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, here / "source", ignore=skip)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    offline = ("--no-deps", "--no-index", "--quiet")
    run(*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", "wheels", "./source", cwd=here)
    (wheel,) = (here / "wheels").glob("*.whl")

    venv.create(here / "venv", with_pip=False, symlinks=True)
    places = sysconfig.get_paths("venv", vars={"base": str(here / "venv"), "installed_base": str(here / "venv")})
    fresh = Path(places["scripts"]) / "python"
    run(*pip, "--python", str(fresh), "install", *offline, str(wheel), cwd=here)
    parent = sysconfig.get_paths()["purelib"]
    (Path(places["purelib"]) / "dependencies.pth").write_text(f"{parent}\n")
    (here / "elsewhere").mkdir()
    return Install(fresh, Path(places["purelib"]), Path(places["scripts"]), here / "elsewhere")


@pytest.mark.slow
def test_the_wheel_alone_is_enough_to_import_every_package(install):
    code = f"""
        import importlib
        for name in {INSTALLED}:
            module = importlib.import_module(name)
            print(*module.__path__, module.__file__)
    """
    lines = python(code, executable=install.python, cwd=install.elsewhere).splitlines()
    for name, line in zip(INSTALLED, lines, strict=True):
        folder = install.purelib.joinpath(*name.split("."))
        assert line == f"{folder} {folder / '__init__.py'}"


@pytest.mark.slow
def test_the_wheel_ships_every_source_file(install):
    def sources(folder):
        files = [*folder.rglob("*.py"), *folder.rglob("*.json")]
        return {file.relative_to(folder) for file in files if file.parent.name != SCRIPTS}

    for name, folder in package_settings()["package-dir"].items():
        assert sources(install.purelib.joinpath(*name.split("."))) == sources(ROOT / folder)
    assert sources(install.purelib / "kimi_linear" / "reference")


@pytest.mark.slow
def test_the_wheel_installs_nothing_outside_its_namespace(install):
    ours = {path.name for path in install.purelib.iterdir()} - {"dependencies.pth"}
    assert {name for name in ours if not name.endswith(".dist-info")} == {"kimi_linear"}
    assert not (install.purelib / "kimi_linear" / "__init__.py").exists()
    assert {path.name for path in (install.purelib / "kimi_linear").iterdir()} == {
        name.split(".")[1] for name in INSTALLED
    }
    code = """
        import importlib.util
        for name in ("reference", "triton_kernels", "conformance", "cli", "tests"):
            found = importlib.util.find_spec(name)
            assert found is None or "kimi" not in str(found.origin), found
        try:
            import reference
        except ModuleNotFoundError as error:
            print(error.name)
    """
    assert python(code, executable=install.python, cwd=install.elsewhere).strip() == "reference"


@pytest.mark.slow
def test_the_wheel_ships_types_a_license_and_the_command(install):
    for name in INSTALLED:
        if name.count(".") == 1:
            assert (install.purelib.joinpath(*name.split(".")) / "py.typed").is_file()
    (info,) = install.purelib.glob("kimi_linear_reference-*.dist-info")
    assert (info / "licenses" / "LICENSE").read_text().startswith("MIT License")
    assert list(install.scripts.glob("kimi-linear*"))


@pytest.mark.slow
def test_the_installed_tiers_compute(install):
    code = """
        import torch
        from kimi_linear.reference.chunked import chunk_kda
        from kimi_linear.reference.naive import recurrent_kda
        torch.manual_seed(0)
        q, k, v, g, beta = torch.randn(5, 1, 5, 1, 3).sigmoid().unbind()
        calls = [op(q, k, v, -g.abs(), beta[..., 0])[0] for op in (recurrent_kda, chunk_kda)]
        torch.testing.assert_close(*calls)
        print(calls[0].shape[1])
    """
    assert python(code, executable=install.python, cwd=install.elsewhere).strip() == "5"


def test_every_folder_with_code_is_in_the_list_of_packages():
    settings = package_settings()
    assert sorted(settings["packages"]) == sorted(INSTALLED)
    found = set()
    for name, folder in settings["package-dir"].items():
        for file in (ROOT / folder).rglob("*.py"):
            if file.parent.name == SCRIPTS:
                continue
            found.add(".".join([name, *file.parent.relative_to(ROOT / folder).parts]))
    assert found <= set(INSTALLED)
    assert {"kimi_linear.reference", "kimi_linear.reference.naive", "kimi_linear.reference.chunked"} <= found


# Imports


def test_the_reference_asks_for_no_kernel_language_and_no_model_library():
    """In a fresh process, and by what is looked for: an import in a try block counts, found or not."""
    code = """
        import sys
        import einops, jaxtyping, torch

        class Recorder:
            asked = set()

            def find_spec(self, name, path=None, target=None):
                self.asked.add(name)

        sys.meta_path.insert(0, Recorder())
        import kimi_linear.reference.chunked, kimi_linear.reference.model, kimi_linear.reference.naive
        assert "kimi_linear.reference.contract" in Recorder.asked
        print(sorted(name for name in Recorder.asked if not name.startswith("kimi_linear.reference")))
        try:
            import triton
        except ImportError:
            pass
        print("triton" in Recorder.asked or "triton" in sys.modules)
    """
    asked, works = python(code).splitlines()
    for foreign in ("triton", "transformers", "kimi_linear.triton_kernels", "kimi_linear.conformance"):
        assert f"'{foreign}" not in asked
    assert works == "True"


# Annotations


def definitions_of(module):
    """The functions and classes that a module defines, methods and properties included."""
    for thing in vars(module).values():
        if getattr(thing, "__module__", None) != module.__name__ or isinstance(thing, typing.TypeVar):
            continue
        yield thing
        for member in vars(thing).values() if inspect.isclass(thing) else ():
            member = member.fget if isinstance(member, property) else member
            if inspect.isfunction(member) and member.__module__ == module.__name__:
                yield member


def modules_of(package):
    """The package and every module below it."""
    below = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [package, *(importlib.import_module(module.name) for module in below)]


@pytest.mark.parametrize("module", modules_of(kimi_linear.reference), ids=lambda module: module.__name__)
def test_every_annotation_means_something(module):
    """A shape without quotes, `Int[Tensor, N + 1]`, reads well, and a checker passes over it in silence."""
    for thing in definitions_of(module):
        typing.get_type_hints(thing, localns={"FrontEnd": kimi_linear.reference.FrontEnd})


def test_the_check_of_annotations_sees_a_name_that_is_none():
    def broken(x: "Tensor[N + 1]"):
        """As an unquoted shape would be."""

    with pytest.raises(NameError):
        typing.get_type_hints(broken)


UNDER_THE_HOOK = """
    from jaxtyping import TypeCheckError, install_import_hook
    install_import_hook("kimi_linear.reference", "beartype.beartype")

    import torch
    from kimi_linear.reference import BoundedGate, FrontEnd, SoftplusGate
    from kimi_linear.reference.chunked import chunk_kda, chunk_kda_backward, chunk_stages, invert_unit_lower
    from kimi_linear.reference.naive import kda_step, recurrent_kda, recurrent_kda_backward

    torch.manual_seed(0)
    T, H, HV, K, V = 37, 2, 4, 3, 5
    OFFSETS = [0, 1, 1, 20, 36]

    def draw(*shape, dtype):
        return torch.randn(*shape, dtype=torch.float64).to(dtype)

    def inputs(dtype, batch):
        state = torch.float64 if dtype == torch.float64 else torch.float32
        packed = batch == 1
        N = len(OFFSETS) - 1 if packed else batch
        call = {
            "q": draw(batch, T, H, K, dtype=dtype),
            "k": draw(batch, T, H, K, dtype=dtype),
            "v": draw(batch, T, HV, V, dtype=dtype),
            "g": -draw(batch, T, HV, K, dtype=dtype).abs(),
            "beta": draw(batch, T, HV, dtype=dtype).sigmoid(),
            "cu_seqlens": torch.tensor(OFFSETS) if packed else None,
        }
        return call, draw(N, HV, K, V, dtype=state)

    def front_ends(dtype):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        yield FrontEnd(SoftplusGate(draw(HV, dtype=wide), draw(HV, K, dtype=wide)), beta="double_sigmoid")
        yield FrontEnd(BoundedGate(draw(1, 1, HV, 1, dtype=wide), draw(HV * K, dtype=wide), -3.0), l2norm_eps=None)
        yield None

    def every_function(dtype, batch):
        call, state = inputs(dtype, batch)
        for given in (state, None):
            for front_end in front_ends(dtype):
                options = {"front_end": front_end, "initial_state": given}
                recurrent_kda(**call, **options, output_final_state=True)
                chunk_kda(**call, **options, output_final_state=True, chunk_size=16)
                stages = chunk_stages(**call, **options, chunk_size=16)
                for name in ("G", "A", "Aqk", "T", "w", "u", "v_new", "o_inter", "o_intra", "o"):
                    stages.by_token(name), stages.by_chunk(name)
                stages.by_chunk("S"), stages.final_state
            do, dht = torch.randn_like(call["v"]), None if given is None else torch.randn_like(state)
            recurrent_kda_backward(**call, do=do, dht=dht, initial_state=given)
            chunk_kda_backward(**call, do=do, dht=dht, initial_state=given, chunk_size=16)

    def refused(function, *arguments, **options):
        try:
            function(*arguments, **options)
        except TypeCheckError:
            return function.__name__
"""


@pytest.mark.slow
def test_every_annotated_shape_holds_in_grouped_packed_calls_and_their_adjoints():
    code = f"""{UNDER_THE_HOOK}
    for dtype in (torch.bfloat16, torch.float64):
        for batch in (1, 2):
            every_function(dtype, batch)
    print("held")

    # and the checker is on: it refuses what is wrong
    call, _ = inputs(torch.float32, 1)
    step = [torch.zeros(1, HV, K, V), *(torch.zeros(1, HV, n) for n in (K, K, V, K)), torch.zeros(1, HV)]
    invert_unit_lower(torch.zeros(3, 8, 8)), kda_step(*step, 1.0)
    print(refused(invert_unit_lower, torch.zeros(3, 8, 4)))
    print(refused(invert_unit_lower, torch.zeros(3, 8, 8, dtype=torch.int64)))
    print(refused(kda_step, *step[:-1], torch.zeros(1, HV + 1), 1.0))
    call["cu_seqlens"] = torch.tensor([[0, T]])
    print(refused(recurrent_kda, **call), refused(chunk_kda, **call))
    """
    assert python(code).split() == [
        "held",
        "invert_unit_lower",
        "invert_unit_lower",
        "kda_step",
        "recurrent_kda",
        "chunk_kda",
    ]


# Size


def modules_to_read():
    return [*modules_of(naive), *modules_of(chunked), *modules_of(model)]


def public_functions():
    for module in modules_to_read():
        for thing in definitions_of(module):
            private = any(part.startswith("_") for part in thing.__qualname__.split("."))
            if inspect.isfunction(inspect.unwrap(thing)) and not private:
                yield thing


@pytest.mark.parametrize("function", list(public_functions()), ids=lambda f: f"{f.__module__}.{f.__qualname__}")
def test_every_public_function_is_short_and_says_what_it_does(function):
    assert len(inspect.getsourcelines(function)[0]) <= FUNCTION_LINES
    assert (function.__doc__ or "").strip()


@pytest.mark.parametrize("module", modules_to_read(), ids=lambda module: module.__name__)
def test_every_module_can_be_read_in_one_go_and_says_what_it_holds(module):
    assert len(inspect.getsourcelines(module)[0]) <= MODULE_LINES
    assert (module.__doc__ or "").strip()


def test_the_size_limits_look_at_the_functions_that_people_read():
    names = {function.__name__ for function in public_functions()}
    exported = {name for package in (naive, chunked) for name in package.__all__ if name[0].islower()}
    assert exported <= names
    assert len(exported) > 10
