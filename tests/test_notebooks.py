from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from tests.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    return nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)  # type: ignore[no-untyped-call]


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(path: Path, folder: Path) -> list[Any]:
    """Run a notebook in a folder and return the outputs of its cells; raise at the first cell that fails."""
    notebook = read(path)
    # Without folders of registered kernels there is one left: the interpreter that the tests run in.
    kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    client = NotebookClient(notebook, km=kernel, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.execute(cleanup_kc=True)
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS, "the tests below have nothing to run"


@each_notebook
def test_runs_in_any_folder_and_learns(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, jupyter = tmp_path / "folder", tmp_path / "jupyter"
    folder.mkdir()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in conftest.py
    # Jupyter must not use, or write to, the settings of who runs the tests; inline pictures are its default.
    monkeypatch.setenv("IPYTHONDIR", str(jupyter))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(jupyter))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    outputs = execute(path, folder)
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    accuracies = [float(number) for number in re.findall(r"test/acc ([\d.]+)", printed)]
    assert accuracies, f"no test accuracy in what it printed:\n{printed}"
    assert min(accuracies) > 0.9
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert (folder / "runs").is_dir()


@each_notebook
def test_is_committed_without_outputs(path: Path) -> None:
    cells = code_cells(read(path))
    assert cells
    for cell in cells:
        assert cell.outputs == [], f"run nbstripout: cell {cell.id} has outputs"
        assert cell.execution_count is None, f"run nbstripout: cell {cell.id} has an execution count"
        assert cell.metadata == {}, f"run nbstripout: cell {cell.id} has metadata"
