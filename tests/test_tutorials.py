"""The notebooks run in a fresh kernel, show what they claim, and fail when a check of theirs does."""

import sys
import time

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

import notebooks
import tools

SECONDS = 300  # for a loaded machine; on two free cores each is to stay under 60
LINES = 20  # of a code cell
EXERCISES = 3

SOURCES = notebooks.sources()


def cells(notebook, kind, tag=None):
    found = [cell for cell in notebook.cells if cell.cell_type == kind]
    return [cell for cell in found if tag is None or tag in cell.metadata.get("tags", [])]


def printed(cell):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def pictures(notebook):
    outputs = [output for cell in cells(notebook, "code") for output in cell.outputs]
    return [output for output in outputs if "image/png" in output.get("data", {})]


def run_with(source, code):
    """Execute a notebook after a first cell of ours."""
    notebook = notebooks.read(source)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(code))
    return notebooks.execute(notebook, threads=1)


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_the_notebook_runs(source):
    start = time.monotonic()
    notebook = notebooks.execute(notebooks.read(source), threads=1)
    assert time.monotonic() - start < SECONDS
    assert pictures(notebook), "a notebook shows at least one picture"
    code = cells(notebook, "code")
    complaints = [output.text for cell in code for output in cell.outputs if output.get("name") == "stderr"]
    assert not complaints
    for template, answer in zip(cells(notebook, "code", "exercise"), cells(notebook, "code", "answer"), strict=True):
        assert "not yet; this one is yours to write" in printed(template)
        assert [output.output_type for output in template.outputs] == ["stream"]
        assert ": right" in printed(answer)
        assert "not yet; this one is yours" not in printed(answer)
        assert "not yet; " in printed(answer), "an answer cell also shows a slip that the checker finds"


BROKEN_STEP = """
import kimi_linear.reference.naive.recurrent as module
right = module.kda_step
module.kda_step = lambda S, q, k, v, g, beta, scale: right(S, q, k, v, g, 0.99 * beta, scale)
"""
BROKEN_INVERSE = """
import torch
import kimi_linear.reference.chunked.forward as module
module.invert_unit_lower = lambda A: torch.eye(A.shape[-1]).to(A) - A
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [("04", BROKEN_STEP), ("05", BROKEN_INVERSE)])
def test_the_notebook_fails_where_the_package_is_wrong(number, code):
    (source,) = [source for source in SOURCES if source.stem.startswith(number)]
    with pytest.raises(CellExecutionError, match="AssertionError"):
        run_with(source, code)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_the_notebook_has_short_cells_and_exercises_with_checkers(source):
    notebook = notebooks.read(source)
    for cell in cells(notebook, "code"):
        assert len(cell.source.splitlines()) <= LINES, cell.source
    for number in range(1, EXERCISES + 1):
        name = f"check_{number}"
        (template,) = [cell for cell in cells(notebook, "code", "exercise") if f"{name}(" in cell.source]
        (answer,) = [cell for cell in cells(notebook, "code", "answer") if f"assert {name}(" in cell.source]
        assert "raise NotImplementedError" in template.source
        assert f"assert not {name}(" in answer.source
        assert answer.metadata.get("jupyter", {}).get("source_hidden"), "an answer starts folded"
    assert len(cells(notebook, "code", "exercise")) == len(cells(notebook, "code", "answer")) == EXERCISES


def test_the_list_of_tutorials_names_them_all():
    text = (notebooks.HERE / "README.md").read_text()
    for source in SOURCES:
        assert f"({source.name})" in text, f"tutorials/README.md does not link {source.name}"
    assert [int(source.name[:2]) for source in SOURCES] == list(range(1, len(SOURCES) + 1))


def test_the_kernel_is_this_interpreter_with_one_thread():
    notebook = nbformat.v4.new_notebook()
    code = "import os, sys; print(sys.executable, os.environ['OMP_NUM_THREADS'], os.path.basename(os.getcwd()))"
    notebook.cells = [nbformat.v4.new_code_cell(code)]
    done = notebooks.execute(notebook, threads=1)
    assert printed(done.cells[0]).split() == [sys.executable, "1", "tutorials"]


@pytest.fixture
def drafts(tmp_path, monkeypatch):
    drafts = [tmp_path / "01_first.py", tmp_path / "02_second.py"]
    for draft in drafts:
        draft.write_text("# %% [markdown]\n# # A title\n\n# %%\n40 + 2\n")
    monkeypatch.setattr(notebooks, "sources", lambda: drafts)
    return drafts


def test_make_notebooks_writes_outputs(drafts, tmp_path):
    folder = tmp_path / "build" / "notebooks"
    notebooks.run_all(folder, only="02")
    assert sorted(file.name for file in folder.iterdir()) == ["02_second.ipynb", "tools.py"]
    (code,) = cells(nbformat.read(folder / "02_second.ipynb", as_version=4), "code")
    assert code.outputs[0].data["text/plain"] == "42"


def test_a_learners_copy_is_kept(drafts, tmp_path):
    folder = tmp_path / "workbook"
    notebooks.copy_for_a_learner(folder)
    assert sorted(file.name for file in folder.iterdir()) == ["01_first.ipynb", "02_second.ipynb", "tools.py"]
    (folder / "01_first.ipynb").write_text("mine")
    (folder / "02_second.ipynb").unlink()
    notebooks.copy_for_a_learner(folder)
    assert (folder / "01_first.ipynb").read_text() == "mine"
    fresh = nbformat.read(folder / "02_second.ipynb", as_version=4)
    assert [cell.cell_type for cell in fresh.cells] == ["markdown", "code"]


def test_a_checker_reports_and_does_not_stop_the_notebook(capsys):
    @tools.checker
    def check_double(double):
        tools.expect(double(2) == 4, f"double(2) must be 4, got {double(2)}")

    def unwritten(x):
        raise NotImplementedError

    assert check_double(lambda x: 2 * x)
    assert not check_double(lambda x: x)

    def wrapped(x):  # as Triton's interpreter hands an error on
        raise RuntimeError from NotImplementedError()

    assert not check_double(unwritten)
    assert not check_double(lambda x: x / 0)
    assert not check_double(wrapped)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "check_double: right"
    assert lines[1] == "check_double: not yet; double(2) must be 4, got 2"
    assert lines[2] == "check_double: not yet; this one is yours to write"
    assert lines[3].startswith("check_double: not yet; it raised ZeroDivisionError")
    assert lines[4] == lines[2]


def test_a_picture_without_a_label_is_an_error():
    figure, axes = tools.plt.subplots()
    axes.set_xlabel("tokens")
    with pytest.raises(ValueError, match="y axis of 'a picture' needs a label"):
        tools.show(figure, "nothing")
    tools.plt.close(figure)


def test_recorded_results_are_found_from_the_tutorials_and_from_copies_of_them(monkeypatch):
    for folder in (notebooks.HERE, notebooks.HERE / "workbook" / "deeper"):
        monkeypatch.setattr(tools.Path, "cwd", lambda folder=folder: folder)
        assert tools.recorded("gpu.json")["copy_TBps"] > 0
        assert "copy" in tools.recorded("decode.txt")
        with pytest.raises(FileNotFoundError, match=r"benchmarks/results/nothing\.json"):
            tools.recorded("nothing.json")
