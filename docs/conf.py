"""Sphinx builds the documentation from Markdown; ``scripts/docs`` runs it with every warning an error."""

from importlib.metadata import version as package_version

project = "Tidegate"
author = "The Tidegate authors"
copyright = "The Tidegate authors, Apache-2.0"
version = release = package_version("tidegate")

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 4
# Links may leave docs for files of the repository (LICENSE, recipes); a test checks that they are there.
suppress_warnings = ["myst.xref_missing"]

html_theme = "furo"
html_title = f"Tidegate {release}"
