"""A data directory with recorded traffic over a tiny model that can learn one answer, and cycles as real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from engine_fixtures import byte_tokenizer, write_tiny_model
from tidegate.app.engines import embedded_engine
from tidegate.app.layout import DataDirectory
from tidegate.app.publishing import build_publisher
from tidegate.app.stores import open_stores
from tidegate.config import Settings, load_settings
from tidegate.core.chat import encode_prompt
from tidegate.core.errors import ConflictError
from tidegate.core.hashing import content_hash
from tidegate.core.types import Choice, FinishReason, Interaction, Sampling, Split, Task
from tidegate.release import Router

ANSWER = "ok"
POLICY = """\
format = 1
name = "test"
decoding = "traffic"
canary = "none"
holdback = "none"
collapse = "none"
[ledger]
alpha = 0.2
error_rate = "fdr"
looks_per_window = 2
looks_per_epoch = 2
[sealed]
min_pairs = 10
max_pairs = 12
max_error_share = 0.05
max_age_days = 90.0
[non_inferiority]
level = 0.05
overall_margin = 0.5
anchor_margin = 0.5
slice_margin = 0.5
min_pairs_per_slice = 5
[guardrails]
no_reply_margin = 0.5
invalid_tool_call_margin = 0.5
refusal_margin = 0.5
length_factor = 2.0
length_margin = 0.9
latency_factor = 3.0
latency_margin = 0.9
[screen]
min_dev_pairs = 4
dev_rule = "above"
max_no_reply_increase = 0.5
max_invalid_tool_call_increase = 0.5
kl_budget = 50.0
[triggers]
max_error_ratio = 2.0
min_calls = 50
max_disagreement = 0.10
min_audited = 10
drift_drop = 0.20
drift_at = 100.0
rollbacks_per_window = 2
"""
SETTINGS = """\
data_dir = "{data}"
policy = "{policy}"
[model]
path = "{model}"
name = "tiny"
dtype = "float32"
max_batch = 8
max_context = 256
threads = 1
[server]
port = 0
admin_port = 0
[curation]
min_fresh = 4
max_age_days = 1e6 # the recorded traffic is of 1970
[training]
rank = 4
alpha = 8
learning_rate = 0.02
epochs = 12
batch_size = 8
[cycle]
nice = 0
concurrency = 8
"""


class LoopWorld:
    """Everything lies under ``root``; the data directory may hold recorded traffic."""

    def __init__(self, root: Path, model: Path, more_settings: str = "") -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.model = model
        (root / "gate.toml").write_text(POLICY)
        self.config = root / "tidegate.toml"
        self.config.write_text(
            SETTINGS.format(data=root / "data", policy=root / "gate.toml", model=model) + more_settings
        )
        self.settings: Settings = load_settings(self.config)
        self.data = DataDirectory.of(self.settings).create()

    @classmethod
    def with_traffic(
        cls, root: Path, *, train: int = 12, dev: int = 6, sealed: int = 12, more_settings: str = ""
    ) -> LoopWorld:
        """A new world with so many answered users of each split; ``more_settings`` are further TOML sections."""
        world = cls(root, write_tiny_model(root / "model"), more_settings)
        with open_stores(world.data) as stores:
            for split, count in ((Split.TRAIN, train), (Split.DEV, dev), (Split.SEALED, sealed)):
                store = stores.sealed_trajectories if split is Split.SEALED else stores.trajectories
                store.append_interactions([answered(split, index) for index in range(count)])
        return world

    async def first_release(self) -> None:
        """Release 0, as the first start of a server makes it."""
        with open_stores(self.data) as stores:
            async with embedded_engine(self.settings, self.model, replica="first") as engine:
                router = Router(model_name="tiny", episode_ttl_s=1.0, clock=time.monotonic)
                publisher = build_publisher(self.data, stores, engine, router, settings=self.settings, clock=time.time)
                await publisher.reconcile()

    def tidegate(self, *arguments: str, timeout_s: float = 200.0) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [sys.executable, "-m", "tidegate", "--config", str(self.config), *arguments],
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip

    def cycle_killed_in(self, step: str, moment: str, *, timeout_s: float = 200.0) -> int:
        """Run a cycle that ends itself with SIGKILL at a moment of a step; returns the exit status."""
        script = textwrap.dedent(
            f"""
            import asyncio, os, signal
            from pathlib import Path
            from tidegate.app.learning import run_one_cycle
            from tidegate.config import load_settings

            def observe(event):
                if event["step"] == {step!r} and event["what"] == {moment!r}:
                    os.kill(os.getpid(), signal.SIGKILL)

            asyncio.run(run_one_cycle(load_settings(Path({str(self.config)!r})), candidate=None, observe=observe))
            """
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, timeout=timeout_s, check=False, env=dict(os.environ)
        )
        return done.returncode

    def cycle(self, *arguments: str) -> dict[str, Any]:
        """Run (or resume) a cycle; returns its result line."""
        done = self.tidegate("cycle", "run", "--json", *arguments)
        assert done.returncode in (0, 3, 4), done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def set(self, section: str, **values: object) -> None:
        """Add a section to the settings file; texts, numbers and lists are written alike in JSON and TOML."""
        lines = [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
        with self.config.open("a") as file:
            file.write("\n".join(["", *lines, ""]))
        self.settings = load_settings(self.config)

    @contextmanager
    def serving(self, *arguments: str, within_s: float = 120.0) -> Generator[str]:
        """A running server; yields its URL."""
        log = self.root / "serve.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tidegate", "--config", str(self.config), "serve", *arguments],
                stdout=output,
                stderr=output,
            )
        try:
            yield self._ready(process, log, within_s)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)

    def _ready(self, process: subprocess.Popen[bytes], log: Path, within_s: float) -> str:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and process.poll() is None:
            address = None
            with suppress(ConflictError):  # it is starting
                address = self.data.server()
            if address is not None and address.pid == process.pid and get(f"{address.url}/readyz")[0] == 200:
                return address.url
            time.sleep(0.05)
        raise AssertionError(f"the server is not ready: {log.read_text()}")

    @staticmethod
    def until_ready(url: str, deadline_s: float = 60.0) -> None:
        """Wait until a running server says that it is ready."""
        deadline = time.monotonic() + deadline_s
        while (said := get(f"{url}/readyz"))[0] != 200:
            assert time.monotonic() < deadline, said
            time.sleep(0.05)

    def decisions(self) -> list[dict[str, Any]]:
        """Bodies of the decision records."""
        with open_stores(self.data) as stores:
            return [dict(record.body) for record in stores.audit.read() if record.kind == "decision"]


def get(url: str) -> tuple[int, bytes]:
    """Status and body; status 0 when nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


