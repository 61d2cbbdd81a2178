"""The command `penstock simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import UserError
from penstock.files import say, write_for


def simulate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...",
            help="A TOML file and settings. Without a file: the config of --profile's run, or the demo.",
        ),
    ] = None,
    profile: Annotated[
        str,
        typer.Option(help="A run whose lengths and times are used, or a file of --save-profile."),
    ] = "",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Updates to simulate; default: train.steps.")
    ] = None,
    nodes: Annotated[
        str,
        typer.Option(help="GPUs to split between engines and trainer: NODESxGPUS, such as 2x8."),
    ] = "",
    vary: Annotated[
        list[str] | None,
        typer.Option(help="Settings to try instead of the usual ones: KEY=VALUE,VALUE."),
    ] = None,
    kind_speed: Annotated[
        list[float] | None,
        typer.Option(
            help="Speed of the engines of each launch.producer_kinds, relative to the others; once for each."
        ),
    ] = None,
    check: Annotated[
        str, typer.Option(help="A real run to predict, from --profile or from its own profile.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="SVG to write: tokens/s and idle shares over the splits.")
    ] = None,
    save_profile: Annotated[
        Path | None, typer.Option(help="File to write the profile to, for use without its run.")
    ] = None,
) -> None:
    """Predict a run: the real control plane on virtual time, with the lengths and times of another run."""
    from penstock.run.twin import fit, plan
    from penstock.run.twin.profile import Profile, assumed

    source = profile or check
    known: Profile | None = fit.read_profile(source) if source else None
    if check:
        assert known is not None
        options = {  # it simulates the run as it was
            "settings": arguments,
            "--steps": steps,
            "--nodes": nodes,
            "--vary": vary,
            "--kind-speed": kind_speed,
            "--picture": picture,
        }
        if ignored := [name for name, value in options.items() if value]:
            raise UserError(
                f"--check: got {', '.join(ignored)} too, allowed: --profile, --json and --save-profile"
            )
        for line in plan.check_lines(check, source, plan.check(check, known), as_json=as_json):
            say(line)
        if save_profile is not None:
            write_for("simulate", save_profile, known.to_json())
            say(f"profile: {save_profile}", error=True)
        return
    config = _config(arguments or [], profile)
    known = known or assumed(config)
    if kind_speed:
        known.set_speeds(config, kind_speed)
    gpus = plan.parse_nodes(nodes) if nodes else 0
    answers = plan.make_plan(config, known, steps=steps, gpus=gpus, variations=vary or None)
    for line in [plan.json_of(known, answers)] if as_json else plan.text_of(known, answers):
        say(line)
    if picture is not None:
        write_for("simulate", picture, plan.picture(answers))
        say(f"picture: {picture}", error=True)
    if save_profile is not None:
        write_for("simulate", save_profile, known.to_json())
        say(f"profile: {save_profile}", error=True)


def _config(arguments: list[str], profile: str):  # type: ignore[no-untyped-def]
    """The config of a file, else that of the profile's run, with the settings laid over it."""
    from penstock.config.source import load_config, split_words, with_overrides
    from penstock.store.run_folder import find

    file, settings = split_words(arguments)
    if file is None and profile and Path(profile).suffix != ".json":
        return with_overrides(find(profile).config(), settings)
    return load_config(file, settings).config
