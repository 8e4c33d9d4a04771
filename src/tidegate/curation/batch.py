"""A curated batch on disk: ``<hash>/manifest.json`` and ``<hash>/examples.jsonl``, named and checked by content."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tidegate.artifacts import directory_published_at, file_hash, read_json
from tidegate.core.errors import ConfigError
from tidegate.core.hashing import canonical_json, content_hash
from tidegate.core.selection.sifting import EPISODE, KEPT, Dropped
from tidegate.core.types import Example, JsonObject

SCHEMA = "tidegate.batch/3"
MANIFEST_FILE = "manifest.json"
EXAMPLES_FILE = "examples.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What trains, and the manifest that accounts for everything that was looked at.

    ``hash`` is the content hash of the manifest; the manifest names the hash of the examples, so that it stands for
    both. Manifest: ``schema``, ``seed``, ``settings``, ``keep_failures``, ``examples_sha256``, ``counts`` (items by
    reason) and ``items`` (``id``, ``weight``, ``reason``, ``kind``, ``source``, ``cluster``, ``reward``; reason
    ``kept`` trains).
    """

    hash: str
    manifest: JsonObject
    examples: tuple[Example, ...]

    @property
    def counts(self) -> Mapping[str, int]:
        """How many items were kept, and how many dropped by each reason."""
        return self.manifest["counts"]

    @property
    def fresh(self) -> int:
        """Verified successes that come from episodes of the window; near-successes and failures do not count."""
        threshold = self.manifest["settings"]["success_threshold"]
        return sum(
            example.source == EPISODE and example.reward is not None and example.reward >= threshold
            for example in self.examples
        )


def make_batch(
    examples: Sequence[Example], dropped: Sequence[Dropped], *, seed: int, settings: JsonObject, keep_failures: bool
) -> Batch:
    """Put a batch together; the same content gives the same bytes whatever the order it comes in."""
    ordered = tuple(sorted(examples, key=lambda example: (example.source, example.id, example_line(example))))
    items = [_item(example, weight=example.weight, reason=KEPT) for example in ordered]
    items += sorted((_item(item, weight=0.0, reason=item.reason) for item in dropped), key=canonical_json)
    manifest: JsonObject = {
        "schema": SCHEMA,
        "seed": seed,
        "settings": settings,
        "keep_failures": keep_failures,
        "examples_sha256": hashlib.sha256(_lines(ordered)).hexdigest(),
        "counts": dict(sorted(Counter(str(item["reason"]) for item in items).items())),
        "items": items,
    }
    return Batch(hash=content_hash(manifest), manifest=manifest, examples=ordered)


def _item(item: Example | Dropped, *, weight: float, reason: str) -> dict[str, Any]:
    return {
        "id": item.id,
        "weight": weight,
        "reason": reason,
        "kind": item.kind,
        "source": item.source,
        "cluster": item.cluster,
        "reward": item.reward,
    }


def write_batch(batch: Batch, directory: Path) -> Path:
    """Publish a batch as ``directory/<hash>``; returns that path. One that is there already is left as it is."""
    target = directory / batch.hash
    with directory_published_at(target) as scratch:
        (scratch / EXAMPLES_FILE).write_bytes(_lines(batch.examples))
        (scratch / MANIFEST_FILE).write_text(canonical_json(batch.manifest) + "\n", encoding="utf-8")
    return target


def read_batch(path: Path) -> Batch:
    """Read a batch and check it against its hashes.

    Raises:
        ConfigError: a file is missing, malformed, of another schema, or not what the hashes say.
    """
    manifest = read_json(path / MANIFEST_FILE, "batch manifest")
    if manifest.get("schema") != SCHEMA:
        raise ConfigError(f"batch {str(path)!r} has schema {manifest.get('schema')!r}; {SCHEMA!r} is read here")
    found = content_hash(manifest)
    if found != path.name:
        raise ConfigError(f"batch {str(path)!r} was changed: its manifest hashes to {found!r}; curate again")
    examples_file = path / EXAMPLES_FILE
    try:
        examples_hash = file_hash(examples_file)
        lines = examples_file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"batch {str(path)!r}: {EXAMPLES_FILE} cannot be read: {error}") from error
    if examples_hash != manifest.get("examples_sha256"):
        raise ConfigError(f"batch {str(path)!r} was changed: {EXAMPLES_FILE} hashes to {examples_hash!r}; curate again")
    examples = tuple(example_of(json.loads(line)) for line in lines if line)
    return Batch(hash=found, manifest=manifest, examples=examples)


def _lines(examples: Sequence[Example]) -> bytes:
    return "".join(f"{example_line(example)}\n" for example in examples).encode()


def example_line(example: Example) -> str:
    """An example as a line of the examples file.

    Keys keep their order, which chat templates render: training then sees the prompt that serving saw. All but ASCII is
    escaped, because half a surrogate pair has no bytes of its own.
    """
    return json.dumps(asdict(example), separators=(",", ":"), allow_nan=False)


def example_of(values: Mapping[str, Any]) -> Example:
    """Inverse of :func:`example_line`, from the parsed line."""
    return Example(
        id=values["id"],
        weight=values["weight"],
        source=values["source"],
        kind=values["kind"],
        token_ids=tuple(values["token_ids"]),
        loss_mask=tuple(values["loss_mask"]),
        messages=tuple(values["messages"]),
        tools=tuple(values["tools"]),
        trained_messages=tuple(values["trained_messages"]),
        logprobs=tuple(values["logprobs"]),
        reward=values["reward"],
        group=values["group"],
        cluster=values["cluster"],
        sampled_at=values["sampled_at"],
    )