def answered(split: Split, index: int) -> Interaction:
    """A recorded interaction whose answer was right."""
    messages = ({"role": "user", "content": f"{split.value} {index}"},)
    fields = {"messages": messages, "verifier": "exact_text", "reference": ANSWER}
    task = Task(id=f"task-{content_hash(fields)[:16]}", kind="greeting", **fields)
    tokenizer = byte_tokenizer()
    tokens = (*tokenizer.encode(ANSWER, add_special_tokens=False), tokenizer.eos_token_id)
    return Interaction(
        id=f"chatcmpl-{split.value}-{index}",
        episode_id=f"episode-{split.value}-{index}",
        user_key=f"user-{split.value}-{index}",
        split=split,
        created_at=1000.0 + index,
        messages=messages,
        tools=(),
        sampling=Sampling(temperature=0.2, max_tokens=8),  # so low that what was learnt is said, not drawn
        prompt_token_ids=encode_prompt(tokenizer, messages, ()),
        choices=(
            Choice(
                index=0, token_ids=tokens, logprobs=(-1.0,) * len(tokens), text=ANSWER, finish_reason=FinishReason.STOP
            ),
        ),
        release_id="tiny-r0-base",
        engine_replica="first",
        latency_s=0.1,
        task=task,
    )


def essence(result: dict[str, Any], decisions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What must be the same however often a cycle was interrupted."""
    steps = result["steps"]

    def without_times(outcomes: dict[str, Any]) -> dict[str, Any]:
        arms = ("challenger", "champion", "anchor")
        return outcomes | {arm: outcomes[arm] | {"milliseconds": None} for arm in arms}

    return {
        "outcome": result["outcome"],
        "manifest": steps["curate"]["manifest_hash"],
        "adapter": steps["train"]["adapter_sha256"],
        "looks": [
            (d["decision"], d["candidate_sha256"], d["champion_sha256"], without_times(d["outcomes"]))
            for d in decisions
        ],
    }
