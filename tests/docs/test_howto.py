"""The recipes: their programs and commands run as they are printed, and print what the pages show."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.docs.walkthrough import paste, walk


@pytest.mark.sampled(one_in=6, group="documents")
@pytest.mark.parametrize("page", ["asyncio.md", "choose.md", "tail.md"])
def test_the_programs_and_commands_of_a_recipe(page: str, tmp_path: Path) -> None:
    walk(f"howto/{page}", tmp_path)


@pytest.mark.sampled(one_in=6, group="documents")
@pytest.mark.parametrize(("page", "needs"), [("fastapi.md", "fastapi"), ("forking.md", "gunicorn")])
def test_the_programs_of_a_recipe_that_serve(page: str, needs: str, tmp_path: Path) -> None:
    pytest.importorskip(needs)
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    walk(f"howto/{page}", tmp_path)


@pytest.mark.sampled(one_in=6, group="documents")
@pytest.mark.parametrize("page", ["bookkeeper", "kafka", "redis", "sqlite"])
def test_the_right_side_of_a_comparison(page: str, tmp_path: Path) -> None:
    paste(f"howto/coming_from_{page}.md", tmp_path)


@pytest.mark.sampled(one_in=6, group="documents")
def test_the_cells_of_a_notebook(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    paste("howto/jupyter.md", tmp_path)
