"""Scripts of the repository that lie in no package, as modules."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

FINDINGS = Path(__file__).parents[1] / "conformance" / "findings"


def load_script(path: Path) -> ModuleType:
    """The module of a file."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
