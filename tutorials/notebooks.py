"""From the tutorials' sources to notebooks: `make notebooks` runs them all, `make lab` opens copies of them.

A source is a Python file in jupytext's percent format; its notebook is a product and never in the repository.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Annotated

import jupytext
import nbformat
import typer
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets import default

HERE = Path(__file__).resolve().parent
CELL_SECONDS = 300  # a cell that takes longer hangs
app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


def sources() -> list[Path]:
    """The tutorials in reading order."""
    return sorted(HERE.glob("[0-9][0-9]_*.py"))


def read(source: Path) -> NotebookNode:
    """A notebook without outputs, for the kernel that every environment with ipykernel has."""
    notebook = jupytext.read(source)
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return notebook


class OwnKernel(AsyncKernelManager):
    """A kernel of this interpreter: one that a user has installed may have the same name and another Python."""

    @default("kernel_spec_manager")
    def _only_the_native_one(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])


def execute(notebook: NotebookNode, *, threads: int | None = None) -> NotebookNode:
    """Run all cells in a fresh kernel; raise nbclient's CellExecutionError where one fails."""
    environment = dict(os.environ)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        kernel_manager_class=OwnKernel,
        timeout=CELL_SECONDS,
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # its warning about local sockets helps no reader
        resources={"metadata": {"path": str(HERE)}},
    )
    return client.execute(env=environment)


@app.command("run")
def run_all(
    folder: Annotated[Path, typer.Argument(help="where the notebooks go")],
    only: Annotated[str, typer.Option(help="only sources whose name starts so, such as 03")] = "",
) -> None:
    """Run the tutorials and write notebooks with their outputs."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "tools.py", folder)
    for source in sources():
        if not source.name.startswith(only):
            continue
        start = time.monotonic()
        notebook = execute(read(source))
        nbformat.write(notebook, folder / f"{source.stem}.ipynb")
        print(f"{source.stem}: {time.monotonic() - start:.0f} s")


@app.command("copy")
def copy_for_a_learner(folder: Annotated[Path, typer.Argument(help="where the notebooks go")]) -> None:
    """Write notebooks without outputs to work in; one that is there already is somebody's work and stays."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "tools.py", folder)
    for source in sources():
        target = folder / f"{source.stem}.ipynb"
        if not target.exists():
            nbformat.write(read(source), target)
    print(f"Your copies are in {folder}; delete one to get it back as it was.")


if __name__ == "__main__":
    app()
