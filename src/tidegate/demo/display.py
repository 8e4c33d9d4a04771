"""What a person sees while the demonstration runs: one table, one line of progress. Stderr only."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tidegate.demo.record import DemoRecord, kinds_of


class Display:
    """A live table on a terminal; plain lines elsewhere."""

    def __init__(self, record: DemoRecord) -> None:
        self._record = record
        self._console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._live: Live | None = None

    @contextmanager
    def running(self) -> Generator[None]:
        """Draw while the block runs."""
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self._render, console=self._console, refresh_per_second=4) as live:
            self._live = live
            yield
        self._live = None

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, description: str, total: int) -> Generator[Bar]:
        """A progress bar for the length of a block."""
        task = self._progress.add_task(description, total=total)
        try:
            yield Bar(self._progress, task)
        finally:
            self._progress.remove_task(task)

    def session_finished(self) -> None:
        """Say the last session's row where no table is drawn."""
        if self._live is None:
            session = self._record.sessions[-1]
            kinds = ", ".join(f"{kind} {won}/{total}" for kind, (won, total) in session.by_kind.items())
            self.say(
                f"session {session.number} ({session.title}): {session.success:.3f} of {session.episodes} episodes; "
                f"{kinds}; failed requests {session.failed_requests}; {session.seconds:.0f} s"
            )

    def _render(self) -> RenderableType:
        return Group(self._table(), self._progress)

    def _table(self) -> Table:
        kinds = kinds_of(self._record.sessions)
        table = Table(title="Live traffic of simulated users", title_justify="left", expand=False)
        table.add_column("session")
        table.add_column("success", justify="right")
        for kind in kinds:
            table.add_column(kind, justify="right")
        table.add_column("failed", justify="right")
        table.add_column("then")
        for session in self._record.sessions:
            cells = [session.by_kind.get(kind) for kind in kinds]
            marks = [mark for mark in self._record.marks if mark.after_session == session.number]
            colours = {True: "green", False: "red", None: "cyan"}
            then = ", ".join(f"[{colours[mark.accepted]}]{mark.what}[/]" for mark in marks)
            table.add_row(
                f"{session.number} {session.title}",
                f"{session.success:.3f}",
                *[f"{cell[0]}/{cell[1]}" if cell else "" for cell in cells],
                str(session.failed_requests),
                then,
            )
        return table


class Bar:
    """One running bar."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self) -> None:
        """One more is done."""
        self._progress.advance(self._task)

    def set(self, description: str, done: int, total: int) -> None:
        """Show another stage of the same work."""
        self._progress.update(self._task, description=description, completed=done, total=total)
