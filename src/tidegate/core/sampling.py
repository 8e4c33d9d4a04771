"""Decoding settings, and what they say of the distribution that an answer was drawn from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Decoding settings of one call.

    ``temperature`` >= 0 (0 is greedy), ``top_p`` in (0, 1], ``top_k`` >= 0 (0 is off), ``max_tokens`` >= 1,
    ``n`` >= 1, penalties in [-2, 2], ``top_logprobs`` in [0, 20]. ``json_schema``: text of a JSON Schema that the
    answer must match, None for free text; properties are written in its order. ``tool_choice``: what the answer must
    call: an offered tool's name (once) or :data:`tidegate.core.chat.ANY_TOOL`; None where the model chooses.
    ``parallel_tool_calls`` False ends it after its first call. ``distribution_known`` is of records
    only: False where these settings and the recorded log-probabilities may not describe what was sampled from, because
    an upstream's own defaults or fields unknown to us took part; what the client left out then says nothing. ``search``
    of records: how one of ``n`` choices was picked for the client (``best-of-8``), None where it got all of them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0
    json_schema: str | None = None
    tool_choice: str | None = None
    parallel_tool_calls: bool = True
    distribution_known: bool = True
    search: str | None = None

    @property
    def constrained(self) -> bool:
        """Whether the answer was held to a form that the model might not have chosen."""
        return self.json_schema is not None or self.tool_choice is not None

    @property
    def unfiltered(self) -> bool:
        """Whether an answer is a draw from the model's own distribution, which its log-probabilities are of: known, and
        neither greedily nor with top-p, top-k, penalties, a schema or a call that is asked for, nor picked among
        several."""
        shaped = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.constrained
        filtered = self.top_p < 1.0 or self.top_k > 0 or self.search is not None
        return self.distribution_known and self.temperature > 0.0 and not filtered and not shaped
