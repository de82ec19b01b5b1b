"""The files of the page: small, without code of others but uPlot, and unable to make markup of names."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files

from pybk.admin.http.page_files import read_page

PAGE = files("pybk.admin").joinpath("page")

UPLOT = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""The files of uPlot 1.6.32, as npm has them."""


def test_uplot_is_what_its_authors_published() -> None:
    for name, wanted in UPLOT.items():
        assert hashlib.sha256(PAGE.joinpath(name).read_bytes()).hexdigest() == wanted, name


def test_the_page_is_small_and_makes_no_markup_of_text() -> None:
    code = PAGE.joinpath("app.js").read_text(encoding="utf-8")
    assert len(code.encode()) <= 40_000
    dangerous = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|createContextualFragment"
    assert not re.findall(dangerous, code)
    markup = PAGE.joinpath("index.html").read_text(encoding="utf-8")
    assert not re.findall(r"<style|style=|\son\w+=|<script>|javascript:", markup), "the policy admits nothing inline"
    for text in (code, markup, PAGE.joinpath("app.css").read_text(encoding="utf-8")):
        assert "//" not in re.sub(r"(?m)^//.*$|/\*.*?\*/|, *//.*$|^ *//.*$", "", text).replace("lmdb://", ""), (
            "everything is relative to the page"
        )


def test_every_file_is_served() -> None:
    served = read_page()
    markup = served["/"].body.decode()
    for name in re.findall(r'(?:href|src)="([^"#]+)"', markup):
        assert f"/{name}" in served
    assert {each.name for each in PAGE.iterdir()} == {
        "index.html",
        "uPlot.LICENSE",
        *(path[1:] for path in served if path != "/"),
    }
