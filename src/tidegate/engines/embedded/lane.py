"""The running batch of one set of weights: rows join and leave at token boundaries.

Slots [0, D) hold rows that decode, slots [D, D + P) rows whose prompt is being computed. One step admits what
fits, computes one chunk of prompts and one token of every decoding row. Lives on the decode thread alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidegate.core.errors import EngineError
from tidegate.engines.embedded.forward import Runner
from tidegate.engines.embedded.prefixes import BLOCK, PrefixStore
from tidegate.engines.embedded.rows import Row, Vocabulary
from tidegate.engines.embedded.sampling import sample
from tidegate.engines.embedded.slots import SlotCache
from tidegate.engines.embedded.waiting import WaitingRows

# Prompt tokens computed between two decode steps: bounds how long running rows wait for a newcomer.
_CHUNK_WHILE_DECODING = 256
_CHUNK_ALONE = 2048
_SMALLEST_CHUNK = 32
# A newcomer waits for a row that is computing at least this much of its prompt already.
_WORTH_WAITING = 2 * BLOCK


class Lane:
    """Rows of one adapter.

    Args:
        runner: the weights.
        slots: empty; owned by this lane.
        store: prefix store shared by all lanes.
        vocabulary: token texts and end tokens.
        max_rows: most rows at once.
        max_bytes: memory for slots, counted as if every row ran to its limit; a row alone may exceed it.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        slots: SlotCache,
        store: PrefixStore,
        vocabulary: Vocabulary,
        max_rows: int,
        max_bytes: int,
    ) -> None:
        self.runner = runner
        self.waiting = WaitingRows()
        self._slots = slots
        self._store = store
        self._root = store.new_root()
        self._vocabulary = vocabulary
        self._max_rows = max_rows
        self._max_tokens = max_bytes // slots.token_bytes
        self._rows: list[Row] = []
        self._decoding = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.waiting or self._rows)

    @property
    def running(self) -> int:
        """Choices that have a slot or will get one with their sibling."""
        return sum(1 + len(row.siblings) for row in self._rows)

    def step(self) -> None:
        """Advance every row by at most one token. After an exception :meth:`fail_running` must follow."""
        self._drop_cancelled()
        self._admit()
        if len(self._rows) > self._decoding:
            self._compute_prompts()
        if self._decoding:
            self._decode()
        if not self._rows:
            self._slots.release()

    def fail_running(self, error: EngineError) -> None:
        """Fail the calls that have a row, and start from clean slots."""
        for row in self._rows:
            for member in (row, *row.siblings):
                member.call.fail(error)
        self._rows.clear()
        self._decoding = 0
        self._slots.release()
        self._drop_cancelled()

    def fail_all(self, error: EngineError) -> None:
        """Fail waiting calls as well, and forget everything that was computed."""
        for row in self.waiting:
            row.call.fail(error)
        self.waiting.clear()
        self.fail_running(error)
        self._store.forget(self._root)

    def _drop_cancelled(self) -> None:
        if any(row.call.cancelled for row in self.waiting):
            self.waiting.drop_cancelled()
        for slot in reversed(range(len(self._rows))):
            row = self._rows[slot]
            row.siblings = [sibling for sibling in row.siblings if not sibling.call.cancelled]
            if row.call.cancelled:
                self.waiting.put_back(row.siblings)
                self._leave(slot)

    def _admit(self) -> None:
        """Give slots to waiting rows, callers in turn, passing over those that another row's prompt will soon serve."""
        free = self._max_rows - self.running
        if free <= 0 or not self.waiting:
            return
        skipped: list[Row] = []
        try:
            while self.waiting and free > 0 and self._has_memory_for(self.waiting.next()):
                row = self.waiting.take()
                if self._place(row):
                    free -= 1
                else:
                    skipped.append(row)
        finally:
            self.waiting.put_back(skipped)

    def _place(self, row: Row) -> bool:
        """Give a row a slot or a sibling that has one; False when another row's prompt will soon serve it."""
        computing = self._rows[self._decoding :]
        twin = next((other for other in computing if other.call.prompt == row.call.prompt), None)
        if twin is not None:
            twin.siblings.append(row)
            return True
        blocks = self._store.match(self._root, row.call.prompt)
        if self._soon_served(row.call.prompt, len(blocks) * BLOCK):
            return False
        slot = len(self._rows)
        self._rows.append(row)  # before anything that may lack memory: who fails the running rows must find it
        self._slots.reserve(slot + 1, row.prompt_length)
        for index, block in enumerate(blocks):
            self._slots.put(slot, index * BLOCK, block.keys, block.values)
        row.cached = len(blocks) * BLOCK
        return True

    def _has_memory_for(self, newcomer: Row) -> bool:
        """Slots are as long as the longest row: whether rows times longest stays within bounds."""
        if not self._rows:
            return True
        longest = max(row.prompt_length + row.limit for row in (*self._rows, newcomer))
        return longest * (self.running + 1) <= self._max_tokens

    def _soon_served(self, prompt: tuple[int, ...], matched: int) -> bool:
        wanted = matched + _WORTH_WAITING
        if len(prompt) <= wanted:
            return False
        return any(row.call.prompt[:wanted] == prompt[:wanted] for row in self._rows[self._decoding :])

    def _compute_prompts(self) -> None:
        """One chunk of every prompt under way; rows that are through get their first token."""
        first = self._decoding
        rows = self._rows[first:]
        budget = _CHUNK_WHILE_DECODING if first else _CHUNK_ALONE
        size = min(max(row.remaining_prompt for row in rows), max(_SMALLEST_CHUNK, budget // len(rows)))
        # A row with less to do than the chunk computes its last tokens once more, so that all rows end in step.
        starts = [max(0, min(row.cached, row.prompt_length - size)) for row in rows]
        self._slots.reserve(len(self._rows), max(starts) + size)
        tokens = [
            (row.tokens[start : start + size] + [0] * size)[:size] for row, start in zip(rows, starts, strict=True)
        ]
        positions = torch.tensor(starts)[:, None] + torch.arange(size)
        lasts = [row.prompt_length - 1 - start for row, start in zip(rows, starts, strict=True)]
        keep = sorted({last for last in lasts if last < size}) or [size - 1]
        logits = self.runner.advance(self._slots, first, torch.tensor(tokens), positions, keep)
        # Every length before any row moves: a slot moves with as many columns as its row says it has.
        for row, start in zip(rows, starts, strict=True):
            row.cached = min(start + size, row.prompt_length)
        begun: list[Row] = []
        scores: list[torch.Tensor] = []
        for index, (row, last) in enumerate(zip(rows, lasts, strict=True)):
            if last < size:
                joined = self._begin(row)
                begun += joined
                scores += [logits[index, keep.index(last)]] * len(joined)
        if begun:
            self._take(begun, torch.stack(scores))

    def _begin(self, row: Row) -> list[Row]:
        """Move a row whose prompt is computed, and copies for its siblings, to the decoding slots."""
        self._promote(self._rows.index(row))
        slot = self._rows.index(row)
        self._remember(row, slot)
        joined = [row]
        for sibling in row.siblings:
            new = len(self._rows)
            self._slots.reserve(new + 1, row.cached)
            self._slots.move(slot, new, row.cached)
            sibling.cached = row.cached
            self._rows.append(sibling)
            self._promote(new)
            joined.append(sibling)
        row.siblings = []
        return joined

    def _decode(self) -> None:
        rows = self._rows[: self._decoding]
        positions = torch.tensor([[row.cached] for row in rows])
        self._slots.reserve(len(self._rows), int(positions.max()) + 1)
        tokens = torch.tensor([[row.tokens[row.cached]] for row in rows])
        logits = self.runner.advance(self._slots, 0, tokens, positions, (0,))[:, 0]
        for row in rows:
            row.cached += 1
        self._take(rows, logits)

    def _take(self, rows: Sequence[Row], logits: torch.Tensor) -> None:
        """Sample one token a row; rows that end leave."""
        sampled = sample(logits, [row.sampler for row in rows])
        for row, token in zip(rows, sampled, strict=True):
            if row.call.cancelled or row.accept(token, self._vocabulary):
                slot = self._rows.index(row)
                if not row.call.cancelled:
                    self._remember(row, slot)
                self._leave(slot)

    def _remember(self, row: Row, slot: int) -> None:
        keys, values = self._slots.keys[:, slot], self._slots.values[:, slot]
        self._store.insert(self._root, row.tokens[: row.cached], keys, values)

    def _promote(self, slot: int) -> None:
        """Make a row decode: exchange it with the first row that does not."""
        target = self._decoding
        row, other = self._rows[slot], self._rows[target]
        self._slots.swap(slot, target, max(row.cached, other.cached))
        self._rows[slot], self._rows[target] = other, row
        self._decoding += 1

    def _leave(self, slot: int) -> None:
        """Free a slot; the last decoding row and the last row move up so that no hole stays."""
        if slot < self._decoding:
            self._decoding -= 1
            self._fill(slot, self._decoding)
            slot = self._decoding
        self._fill(slot, len(self._rows) - 1)
        self._rows.pop()

    def _fill(self, hole: int, source: int) -> None:
        if hole != source:
            self._slots.move(source, hole, self._rows[source].cached)
            self._rows[hole] = self._rows[source]
