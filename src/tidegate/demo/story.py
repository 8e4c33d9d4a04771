"""The demonstration from the first release to a rollback, through the public commands and the HTTP API alone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from importlib.resources import files
from itertools import cycle as repeated
from pathlib import Path
from typing import Any

from tidegate.app.layout import DataDirectory, ServerAddress
from tidegate.artifacts import write_atomically
from tidegate.core.errors import CommandError, ConfigError
from tidegate.core.types import Sampling, Task
from tidegate.demo.display import Bar, Display
from tidegate.demo.plan import CALCULATOR_KINDS, NEW_KIND, Plan, is_asked, settings_text
from tidegate.demo.processes import run_command, running_server
from tidegate.demo.record import DemoRecord, Mark, Session, draw_png, draw_terminal
from tidegate.demo.sentences import because, command_here, step_sentence, tell_early
from tidegate.engines.model_cache import resolve_model
from tidegate.signals import builtin_environments, builtin_verifiers
from tidegate.signals.tasks.experts import expert_answer
from tidegate.signals.tasks.generate import generate_tasks
from tidegate.simulate import ArrivalOptions, EpisodeResult, FeedbackOptions, PlayOptions, SimulationReport, simulate
from tidegate.training import degrade_adapter

DEFAULT_MODEL = "smollm2-135m"
CYCLE_ENDS = (0, 3, 4)
"""Exit codes of a cycle that are outcomes, not failures: published, refused, abstained."""


async def run_demo(*, runs: Path, seed: int, quick: bool) -> dict[str, Any]:
    """Run the demonstration and write its report.

    Args:
        runs: a folder for this run is made in it.
        seed: decides tasks, sampling and training.
        quick: a quarter of the episodes.

    Returns:
        The run's folder and how each update ended.

    Raises:
        CommandError: a command failed.
    """
    plan = Plan().quick() if quick else Plan()
    run_dir = _new_folder(runs, seed)
    await asyncio.to_thread(resolve_model, DEFAULT_MODEL, progress=tell_early)
    story = _Story(run_dir, plan, seed)
    with story.display.running():
        await story.tell()
    return story.finish()


def _new_folder(runs: Path, seed: int) -> Path:
    folder = runs.absolute() / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-seed{seed}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"run folder {str(folder)!r} cannot be made: {error.strerror}; name another place with --runs"
        ) from error
    return folder


class _Story:
    def __init__(self, run_dir: Path, plan: Plan, seed: int) -> None:
        self.run_dir = run_dir
        self.plan = plan
        self.seed = seed
        self.record = DemoRecord(seed=seed)
        self.display = Display(self.record)
        self.data = DataDirectory(root=run_dir / "data")
        self.config = run_dir / "tidegate.toml"
        self.started = time.monotonic()
        self.asked: set[str] = set()
        self.draws = 0
        self.certified: list[str] = []

    async def tell(self) -> None:
        """All scenes in order."""
        self.prepare()
        first = await self.train_first_release()
        async with running_server(self.config, self.data, self.run_dir / "serve.log") as server:
            await self.sign(first)
            for size in self.plan.opening:
                await self.play(server, "calculator", size)
            await self.improve(server, "calculator")
            await self.play(server, "calculator", self.plan.between)
            for size in self.plan.drifted:
                await self.play(
                    server, "with legs", size, drifted=True, shown=self.plan.shown // len(self.plan.drifted)
                )
            await self.improve(server, "with legs", drifted=True)
            await self.play(server, "with legs", self.plan.closing, drifted=True)
            await self.propose_degraded()
            await self.roll_back_and_forth(server)
        await self.check_the_books()

    def prepare(self) -> None:
        """Write the run's settings and policy."""
        text = settings_text(self.run_dir, seed=self.seed, epochs=self.plan.cycle_epochs)
        write_atomically(self.config, text.encode())
        policy = files("tidegate.demo").joinpath("gate.toml").read_bytes()
        write_atomically(self.run_dir / "gate.toml", policy)

    async def train_first_release(self) -> str:
        """A short supervised pass on demonstrations."""
        shown = self.run_dir / "demonstrations.jsonl"
        count, kinds = self.plan.demonstrations_per_kind, ",".join(CALCULATOR_KINDS)
        self.display.say(f"training the first release on {count * len(CALCULATOR_KINDS)} demonstrations")
        with self.stage("first release: training"), self.display.bar("supervised pass on demonstrations", 1):
            await self.command(
                "tasks", "generate", "--demonstrations", "--kinds", kinds, "--count", str(count),
                "--seed", str(self.seed), "--output", str(shown),
            )  # fmt: skip
            trained = await self.command(
                "train", "--demonstrations", str(shown), "--epochs", str(self.plan.seed_epochs), "--json"
            )
        self.record.facts["first_release"] = trained
        self.display.say(
            f"trained the first release on {count * len(CALCULATOR_KINDS)} demonstrations in "
            f"{self.record.stage_seconds['first release: training']:.0f} s"
        )
        return str(trained["candidate"])

    async def sign(self, candidate: str) -> None:
        """A person signs the first release; it becomes champion and anchor."""
        release = await self.command("candidates", "sign", candidate, "--json")
        self.display.say(f"signed by a person and serving: {release['id']}")

    async def play(
        self, server: ServerAddress, title: str, size: int, *, drifted: bool = False, shown: int = 0
    ) -> None:
        """A session at full concurrency."""
        with self.stage("users"), self.display.bar(f"users: {title}", size) as bar:
            tasks = self.tasks(size, drifted=drifted)
            report = await self.simulate(server, tasks, bar, shown=shown)
        self.add_session(title, report)

    async def improve(self, server: ServerAddress, title: str, *, drifted: bool = False) -> None:
        """A cycle, with users going on all the while."""
        number = len(self.record.cycles) + 1
        with self.display.bar(f"cycle {number}: users go on", self.plan.background) as bar:
            async with self.background_users(server, title, bar, drifted=drifted):
                outcome = await self.run_cycle(number)
        accepted = outcome["outcome"] == "done"
        if accepted:
            release = str(outcome["steps"]["publish"]["release"])
            what = f"{release.rsplit('-', 2)[1]} accepted"
        else:
            what = f"update {outcome['outcome']}"
        reasons = self.certified if accepted else outcome["reasons"]
        self.mark(what, accepted if outcome["outcome"] != "abstained" else None, "; ".join(reasons))

    async def run_cycle(self, number: int, *arguments: str) -> dict[str, Any]:
        """``tidegate cycle run``, its steps on a bar."""
        with self.display.bar(f"cycle {number}: collect", 1) as bar:

            def on_line(line: dict[str, Any]) -> None:
                detail = line.get("detail", {})
                if line.get("what") == "progress":
                    done, total = detail.get("done", detail.get("step", 0)), detail.get("of", detail.get("steps", 1))
                    arm = f" {detail['arm']}" if "arm" in detail else ""
                    bar.set(f"cycle {number}: {line['step']}{arm}", done, total)
                elif line.get("what") == "finished":
                    self.add_seconds(f"cycle: {line['step']}", float(detail["seconds"]))
                    if line["step"] == "certify":
                        self.certified = detail["reasons"]
                    if not line["detail"]["output"].get("proposed"):
                        self.display.say(step_sentence(number, line))

            finished = await run_command(
                ["cycle", "run", "--json", *arguments], config=self.config, accepted=CYCLE_ENDS, on_line=on_line
            )
        outcome = finished.last
        self.record.cycles.append(
            {"number": number, **{key: outcome[key] for key in ("cycle", "outcome", "reasons", "steps")}}
        )
        self.display.say(f"cycle {number} ended: {outcome['outcome']}" + because(outcome["reasons"]))
        return outcome

    async def propose_degraded(self) -> None:
        """A damaged adapter asks to be served; the gate must refuse it."""
        champion = await self.champion_adapter()
        damaged = degrade_adapter(self.data.adapters / champion, self.run_dir / "degraded", seed=self.seed, scale=16.0)
        self.display.say("a deliberately degraded adapter asks to be served")
        outcome = await self.run_cycle(len(self.record.cycles) + 1, "--candidate", str(damaged))
        if outcome["outcome"] == "done":
            raise CommandError("the gate let a deliberately degraded adapter into serving; this must never happen")
        refused = outcome["outcome"] == "refused"
        what = "degraded refused" if refused else "degraded not judged"
        self.mark(what, False if refused else None, "; ".join(outcome["reasons"]))

    async def roll_back_and_forth(self, server: ServerAddress) -> None:
        """Roll the champion back, let users come, promote it again, let users come."""
        before = await self.champion_release()
        with self.stage("rollback and promotion"):
            back = await self.command("releases", "rollback", "--reason", "shown by the demonstration", "--json")
        self.mark("rolled back", None, f"{before} -> {back['id']}, which restores {back['restores']}")
        await self.play(server, "rolled back", self.plan.after_rollback, drifted=True)
        self.require_release(back["id"])
        with self.stage("rollback and promotion"):
            again = await self.command("releases", "promote", before, "--json")
        self.mark("promoted again", True, f"{back['id']} -> {again['id']}, which restores {again['restores']}")
        await self.play(server, "promoted again", self.plan.after_rollback, drifted=True)
        self.require_release(again["id"])

    async def check_the_books(self) -> None:
        """Recompute every decision from the audit log."""
        report = await self.command("audit", "verify", "--json")
        self.record.facts["audit"] = report
        self.display.say(
            f"audit log verified: {report['records']} records, {report['decisions']} decisions recomputed, "
            f"{report['promotions']} promotions"
        )

    def finish(self) -> dict[str, Any]:
        """Write report and plots, say how to go on."""
        record = self.record
        record.facts["seconds"] = round(time.monotonic() - self.started, 1)
        record.facts["failed_requests"] = sum(session.failed_requests for session in record.sessions)
        record.write(self.run_dir / "report.json")
        draw_png(record, self.run_dir / "curve.png")
        self.display.say(draw_terminal(record))
        for mark in record.marks:
            self.display.say(f"after session {mark.after_session}: {mark.what}" + because([mark.detail]))
        failed = record.facts["failed_requests"]
        self.display.say(
            f"{record.facts['seconds']:.0f} s in all; {failed} failed requests; report, plot and data in {self.run_dir}"
        )
        self.display.say(
            f"go on: {command_here()} --config {self.config} serve --port 8420, then "
            "curl http://127.0.0.1:8420/v1/models, or "
            "OpenAI(base_url='http://127.0.0.1:8420/v1', api_key='none') with model='champion'"
        )
        if failed:
            raise CommandError(f"{failed} requests of simulated users failed; {self.run_dir / 'serve.log'} says why")
        return {
            "run": str(self.run_dir),
            "seconds": record.facts["seconds"],
            "curve": [
                [session.number, session.title, session.success, session.episodes] for session in record.sessions
            ],
            "marks": [[mark.after_session, mark.what, mark.detail] for mark in record.marks],
        }

    @asynccontextmanager
    async def background_users(
        self, server: ServerAddress, title: str, bar: Bar, *, drifted: bool
    ) -> AsyncGenerator[None]:
        """Users who come at a steady rate for as long as the block runs."""
        stop = asyncio.Event()
        tasks = self.tasks(self.plan.background, drifted=drifted)
        playing = asyncio.create_task(
            self.simulate(server, tasks, bar, rate_per_s=self.plan.background_per_s, stop=stop)
        )
        try:
            yield
        finally:
            stop.set()
            report = await playing
        self.add_session(f"{title}, cycle", report)

    async def simulate(
        self,
        server: ServerAddress,
        tasks: Sequence[Task],
        bar: Bar,
        *,
        shown: int = 0,
        rate_per_s: float | None = None,
        stop: asyncio.Event | None = None,
    ) -> SimulationReport:
        """Play a session over HTTP through the official client."""

        def on_episode(episode: EpisodeResult) -> None:
            del episode
            bar.advance()

        return await simulate(
            tasks,
            base_url=f"{server.url}/v1",
            arrivals=ArrivalOptions(
                session=f"s{len(self.record.sessions) + 1}", concurrency=self.plan.concurrency, rate_per_s=rate_per_s
            ),
            environments=builtin_environments(),
            verifiers=builtin_verifiers(),
            play=PlayOptions(
                sampling=Sampling(temperature=1.0, max_tokens=self.plan.max_tokens),
                stream_share=0.5,
                seed=self.seed,
                feedback=FeedbackOptions(
                    expert=expert_answer, demonstrate_kinds=frozenset({NEW_KIND}), demonstrate_count=shown
                ),
            ),
            on_episode=on_episode,
            stop=stop,
        )

    def tasks(self, size: int, *, drifted: bool) -> list[Task]:
        """Tasks that nobody asked before; after the drift two thirds of them are of the new kind."""
        kinds = repeated([*CALCULATOR_KINDS, *[NEW_KIND] * 6] if drifted else CALCULATOR_KINDS)
        order = [next(kinds) for _ in range(size)]
        self.draws += 1
        pools: dict[str, Iterator[Task]] = {}
        for kind in dict.fromkeys(order):
            drawn = self.drawn(kind, order.count(kind))
            self.asked.update(task.id for task in drawn)
            pools[kind] = iter(drawn)
        return [next(pools[kind]) for kind in order]

    def drawn(self, kind: str, count: int) -> list[Task]:
        """Tasks of one kind that a user would ask and nobody asked before."""
        found: dict[str, Task] = {}
        turned_down: set[str] = set()
        while len(found) < count:
            taken = self.asked | turned_down | found.keys()
            drawn = generate_tasks(kind, count - len(found), self.seed * 1000 + self.draws, exclude=taken)
            found.update((task.id, task) for task in drawn if is_asked(task))
            turned_down.update(task.id for task in drawn if not is_asked(task))
        return list(found.values())

    def add_session(self, title: str, report: SimulationReport) -> None:
        self.record.sessions.append(
            Session(
                number=len(self.record.sessions) + 1,
                title=title,
                episodes=report.overall.episodes,
                success=report.overall.rate,
                by_kind={kind: (share.passed, share.episodes) for kind, share in report.by_kind.items()},
                failed_requests=sum(report.failed_requests.values()) + sum(report.feedback_failures.values()),
                releases={release: share.episodes for release, share in report.by_release.items()},
                seconds=report.wall_s,
            )
        )
        self.display.session_finished()

    def mark(self, what: str, accepted: bool | None, detail: str) -> None:
        self.record.marks.append(
            Mark(after_session=len(self.record.sessions), what=what, accepted=accepted, detail=detail)
        )

    def require_release(self, release_id: str) -> None:
        """The last session must have been answered by this release and no other."""
        seen = set(self.record.sessions[-1].releases)
        if seen != {release_id}:
            raise CommandError(f"requests after a swap to {release_id!r} were answered by {sorted(seen)}")

    async def champion_release(self) -> str:
        rows = await self.rows("releases", "list")
        return next(row["id"] for row in rows if "champion" in row["aliases"].split(","))

    async def champion_adapter(self) -> str:
        release = await self.command("releases", "show", await self.champion_release(), "--json")
        return str(release["adapter_sha256"])

    async def command(self, *arguments: str) -> dict[str, Any]:
        return (await run_command(arguments, config=self.config)).last

    async def rows(self, *arguments: str) -> list[dict[str, Any]]:
        return (await run_command([*arguments, "--json"], config=self.config)).rows

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: self.add_seconds(name, time.monotonic() - started))
            yield

    def add_seconds(self, name: str, seconds: float) -> None:
        self.record.stage_seconds[name] = self.record.stage_seconds.get(name, 0.0) + seconds
