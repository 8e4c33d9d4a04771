"""Each reason for which something does not train, demonstrations, and batches on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from curation_world import TASK, call, episode, reasons, run, said, shown, task_demonstration, verdict
from engine_fixtures import byte_tokenizer
from tidegate.core.chat import encode_prompt
from tidegate.core.errors import ConfigError
from tidegate.core.hashing import content_hash
from tidegate.core.strategy import strategy_cluster
from tidegate.core.types import Episode, Example, Feedback, FinishReason, Outcome, Split, Verdict
from tidegate.curation import Batch, read_batch, write_batch
from tidegate.training.examples import render_example

KNOWS_TOOLS = (
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
"""A chat template that renders tools itself."""
CUT_SHORT = replace(call("i").choices[0], finish_reason=FinishReason.CANCELLED)


def test_curation_a_verified_success_trains_on_its_sampled_tokens() -> None:
    batch = run([episode("e")], [verdict("e")])
    cluster = strategy_cluster((), "2")
    assert batch.examples == (
        Example(
            id="e",
            weight=1.0,
            source="episode",
            kind="sums",
            token_ids=(5, 6, 7, 2),
            loss_mask=(0, 0, 1, 1),
            logprobs=(0.0, 0.0, -0.5, -0.5),
            reward=1.0,
            group=content_hash({"tokens": [5, 6]}),
            cluster=cluster,
            sampled_at=1.0,
        ),
    )
    assert batch.manifest["items"] == [
        {
            "id": "e",
            "weight": 1.0,
            "reason": "kept",
            "kind": "sums",
            "source": "episode",
            "cluster": cluster,
            "reward": 1.0,
        }
    ]
    assert batch.counts == {"kept": 1}
    assert batch.fresh == 1


@pytest.mark.parametrize(
    ("made", "judged", "reason"),
    [
        (episode("e", call("i", consent=False)), [verdict("e")], "no_consent"),
        (episode("e", call("i"), call("j", consent=False, main_line=False)), [verdict("e")], "no_consent"),
        (episode("e", split=Split.DEV), [verdict("e")], "not_train"),
        (episode("e", split=Split.SEALED), [verdict("e")], "not_train"),
        (episode("e", call("i", split=Split.SEALED)), [verdict("e")], "not_train"),
        (episode("e", call("i", main_line=False)), [verdict("e")], "no_main_line"),
        (episode("e"), [], "no_verdict"),
        (episode("e"), [verdict("e", verifier="another")], "no_verdict"),
        (episode("e"), [verdict("e", outcome=Outcome.ABSTAIN)], "abstained"),
        (episode("e"), [verdict("e", 0.99)], "below_threshold"),
        (episode("e", call("i", tokens=())), [verdict("e")], "no_token_ids"),
        (episode("e", call("i", choices=(CUT_SHORT,))), [verdict("e")], "cancelled"),
        (episode("e", call("i", choices=(CUT_SHORT,)), call("j")), [verdict("e")], "cancelled"),
        (episode("e", call("i", created_at=-90 * 86_400.0)), [verdict("e")], "stale"),
        (episode("e", call("i", created_at=-90 * 86_400.0)), [], "no_verdict"),
        (episode("e", call("i", split=Split.DEV, consent=False)), [verdict("e")], "no_consent"),
    ],
)
def test_curation_every_reason_against_an_episode(made: Episode, judged: list[Verdict], reason: str) -> None:
    batch = run([made], judged)
    assert batch.examples == ()
    assert reasons(batch)["e"] == reason


def test_curation_side_calls_are_listed_and_not_trained() -> None:
    batch = run([episode("e", call("i"), call("side", main_line=False, tokens=(9, 9)))], [verdict("e")])
    assert reasons(batch) == {"e": "kept", "side": "side_call"}
    assert batch.examples[0].token_ids == (5, 6, 7, 2)


def test_curation_the_newest_verdict_of_the_tasks_verifier_decides() -> None:
    old, new = verdict("e", 1.0), verdict("e", 0.0, version="2", created_at=2.0)
    other = verdict("e", 1.0, verifier="another", created_at=3.0)
    assert reasons(run([episode("e")], [new, other, old])) == {"e": "below_threshold"}
    assert reasons(run([episode("e")], [verdict("e", 0.0), verdict("e", version="2", created_at=2.0)])) == {"e": "kept"}


def test_curation_without_a_task_every_verifier_must_agree() -> None:
    made = episode("e", call("i", task=None))
    assert reasons(run([made], [verdict("e"), verdict("e", 0.0, verifier="another")])) == {"e": "below_threshold"}
    assert reasons(run([made], [verdict("e"), verdict("e", verifier="another")])) == {"e": "kept"}


def test_curation_a_lower_threshold_lets_graded_successes_in() -> None:
    assert run([episode("e")], [verdict("e", 0.7)], settings={"success_threshold": 0.7}).fresh == 1


def test_curation_an_episode_is_as_old_as_its_last_main_line_call() -> None:
    old = -90 * 86_400.0
    calls = (call("i", created_at=old), call("j", created_at=1.0, prompt_token_ids=(5, 6, 7, 2, 8)))
    assert reasons(run([episode("e", *calls)], [verdict("e")])) == {"e": "kept"}
    assert reasons(run([episode("e", calls[0])], [verdict("e")], now=0.0)) == {"e": "kept"}
    side = replace(calls[1], main_line=False)
    assert reasons(run([episode("e", calls[0], side)], [verdict("e")])) == {"e": "stale", "j": "side_call"}


def test_curation_copies_users_and_budget_are_capped() -> None:
    copies = [episode(f"c{n}", user=f"u{n}") for n in range(5)]
    batch = run(copies, [verdict(e.id) for e in copies], settings={"max_per_prompt": 2})
    assert batch.counts == {"duplicate": 3, "kept": 2}
    own = [episode(f"o{n}", said(f"i{n}", f"It is {n}.")) for n in range(5)]
    batch = run(own, [verdict(e.id) for e in own], settings={"max_per_user": 2})
    assert batch.counts == {"kept": 2, "user_cap": 3}
    many = [episode(f"m{n}", said(f"i{n}", f"It is {n}."), user=f"u{n}") for n in range(5)]
    batch = run(many, [verdict(e.id) for e in many], settings={"max_examples": 2, "min_fresh": 1})
    assert batch.counts == {"kept": 2, "over_budget": 3}


def test_curation_the_seed_decides_which_examples_stay() -> None:
    many = [episode(f"m{n}", said(f"i{n}", f"It is {n}."), user=f"u{n}") for n in range(40)]
    judged = [verdict(e.id) for e in many]
    few = {"max_examples": 5, "min_fresh": 1}
    kept = [{e.id for e in run(many, judged, seed=seed, settings=few).examples} for seed in (0, 0, 1)]
    assert kept[0] == kept[1] != kept[2]


# --- demonstrations -----------------------------------------------------------------------------------------


def test_curation_a_demonstration_on_a_failed_episode_trains_its_assistant_messages() -> None:
    answer = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]
    batch = run([episode("e")], [verdict("e", 0.0)], [shown("f", answer)])
    assert batch.examples == (
        Example(
            id="f",
            weight=1.0,
            source="feedback",
            kind="sums",
            messages=(*TASK.messages, *answer),
            trained_messages=(1, 3),
        ),
    )
    assert reasons(batch) == {"e": "below_threshold", "f": "kept"}
    assert batch.fresh == 0


def test_curation_a_demonstration_may_name_a_call_of_the_episode() -> None:
    batch = run([episode("e")], [], [shown("f", episode_id=None, interaction_id="i-e")])
    assert reasons(batch)["f"] == "kept"


@pytest.mark.parametrize(
    ("made", "said", "reason"),
    [
        (episode("e"), shown("f", episode_id="nobody's"), "unknown_episode"),
        (episode("e", split=Split.SEALED), shown("f"), "not_train"),
        (episode("e", split=Split.DEV), shown("f"), "not_train"),
        (episode("e", call("i", consent=False)), shown("f"), "no_consent"),
        (episode("e", call("i", main_line=False)), shown("f"), "no_main_line"),
        (episode("e"), shown("f", [{"role": "assistant", "content": "3"}]), "wrong_demonstration"),
        (episode("e", call("i", task=replace(TASK, verifier="x"))), shown("f"), "unverifiable_demonstration"),
        (episode("e", call("i", task=replace(TASK, reference=2))), shown("f"), "unverifiable_demonstration"),
        *(
            (episode("e"), shown("f", value), "malformed_demonstration")
            for value in (
                "2",
                [],
                [{"role": "user", "content": "2"}],
                [{"role": "assistant", "content": ""}],
                [{"role": "assistant", "content": "2"}, {"role": "tool", "content": "2"}],
                [{"role": "assistant", "content": [{"type": "image_url"}]}],
                [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}],
                [{"role": "assistant", "content": "", "tool_calls": [{}]}],
                [{"role": "system", "content": "2"}],
            )
        ),
    ],
)
def test_curation_every_reason_against_a_demonstration(made: Episode, said: Feedback, reason: str) -> None:
    batch = run([made], [], [said])
    assert batch.examples == ()
    assert reasons(batch)["f"] == reason


def test_curation_without_a_task_a_demonstration_is_taken_at_its_word() -> None:
    batch = run([episode("e", call("i", task=None))], [], [shown("f", [{"role": "assistant", "content": "3"}])])
    assert [example.messages[-1]["content"] for example in batch.examples] == ["3"]


def test_curation_other_feedback_is_no_item() -> None:
    assert run([], [], [shown("f", True, metric_name="thumbs")]).manifest["items"] == []


def test_curation_demonstrations_are_capped_by_prompt_and_user() -> None:
    said = [shown(f"f{n}") for n in range(4)]
    batch = run([episode("e")], [verdict("e", 0.0)], said, settings={"max_per_prompt": 2})
    assert batch.counts == {"below_threshold": 1, "kept": 2, "prompt_cap": 2}
    batch = run([episode("e")], [verdict("e")], said, settings={"max_per_prompt": 9, "max_per_user": 3})
    assert batch.counts == {"kept": 3, "user_cap": 2}
    assert batch.fresh == 1


def test_curation_given_demonstrations_come_first_and_once() -> None:
    given = task_demonstration(TASK, ({"role": "assistant", "content": "2"},))
    assert given.id == "demonstration/t"
    batch = run(
        [episode("e")],
        [verdict("e")],
        [shown("f")],
        demonstrations=[given, given],
        settings={"max_per_prompt": 1, "max_examples": 1, "min_fresh": 1},
    )
    assert {example.id for example in batch.examples} == {"e", "demonstration/t"}
    assert batch.counts == {"kept": 2, "prompt_cap": 1, "repeated_id": 1}


def test_curation_assistant_turns_of_the_opening_are_not_trained() -> None:
    opening = ({"role": "assistant", "content": "Hello."}, *TASK.messages)
    example = task_demonstration(replace(TASK, messages=opening), ({"role": "assistant", "content": "2"},))
    assert example.trained_messages == (2,)


def test_curation_the_order_of_given_demonstrations_is_irrelevant() -> None:
    given = [task_demonstration(replace(TASK, id=f"t{n}"), ({"role": "assistant", "content": "2"},)) for n in range(6)]
    given.append(replace(given[0], weight=0.5))
    first, second = (
        run([], [], demonstrations=order, settings={"max_per_prompt": 2}) for order in (given, given[::-1])
    )
    assert first == second
    assert first.counts == {"kept": 2, "prompt_cap": 4, "repeated_id": 1}


# --- batches on disk ----------------------------------------------------------------------------------------


@pytest.fixture
def batch() -> Batch:
    given = task_demonstration(TASK, ({"role": "assistant", "content": "2 \u2028 \u00e9"},))
    return run([episode("e"), episode("x", split=Split.DEV)], [verdict("e")], demonstrations=[given])


def test_curation_a_batch_reads_back_as_written(batch: Batch, tmp_path: Path) -> None:
    path = write_batch(batch, tmp_path / "batches")
    assert path == tmp_path / "batches" / batch.hash
    assert read_batch(path) == batch
    assert write_batch(batch, tmp_path / "batches") == path
    assert sorted(file.name for file in path.iterdir()) == ["examples.jsonl", "manifest.json"]
    assert [file.name for file in (tmp_path / "batches").iterdir()] == [batch.hash]


@pytest.mark.parametrize("template", [byte_tokenizer().chat_template, KNOWS_TOOLS])
def test_curation_a_batch_renders_prompts_in_the_order_of_keys_that_serving_rendered(
    tmp_path: Path, template: str
) -> None:
    """Templates write tools and the arguments of calls key by key."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    properties = {name: {"type": "string", "description": name} for name in ("b", "a")}
    tool = {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": properties}},
    }
    called = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"b": 1, "a": 2}'}}
    messages = (
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    )
    task = replace(TASK, messages=messages, tools=(tool,))
    given = task_demonstration(task, ({"role": "assistant", "content": "2"},))
    read = read_batch(write_batch(run([], [], demonstrations=[given]), tmp_path)).examples[0]
    expected = encode_prompt(tokenizer, messages, (tool,))
    assert encode_prompt(tokenizer, read.messages[:3], read.tools) == expected
    (sequence,) = render_example(tokenizer, read)
    assert sequence.token_ids[: len(expected)] == expected


