"""``tasks generate|convert`` and ``simulate``: tasks, and users that bring them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tidegate.cli.context import settings_of
from tidegate.cli.output import boundary, emit, emit_table, say
from tidegate.cli.running import run_until_interrupted

tasks = typer.Typer(help="Task files.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="File to write (JSONL).")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.add_typer(tasks, name="tasks")
    app.command()(simulate)


@tasks.command("generate")
def generate(
    output: Output,
    kinds: Annotated[
        str, typer.Option("--kinds", help="Comma-separated kinds.")
    ] = "chain_sum,products,basic_arithmetic",
    count: Annotated[int, typer.Option("--count", min=1, help="Tasks of each kind.")] = 8,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the generators.")] = 0,
    demonstrations: Annotated[
        bool, typer.Option("--demonstrations", help="Write solved transcripts for 'train' instead of tasks.")
    ] = False,
) -> None:
    """Generate calculator-agent tasks, or demonstrations of how to solve them."""
    from tidegate.app.tasks import generate_file

    with boundary():
        names = [kind.strip() for kind in kinds.split(",") if kind.strip()]
        written = generate_file(output, names, count=count, seed=seed, solved=demonstrations)
        say(f"wrote {written} {'demonstrations' if demonstrations else 'tasks'} to {output}")


@tasks.command("convert")
def convert(
    dataset: Annotated[str, typer.Argument(help="'bfcl' (questions and answers file) or 'gsm8k' (one file).")],
    paths: Annotated[list[Path], typer.Argument(help="The data set's own files.")],
    output: Output,
    demonstrations: Annotated[
        int, typer.Option("--demonstrations", min=0, help="Also write this many solved transcripts beside the tasks.")
    ] = 0,
) -> None:
    """Turn a published data set into a task file."""
    from tidegate.app.tasks import convert_file

    with boundary():
        for line in convert_file(dataset, paths, output, demonstrations=demonstrations):
            say(line)


def simulate(
    context: typer.Context,
    tasks_file: Annotated[
        Path | None, typer.Option("--tasks", help="Task file (JSONL); without it calculator tasks are generated.")
    ] = None,
    kinds: Annotated[str, typer.Option("--kinds", help="Kinds to generate.")] = "chain_sum,products,basic_arithmetic",
    count: Annotated[int | None, typer.Option("--count", min=1, help="Episodes (default: all tasks, or 96).")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of tasks and sampling.")] = 0,
    base_url: Annotated[str | None, typer.Option("--base-url", help="Server (default: the one of data_dir).")] = None,
    model: Annotated[str, typer.Option("--model", help="Model name to ask for.")] = "champion",
    api_key: Annotated[str, typer.Option("--api-key", envvar="TIDEGATE_API_KEY", help="Bearer token.")] = "none",
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Users at the same time.")] = 16,
    users: Annotated[
        int | None, typer.Option("--users", min=1, help="Distinct users (default: one an episode).")
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, max=2.0, help="Sampling temperature.")] = 1.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer of one call.")] = 64,
    stream_share: Annotated[
        float, typer.Option("--stream-share", min=0.0, max=1.0, help="Share of the calls that are streamed.")
    ] = 0.5,
    as_json: Json = False,
) -> None:
    """Play users against a running server through the official openai client."""
    from tidegate.app.tasks import SimulationOptions, simulate_users

    options = SimulationOptions(
        tasks_file=tasks_file,
        kinds=[kind.strip() for kind in kinds.split(",") if kind.strip()],
        count=count,
        seed=seed,
        base_url=base_url,
        model=model,
        api_key=api_key,
        concurrency=concurrency,
        users=users,
        temperature=temperature,
        max_tokens=max_tokens,
        stream_share=stream_share,
    )
    played = 0

    def on_episode(episode: Any, total: int) -> None:
        nonlocal played
        played += 1
        if played % 20 == 0 or played == total:
            say(f"{played}/{total} episodes")

    with boundary():
        report = run_until_interrupted(simulate_users(settings_of(context), options, on_episode=on_episode))
        if as_json:
            emit(report, as_json=True)
        else:
            _show(report)
    raise typer.Exit(1 if report["failed_requests"] else 0)


def _show(report: Any) -> None:
    """Tables for people."""
    for title, shares in (("kind", report["by_kind"]), ("release", report["by_release"])):
        rows = [(name, share["passed"], share["episodes"], f"{share['rate']:.3f}") for name, share in shares.items()]
        emit_table((title, "passed", "episodes", "success"), rows, as_json=False)
        print()
    shown = ("overall", "failures", "requests", "failed_requests", "latency_s", "completion_tokens", "wall_s")
    emit({name: report[name] for name in shown}, as_json=False)
