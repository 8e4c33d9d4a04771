"""Measurements against targets and peers. ``scripts/bench NAME`` runs ``benchmarks/NAME.py``.

A benchmark is a module with a docstring and ``run(options: Options) -> list[Row]``. Peers are installed into
virtual environments outside the tree (:func:`benchmarks.harness.peer_environment`), never into the project's.
"""
