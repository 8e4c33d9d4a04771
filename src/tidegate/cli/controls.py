"""``gate status|explain|sign|freeze|unfreeze|trust|...`` and ``releases anchor``: what people do to the gate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.context import settings_of
from tidegate.cli.gate import gate
from tidegate.cli.output import boundary, emit, say
from tidegate.cli.releases import releases
from tidegate.cli.running import run_until_interrupted

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Key = Annotated[Path | None, typer.Option("--key", help="Private key that signs (default: the operator's).")]
Reason = Annotated[str, typer.Option("--reason", help="Goes into the audit log.")]


def register(app: typer.Typer) -> None:
    """Add the group, with this module's commands and those of :mod:`tidegate.cli.gate`."""
    app.add_typer(gate, name="gate")


@gate.command("status")
def status(context: typer.Context, as_json: Json = False) -> None:
    """Window, sealed set, policy in force, freeze, people and what waits for signatures."""
    from tidegate.app.oversight import gate_status

    with boundary():
        emit(gate_status(settings_of(context)), as_json=as_json)


@gate.command("explain")
def explain(
    context: typer.Context,
    candidate: Annotated[str, typer.Argument(help="Candidate id, as 'candidates list' shows it.")],
    as_json: Json = False,
) -> None:
    """What was measured of a candidate, against which bounds, and what would have passed."""
    from tidegate.app.explaining import explain as looks_of

    with boundary():
        looks = looks_of(settings_of(context), candidate)
        if as_json:
            emit(looks, as_json=True)
            return
        for look in looks:
            emit({name: value for name, value in look.items() if name != "conditions"}, as_json=False)
            for condition in look.get("conditions", ()):
                mark = "holds" if condition["holds"] else "FAILS"
                print(f"  {mark}  {condition['condition']}: {condition['measured']}; needed: {condition['bound']}")
                for name in ("would_have_passed", "pairs_for_this_gain"):
                    if name in condition:
                        print(f"         {name.replace('_', ' ')}: {condition[name]}")
            print()


@gate.command("sign")
def sign(
    context: typer.Context,
    policy: Annotated[Path, typer.Argument(help="Policy file that is looser than the one in force.")],
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Sign a looser policy; with the second person's signature it takes effect in the next window."""
    from tidegate.app.oversight import sign_policy_file

    with boundary():
        emit(sign_policy_file(settings_of(context), policy, key), as_json=as_json)


@gate.command("freeze")
def freeze(context: typer.Context, reason: Reason, as_json: Json = False) -> None:
    """Stop learning at once; serving goes on."""
    from tidegate.app.oversight import freeze_learning

    with boundary():
        emit(freeze_learning(settings_of(context), reason), as_json=as_json)


@gate.command("unfreeze")
def unfreeze(context: typer.Context, key: Key = None, as_json: Json = False) -> None:
    """Sign that learning may go on: one person where a person froze it, two where a trigger did."""
    from tidegate.app.oversight import unfreeze_learning

    with boundary():
        emit(unfreeze_learning(settings_of(context), key), as_json=as_json)


@gate.command("keygen")
def keygen(
    file: Annotated[Path, typer.Argument(help="Where the private key goes; it must not exist.")], as_json: Json = False
) -> None:
    """Make a person's key and print the introduction that 'gate trust' takes."""
    from tidegate.gate.keys import KeyPair
    from tidegate.gate.statements import introduction

    with boundary():
        emit({"file": str(file), "introduction": introduction(KeyPair.create(file))}, as_json=as_json)


@gate.command("trust")
def trust(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The person's name.")],
    introduction: Annotated[str, typer.Argument(help="What 'gate keygen' printed.")],
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Introduce a person whose signatures count; a third person takes the signatures of two."""
    from tidegate.app.oversight import trust_person

    with boundary():
        emit(trust_person(settings_of(context), name, introduction, key), as_json=as_json)


@gate.command("rotate-key")
def rotate_key(
    context: typer.Context,
    revoke: Annotated[bool, typer.Option("--revoke", help="Certificates of the old key stop counting.")] = False,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Give the gate a new key; the open sealed set closes."""
    from tidegate.app.oversight import rotate_key as rotated

    with boundary():
        emit(rotated(settings_of(context), key, revoke=revoke), as_json=as_json)


@gate.command("close-epoch")
def close_epoch(context: typer.Context, reason: Reason, as_json: Json = False) -> None:
    """Look no further at the open sealed set, for instance because its grading changed."""
    from tidegate.app.oversight import close_open_epoch

    with boundary():
        emit(close_open_epoch(settings_of(context), reason), as_json=as_json)


@gate.command("review")
def review(
    context: typer.Context,
    out: Annotated[Path | None, typer.Option("--out", help="Write items for a person to judge to this file.")] = None,
    take: Annotated[Path | None, typer.Option("--take", help="Record the judgements that this file holds.")] = None,
    epoch: Annotated[str | None, typer.Option("--epoch", help="Epoch of --out (default: the last).")] = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Let a person audit the verifier: write items, fill in "agree", take them back.

    Too many disagreements invalidate the verifier and every certificate that rests on it.
    """
    from tidegate.app.oversight import review_epoch

    with boundary():
        emit(run_until_interrupted(review_epoch(settings_of(context), out, take, epoch, key)), as_json=as_json)


@gate.command("invalidate")
def invalidate(
    context: typer.Context,
    verifier: Annotated[str, typer.Argument(help="Name of the verifier.")],
    version: Annotated[str, typer.Argument(help="Its version.")],
    reason: Reason,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Believe a verifier no more: certificates that rest on it are void, the anchor is served again."""
    from tidegate.app.oversight import invalidate

    with boundary():
        result = run_until_interrupted(invalidate(settings_of(context), verifier, version, reason, key))
        emit(result, as_json=as_json)


@gate.command("break-glass")
def break_glass(
    context: typer.Context,
    candidate: Annotated[str, typer.Argument(help="Candidate that no gate certified.")],
    reason: Reason,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Serve a candidate for 24 hours without the gate. Logged; nothing is promoted before the anchor is reviewed."""
    from tidegate.app.oversight import serve_in_emergency

    with boundary():
        result = run_until_interrupted(serve_in_emergency(settings_of(context), candidate, reason, key))
        say(f"serving {result['release']} until {result['expires_at']}")
        emit(result, as_json=as_json)


@releases.command("anchor")
def anchor(
    context: typer.Context,
    release: Annotated[str, typer.Argument(help="Release id, as 'releases list' shows it.")],
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Sign a release as the anchor that every challenger is held to."""
    from tidegate.app.oversight import sign_anchor

    with boundary():
        emit(sign_anchor(settings_of(context), release, key), as_json=as_json)