def test_curation_a_demonstration_with_half_a_surrogate_pair_is_written(tmp_path: Path) -> None:
    given = replace(task_demonstration(TASK, ({"role": "assistant", "content": "2"},)), kind="sums")
    given = replace(given, messages=(*given.messages[:-1], {"role": "assistant", "content": "\ud800"}))
    batch = run([], [], demonstrations=[given])
    assert read_batch(write_batch(batch, tmp_path)) == batch


def test_curation_a_changed_or_damaged_batch_is_refused(batch: Batch, tmp_path: Path) -> None:
    def damaged(name: str, change: bytes | None) -> Path:
        path = write_batch(batch, tmp_path / f"{name}-{change!r}")
        if change is None:
            (path / name).unlink()
        else:
            (path / name).write_bytes((path / name).read_bytes() + change)
        return path

    with pytest.raises(ConfigError, match=r"examples\.jsonl hashes to"):
        read_batch(damaged("examples.jsonl", b"\n"))
    with pytest.raises(ConfigError, match=r"examples\.jsonl cannot be read"):
        read_batch(damaged("examples.jsonl", None))
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        read_batch(damaged("manifest.json", b"{"))
    with pytest.raises(ConfigError, match="does not exist"):
        read_batch(damaged("manifest.json", None))
    path = write_batch(batch, tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"seed": 9}))
    with pytest.raises(ConfigError, match="its manifest hashes to"):
        read_batch(path)
    (path / "manifest.json").write_text(json.dumps(manifest | {"schema": "tidegate.batch/0"}))
    with pytest.raises(ConfigError, match=r"'tidegate\.batch/0'; 'tidegate\.batch/3' is read here"):
        read_batch(path)


def test_what_trained_something_that_was_rolled_back_never_trains_again() -> None:
    episodes, verdicts = [episode("bad"), episode("e", user="v")], [verdict("bad"), verdict("e")]
    feedback = [shown("told-bad"), shown("told", [{"role": "assistant", "content": "2", "name": "other"}])]
    batch = run(episodes, verdicts, feedback, quarantined={"bad", "told-bad"})
    found = reasons(batch)
    assert (found["bad"], found["told-bad"], found["e"]) == ("quarantined", "quarantined", "kept")
    assert {example.id for example in batch.examples}.isdisjoint({"bad", "told-bad"})
    assert batch.counts["quarantined"] == 2
