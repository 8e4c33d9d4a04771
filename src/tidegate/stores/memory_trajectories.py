"""The trajectory store over plain Python objects.

Records pass through the same codec as on disk, so that what comes back, and what is refused, is the same.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Any

from tidegate.core.errors import ConflictError, NotFoundError
from tidegate.core.types import Episode, Feedback, Interaction, JsonObject, Split, Verdict
from tidegate.stores import codec, rowmap, rules
from tidegate.stores.records import FeedbackState, Reward, Role


class MemoryTrajectoryStore:
    """Interactions and what was said about them."""

    def __init__(self, role: Role = "open") -> None:
        """Start empty, for the splits that ``role`` accepts."""
        self.role: Role = role
        self._lock = threading.RLock()
        self._interactions: dict[str, Interaction] = {}
        self._episodes: dict[str, list[Interaction]] = {}
        self._feedback: dict[str, tuple[Feedback, FeedbackState]] = {}
        self._verdicts: dict[tuple[str, str, str], Verdict] = {}
        self._rewards: dict[tuple[str, str, str, str], Reward] = {}
        self._manifests: dict[str, str] = {}

    def append_interactions(self, interactions: Sequence[Interaction]) -> int:
        """Keep a batch, all or nothing; known ids are left as they are. Returns how many were new."""
        with self._lock:
            new: dict[str, Interaction] = {}
            owners: dict[str, dict[str, Any]] = {}
            for interaction in interactions:
                rules.check_split(self.role, interaction)
                row = codec.interaction_row(interaction)
                if interaction.id in self._interactions or interaction.id in new:
                    continue
                group = self._episodes.get(interaction.episode_id, [interaction])
                owner = owners.setdefault(interaction.episode_id, codec.episode_row(group[0]))
                rules.check_same_episode(owner, interaction)
                new[interaction.id] = codec.interaction_of({**row, **owner, "id": interaction.id})
            for interaction in new.values():
                self._interactions[interaction.id] = interaction
                self._episodes.setdefault(interaction.episode_id, []).append(interaction)
            for feedback, state in list(self._feedback.values()):
                if state is FeedbackState.UNMATCHED and self.holds(feedback):
                    self._feedback[feedback.id] = (feedback, FeedbackState.MATCHED)
            return len(new)

    def get_interaction(self, interaction_id: str) -> Interaction | None:
        """One record, or None."""
        with self._lock:
            return self._interactions.get(interaction_id)

    def list_episodes(
        self,
        *,
        splits: Sequence[Split],
        after: float = 0.0,
        until: float | None = None,
        active: bool = False,
        releases: Collection[str] | None = None,
        latest: int | None = None,
    ) -> list[Episode]:
        """Episodes whose first interaction lies in (after, until], ordered by that time, then id.

        With ``active`` those with any interaction in there; with ``releases`` those that one of them answered in; with
        ``latest`` at most so many of these, the last.
        """
        with self._lock:
            episodes = [self._episode(id_) for id_ in self._episodes]
        chosen = [
            episode
            for episode in episodes
            if episode.split in splits
            and any(
                call.created_at > after and (until is None or call.created_at <= until)
                for call in (episode.interactions if active else episode.interactions[:1])
            )
            and (releases is None or any(call.release_id in releases for call in episode.interactions))
        ]
        ordered = sorted(chosen, key=lambda episode: (episode.interactions[0].created_at, episode.id))
        return ordered if latest is None else ordered[max(0, len(ordered) - latest) :]

    def append_feedback(self, feedback: Feedback) -> bool:
        """Keep feedback, matched or not; False when its id is known already."""
        rules.check_feedback(feedback)
        row = rowmap.feedback_row(feedback)
        with self._lock:
            if feedback.id in self._feedback:
                return False
            state = FeedbackState.MATCHED if self.holds(feedback) else FeedbackState.UNMATCHED
            self._feedback[feedback.id] = (rowmap.feedback_of(row), state)
            return True

    def list_feedback(self, *, metric_name: str | None = None) -> list[Feedback]:
        """All feedback, oldest first, matched or not."""
        wanted = (FeedbackState.MATCHED, FeedbackState.UNMATCHED)
        return [f for f in self._sorted_feedback(wanted) if metric_name in (None, f.metric_name)]

    def unmatched_feedback(self, about: Sequence[Interaction] | None = None) -> list[Feedback]:
        """Feedback that waits for the record that it names, oldest first; of ``about`` only if given."""
        found = self._sorted_feedback((FeedbackState.UNMATCHED,))
        if about is None:
            return found
        named = {i.id for i in about}, {i.episode_id for i in about}
        return [f for f in found if f.interaction_id in named[0] or f.episode_id in named[1]]

    def knows_feedback(self, feedback_id: str) -> bool:
        """Whether this id was ever appended here."""
        with self._lock:
            return feedback_id in self._feedback

    def holds(self, feedback: Feedback) -> bool:
        """Whether the interaction or episode that ``feedback`` names is here."""
        with self._lock:
            return feedback.interaction_id in self._interactions or feedback.episode_id in self._episodes

    def mark_feedback_moved(self, feedback_id: str) -> None:
        """Keep the id but no longer list it."""
        with self._lock:
            if feedback_id in self._feedback:
                self._feedback[feedback_id] = (self._feedback[feedback_id][0], FeedbackState.MOVED)

    def append_verdicts(self, verdicts: Sequence[Verdict]) -> int:
        """Keep verdicts and the rewards that follow from them, all or nothing. Returns how many were new."""
        rows = [rowmap.verdict_row(verdict) for verdict in verdicts]
        with self._lock:
            new: dict[tuple[str, str, str], Verdict] = {}
            for verdict, row in zip(verdicts, rows, strict=True):
                key = (verdict.episode_id, verdict.verifier, verdict.version)
                if key in self._verdicts or key in new:
                    continue
                if verdict.episode_id not in self._episodes:
                    raise NotFoundError(f"verdict on episode {verdict.episode_id!r}: it is not in this database")
                new[key] = rowmap.verdict_of(row)
            for key, verdict in new.items():
                self._verdicts[key] = verdict
                main = [i.id for i in self._episode(verdict.episode_id).interactions if i.main_line]
                reward = rules.last_turn_reward(verdict, main[-1] if main else None)
                if reward is not None:
                    self.add_reward(reward)
            return len(new)

    def list_verdicts(self) -> list[Verdict]:
        """All verdicts, oldest first."""
        with self._lock:
            verdicts = list(self._verdicts.values())
        return sorted(verdicts, key=lambda v: (v.created_at, v.episode_id, v.verifier, v.version))

    def add_reward(self, reward: Reward) -> bool:
        """Keep a reward; False when (interaction, verifier, version, policy) has one."""
        row = rowmap.reward_row(reward)
        key = (reward.interaction_id, reward.verifier, reward.version, reward.policy)
        with self._lock:
            if key in self._rewards:
                return False
            if reward.interaction_id not in self._interactions:
                raise NotFoundError(f"reward for interaction {reward.interaction_id!r}: it is not in this database")
            self._rewards[key] = Reward(**row)
            return True

    def list_rewards(self) -> list[Reward]:
        """All rewards, oldest first."""
        with self._lock:
            found = list(self._rewards.items())
        found.sort(key=lambda item: (item[1].created_at, item[0]))
        return [reward for _, reward in found]

    def add_manifest(self, manifest_hash: str, body: JsonObject, *, time: float) -> bool:
        """Keep a batch manifest under its hash; False when it is known."""
        del time
        text = codec.to_json(dict(body), f"manifest {manifest_hash!r}")
        with self._lock:
            known = self._manifests.get(manifest_hash)
            if known is not None and known != text:
                raise ConflictError(f"manifest {manifest_hash!r} is known with other content; a hash names one content")
            self._manifests[manifest_hash] = text
        return known is None

    def get_manifest(self, manifest_hash: str) -> JsonObject | None:
        """A batch manifest, or None."""
        with self._lock:
            text = self._manifests.get(manifest_hash)
        return None if text is None else codec.from_json(text)

    def _episode(self, episode_id: str) -> Episode:
        ordered = tuple(sorted(self._episodes[episode_id], key=lambda i: (i.created_at, i.id)))
        return Episode(id=episode_id, user_key=ordered[0].user_key, split=ordered[0].split, interactions=ordered)

    def _sorted_feedback(self, states: Sequence[FeedbackState]) -> list[Feedback]:
        with self._lock:
            found = [feedback for feedback, state in self._feedback.values() if state in states]
        return sorted(found, key=lambda feedback: (feedback.created_at, feedback.id))
