"""Answers that a cycle asked for itself, on disk: ``<hash>/manifest.json``, ``episodes.jsonl``, ``rationalized.jsonl``.

They lie beside the batches and not among the trajectories: no user got them. Named and checked by content; times are
that of the window's end and durations are left at 0, so that the same answers are the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tidegate.artifacts import directory_published_at, file_hash, read_json
from tidegate.core.errors import ConfigError
from tidegate.core.hashing import canonical_json, content_hash
from tidegate.core.selection.sequences import Fresh
from tidegate.core.types import (
    Choice,
    Episode,
    FinishReason,
    Interaction,
    JsonObject,
    Outcome,
    Sampling,
    Split,
    Task,
    Verdict,
)
from tidegate.curation.batch import example_of

SCHEMA = "tidegate.rollouts/1"
MANIFEST_FILE = "manifest.json"
EPISODES_FILE = "episodes.jsonl"
RATIONALIZED_FILE = "rationalized.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """An episode and what its task's verifier says of it."""

    episode: Episode
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Answers to a train user's tasks, and the manifest that accounts for all that was asked or left out.

    ``hash`` is the content hash of the manifest, which names the hashes of both files.
    """

    hash: str
    manifest: JsonObject
    judged: tuple[Judged, ...]
    rationalized: tuple[Fresh, ...]

    @property
    def episodes(self) -> tuple[Episode, ...]:
        """The answers as curation takes episodes."""
        return tuple(item.episode for item in self.judged)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """One for each of the episodes."""
        return tuple(item.verdict for item in self.judged)


def make_rollouts(judged: Sequence[Judged], rationalized: Sequence[Fresh], *, account: JsonObject) -> Rollouts:
    """Put rollouts together.

    Args:
        judged: in the order in which they are to be read.
        rationalized: examples and the users whose tasks they answer.
        account: what the manifest says beside schema and hashes.
    """
    manifest: JsonObject = {
        "schema": SCHEMA,
        "episodes_sha256": hashlib.sha256(_lines(judged)).hexdigest(),
        "rationalized_sha256": hashlib.sha256(_lines(rationalized)).hexdigest(),
        **account,
    }
    return Rollouts(
        hash=content_hash(manifest), manifest=manifest, judged=tuple(judged), rationalized=tuple(rationalized)
    )


def no_rollouts() -> Rollouts:
    """Those of a cycle that asked for none."""
    return make_rollouts((), (), account={})


def write_rollouts(rollouts: Rollouts, directory: Path) -> Path:
    """Publish rollouts as ``directory/<hash>``; returns that path. What is there already is left as it is."""
    target = directory / rollouts.hash
    with directory_published_at(target) as scratch:
        (scratch / EPISODES_FILE).write_bytes(_lines(rollouts.judged))
        (scratch / RATIONALIZED_FILE).write_bytes(_lines(rollouts.rationalized))
        (scratch / MANIFEST_FILE).write_text(canonical_json(rollouts.manifest) + "\n", encoding="utf-8")
    return target


def read_rollouts(path: Path) -> Rollouts:
    """Read rollouts and check them against their hashes.

    Raises:
        ConfigError: a file is missing, of another schema, or not what the hashes say.
    """
    manifest = read_json(path / MANIFEST_FILE, "rollout manifest")
    if manifest.get("schema") != SCHEMA:
        raise ConfigError(f"rollouts {str(path)!r} have schema {manifest.get('schema')!r}; {SCHEMA!r} is read here")
    found = content_hash(manifest)
    if found != path.name:
        raise ConfigError(
            f"rollouts {str(path)!r} were changed: their manifest hashes to {found!r}; end the cycle with 'tidegate "
            "cycle abandon' and run another"
        )
    judged = _checked_lines(path / EPISODES_FILE, manifest["episodes_sha256"])
    rationalized = _checked_lines(path / RATIONALIZED_FILE, manifest["rationalized_sha256"])
    return Rollouts(
        hash=found,
        manifest=manifest,
        judged=tuple(Judged(episode=_episode(line["episode"]), verdict=_verdict(line["verdict"])) for line in judged),
        rationalized=tuple(
            Fresh(**_changed(_with_tuples(line, "prompt"), example=example_of(line["example"])))
            for line in rationalized
        ),
    )


def _checked_lines(path: Path, expected: str) -> list[dict[str, Any]]:
    try:
        found = file_hash(path)
        lines = path.read_text(encoding="ascii").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"rollouts {str(path)!r} cannot be read: {error}") from error
    if found != expected:
        raise ConfigError(
            f"rollouts {str(path)!r} were changed: the file hashes to {found!r}, {expected!r} was written; end the "
            "cycle with 'tidegate cycle abandon' and run another"
        )
    return [json.loads(line) for line in lines if line]


_USUAL: Mapping[str, Any] = {
    "token_exact": True,
    "distribution_known": True,
    "json_schema": None,
    "tool_choice": None,
    "parallel_tool_calls": True,
    "search": None,
    "delivered": True,
}


def _lines(things: Sequence[Judged | Fresh]) -> bytes:
    """One JSON object a line. Keys keep their order, which chat templates render; all but ASCII is escaped, because
    half a surrogate pair has no bytes of its own."""
    return "".join(
        f"{json.dumps(asdict(thing, dict_factory=_told), separators=(',', ':'), allow_nan=False)}\n" for thing in things
    ).encode()


def _told(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """What says nothing unusual is left out: the same answers are the same bytes as before there were these fields."""
    return {name: value for name, value in fields if name not in _USUAL or value != _USUAL[name]}


def _episode(values: Mapping[str, Any]) -> Episode:
    calls = tuple(_interaction(call) for call in values["interactions"])
    return Episode(**_changed(values, split=Split(values["split"]), interactions=calls))


def _interaction(values: Mapping[str, Any]) -> Interaction:
    sampling = values["sampling"]
    return Interaction(
        **_changed(
            _with_tuples(values, "messages", "tools", "prompt_token_ids"),
            split=Split(values["split"]),
            sampling=Sampling(**_with_tuples(sampling, "stop")),
            choices=tuple(_choice(choice) for choice in values["choices"]),
            task=Task(**_with_tuples(values["task"], "messages", "tools")),
        )
    )


def _choice(values: Mapping[str, Any]) -> Choice:
    lists = _with_tuples(values, "token_ids", "logprobs", "tool_calls")
    return Choice(**_changed(lists, finish_reason=FinishReason(values["finish_reason"])))


def _verdict(values: Mapping[str, Any]) -> Verdict:
    return Verdict(**_changed(values, outcome=Outcome(values["outcome"])))


def _with_tuples(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return _changed(values, **{name: tuple(values[name]) for name in names})


def _changed(values: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {**values, **changes}
