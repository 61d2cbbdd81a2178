"""The command line: parse arguments, call one function, print results, turn errors into exit codes.

Exit codes: 0 success; 1 the run or the check failed; 2 the input is wrong; 130 stopped by Ctrl-C.
Commands import what they need themselves, so that a wrong argument costs no import of torch.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from pydantic import ValidationError
from rich.text import Text

from penstock import __version__
from penstock.config import Config, Section
from penstock.config.mistakes import explain, of_setting
from penstock.config.source import load_config, parse_settings, split_words
from penstock.errors import PenstockError, StopRequested, UserError
from penstock.files import console, pasted, say
from penstock.inspection.dashboard.command import dashboard
from penstock.run.model_commands import Trust, chat, evaluate, generate
from penstock.run.twin.command import simulate
from penstock.service.audit import audit_service, replay_service, service_folder
from penstock.service.command import serve

if TYPE_CHECKING:
    from penstock.store.run_folder import RunFolder

app = typer.Typer(
    name="penstock",
    help="""Post-train language models with reinforcement learning from verifiable rewards.

Without a config, `penstock train` runs a demo on this machine's CPU in about a minute.""",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...",
        help="A TOML file and settings such as train.lr=1e-5. Without a file: the built-in demo.",
    ),
]


def _run_names(incomplete: str) -> list[str]:
    """Complete the name of a run in runs/; the shell itself completes paths."""
    return sorted(path.parent.name for path in Path("runs").glob(f"{incomplete}*/journal.db"))


Run = Annotated[
    str,
    typer.Argument(help="A run folder, or its name in runs/.", autocompletion=_run_names),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings, such as train.lr=1e-5."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _trusted_config(
    arguments: list[str] | None, *, trust: bool = False, with_tasks: bool = True
) -> Config:
    """The config of a command that may execute what it names."""
    from penstock.store.trust import load_trusted

    path, overrides = split_words(arguments or [])
    return load_trusted(path, overrides, trust=trust, with_tasks=with_tasks)


def _folder(run: str) -> RunFolder:
    from penstock.store.run_folder import find

    return find(run)


def _show_version(value: bool) -> None:
    if value:
        say(f"penstock {__version__}")
        raise typer.Exit


@app.command(rich_help_panel="Look")
def version(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="With what a bug report needs.")
    ] = False,
) -> None:
    """Print the version; with --verbose also libraries, devices, kernels and the sandbox's level."""
    from penstock.inspection.environment import environment_lines

    say(f"penstock {__version__}")
    for line in environment_lines() if verbose else ():
        say(line)


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Declare the options that come before a command."""


@app.command(rich_help_panel="Run")
def train(arguments: Arguments = None, trust: Trust = False) -> None:
    """Train a policy. Without a config: the demo, on this machine's CPU."""
    if sys.stderr.isatty():  # a large dataset takes a while to check
        say("checking the config and the data", error=True)
    settings = _trusted_config(arguments, trust=trust)
    from penstock.run import entry

    entry.train(settings)


@app.command(rich_help_panel="Run")
def sft(arguments: Arguments = None, trust: Trust = False) -> None:
    """Imitate the answers in the data (supervised fine-tuning), with all that `train` has."""
    train([*(arguments or []), "algorithm.name=sft"], trust)


@app.command(rich_help_panel="Run")
def resume(
    run: Run,
    overrides: Overrides = None,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="Continue with data or a tokenizer of other content than before.",
        ),
    ] = False,
    trust: Trust = False,
) -> None:
    """Continue a run after a stop or a crash: load the newest checkpoint, redo the journalled steps."""
    from penstock.run import entry

    entry.resume(_folder(run), overrides or [], accept_changes=accept_changes, trusted=trust)


@app.command(rich_help_panel="Run")
def replay(
    run: Run,
    overrides: Overrides = None,
    to: Annotated[
        int | None, typer.Option(min=1, help="Last step to recompute or to train on.")
    ] = None,
    algo: Annotated[str | None, typer.Option(help="Fork the run with this algorithm.")] = None,
    trust: Trust = False,
) -> None:
    """Recompute a run from its journal and compare every digest; exit 1 if one differs.

    With --algo or KEY=VALUE: make a new run that trains on the recorded rollouts and generates nothing.
    """
    from penstock.run.session import replay_run

    if (service := service_folder(run)) is not None:
        replay_service(service, trusted=trust)
        return
    words = overrides or []
    replay_run(_folder(run), to_step=to, algorithm=algo, overrides=words, trusted=trust)


@app.command(rich_help_panel="Run")
def scale(
    run: Run,
    setting: Annotated[
        str, typer.Argument(metavar="producers=N", help="The new number of engines.")
    ],
) -> None:
    """Change the number of engines of a run that is under way."""
    from penstock.workers.control import scale_run

    say(scale_run(_folder(run).path, setting))


@app.command(rich_help_panel="Look")
def audit(
    run: Run,
    json_out: Json = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="also read every file of the kept checkpoints")
    ] = False,
) -> None:
    """Check from the journal that nothing was lost, trained twice or too stale; exit 1 if it was."""
    from penstock.inspection.audit import audit_run

    if (service := service_folder(run)) is not None:
        raise typer.Exit(audit_service(service, as_json=json_out))
    raise typer.Exit(audit_run(_folder(run), as_json=json_out, deep=deep))


@app.command(rich_help_panel="Look")
def runs(
    folder: Annotated[Path, typer.Argument(help="The folder that holds the runs.")] = Path("runs"),
    json_out: Json = False,
) -> None:
    """List the runs of a folder: how far each is, what it reached, how many findings it has."""
    from penstock.inspection.record import list_runs, print_runs

    print_runs(list_runs(folder), console(), as_json=json_out)


@app.command(rich_help_panel="Run")
def rm(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run folders.", autocompletion=_run_names),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove runs with their journals and checkpoints; one that is under way is refused."""
    from penstock.store.run_folder import delete
    from penstock.store.space import folder_bytes, size_text

    folders = [_folder(run) for run in runs]
    for folder in folders:
        size = size_text(folder_bytes(folder.path))
        if not yes:
            typer.confirm(f"remove {folder.path} ({size})?", abort=True, err=True)
        delete(folder)
        say(f"removed {folder.path} ({size})")


@app.command(rich_help_panel="Look")
def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="A run folder, or its name in runs/.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another run.")],
    json_out: Json = False,
) -> None:
    """Compare two runs prompt by prompt: which is better, by how much, with a 95 % interval."""
    from penstock.inspection.compare import compare as compared
    from penstock.inspection.compare import print_comparison

    a, b = _folder(first), _folder(second)
    print_comparison(a, b, compared(a, b), console(), as_json=json_out)


@app.command(rich_help_panel="Look")
def doctor(
    run: Run,
    json_out: Json = False,
) -> None:
    """Print what is wrong with a run, how it shows and which setting to change; exit 1 if anything is."""
    from penstock.inspection.summary import print_findings

    raise typer.Exit(print_findings(_folder(run), console(), as_json=json_out))


@app.command(rich_help_panel="Run")
def backup(
    run: Run,
    target: Annotated[
        Path | None,
        typer.Argument(
            help="The new folder; default: beside the run, named after it and the time."
        ),
    ] = None,
) -> None:
    """Copy a run, also one that is under way: its journal, newest checkpoint, settings and logs."""
    from penstock.inspection.backup import back_up

    say(back_up(_folder(run), target))


@app.command(rich_help_panel="Run")
def export(
    run: Run,
    to: Annotated[Path, typer.Option(help="The new folder.")],
    step: Annotated[
        str | None,
        typer.Option(metavar="N|best", help="The step of a checkpoint; best: by its evaluation."),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the low-rank adapters, as peft loads them.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="Upload the folder to the Hugging Face hub."),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Make a new hub repository public; default: private.")
    ] = False,
) -> None:
    """Write a run's model, by default the newest, its tokenizer and a model card made from the journal to a folder."""
    from penstock.inspection.export import export_run, push_to_hub

    folder = export_run(_folder(run), to, adapter=adapter, step=step)
    say(folder)
    if push is not None:
        say(push_to_hub(folder, push, public=public))


@app.command(rich_help_panel="Look")
def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run folders; several are drawn over each other."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file; default: RUN/report.html.")
    ] = None,
) -> None:
    """Write the dashboard's page of these runs as one HTML file: curves, samples, timeline, settings."""
    from penstock.inspection.report import write_report

    say(write_report([_folder(run) for run in runs], out))


@app.command(rich_help_panel="Look")
def timeline(
    run: Run,
    out: Annotated[
        Path | None, typer.Option(help="The trace; default: RUN/timeline/trace.json.")
    ] = None,
) -> None:
    """Print the idle share of every worker; write a trace for Perfetto (ui.perfetto.dev)."""
    from penstock.inspection.timeline import summary_lines, write_trace

    folder = _folder(run)
    for line in summary_lines(folder):
        say(line)
    say(write_trace(folder, out))


@app.command(rich_help_panel="Look")
def rollouts(
    run: Run,
    where: Annotated[
        str | None, typer.Option(help="SQL condition on the journal's view `rollouts`.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Only samples that this step trained.")] = None,
    task: Annotated[str | None, typer.Option(help="Only of this task, or of eval/NAME.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most samples to print.")] = 20,
    json_out: Json = False,
) -> None:
    """Print samples: text, rewards, weight versions, the step that trained them or why none did."""
    from penstock.inspection.rollout_viewer import show_rollouts

    show_rollouts(_folder(run), where=where, step=step, task=task, limit=limit, as_json=json_out)


@app.command(rich_help_panel="Prepare")
def init(
    folder: Annotated[Path, typer.Argument(help="Folder for the files; it may exist.")] = Path(
        "my-run"
    ),
    model: Annotated[
        str | None, typer.Option(help="A model folder or hub name, or demo.", show_default="demo")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Your data; empty: a sample of sums is written.")
    ] = None,
    eval_data: Annotated[str | None, typer.Option(help="Other problems, to evaluate.")] = None,
    reward: Annotated[
        str | None, typer.Option(help="tags, boxed, or own: a reward.py.", show_default="tags")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest response.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Updates.", show_default="20")] = None,
) -> None:
    """Write a commented config, a reward and sample data that train as they are; ask what is not given."""
    from penstock.config.starter import DEMO_TOKENS, OTHER_TOKENS, write_starter

    asks = sys.stdin.isatty()

    def ask(question: str, answer: Any, default: Any) -> Any:
        if answer is not None or not asks:
            return default if answer is None else answer
        return typer.prompt(question, default=default, type=type(default), err=True)

    model = ask("Model: a folder, a hub name, or demo", model, "demo")
    data = ask("Data: a file with prompts and answers (empty: write a sample)", data, "")
    held_out = "Evaluation data: a file with other problems (empty: none)"
    written = write_starter(
        folder,
        model=model,
        data=data,
        eval_data=ask(held_out, eval_data, "") if data else eval_data or "",
        reward=ask("Reward: tags, boxed, or own (a reward.py)", reward, "tags"),
        max_tokens=ask(
            "Longest response in tokens",
            max_tokens,
            DEMO_TOKENS if model == "demo" else OTHER_TOKENS,
        ),
        steps=ask("Steps", steps, 20),
    )
    for path in written:
        say(path)
    say(f"next: penstock check {(to := pasted(written[0]))}, then penstock train {to}", error=True)


@app.command(rich_help_panel="Prepare")
def check(arguments: Arguments = None, trust: Trust = False) -> None:
    """Rehearse a run on three prompts: sample, score, train once; estimate memory and time. Keeps nothing."""
    settings = _trusted_config(arguments, trust=trust)
    from penstock.run import preflight

    preflight.check(settings)
    from penstock.run.check import print_rehearsal, rehearse

    raise typer.Exit(print_rehearsal(console(), rehearse(settings)))


@app.command(rich_help_panel="Prepare")
def convert(
    system: Annotated[
        str, typer.Argument(metavar="SYSTEM", help="trl, verl, openrlhf, colossalai, xtuner.")
    ],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A script with a command line, YAML, JSON, .py.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The TOML to write; default: FILE's name with .toml.")
    ] = None,
) -> None:
    """Write the settings of another system as a config, with a comment where a meaning changed."""
    from penstock.convert.write import write_config

    path = write_config(system, file, out)
    say(path)
    say(f"next: read its comments, then penstock check {pasted(path)}", error=True)


@app.command(rich_help_panel="Prepare")
def config(
    arguments: Arguments = None,
    only: Annotated[
        str, typer.Option("--filter", help="Only settings whose key or meaning has these words.")
    ] = "",
) -> None:
    """Print every setting as TOML that can be used again: meaning, allowed values, where it came from."""
    from penstock.config.doubts import doubts
    from penstock.config.source import config_lines
    from penstock.training.algo.doubts import algorithm_doubts

    path, overrides = split_words(arguments or [])
    loaded = load_config(path, overrides)
    lines = list(config_lines(loaded, only))
    if not lines:
        raise UserError(f"--filter: got {only!r}, allowed: words of a key or of its meaning")
    terminal = console()
    for line in lines:
        style = "dim" if line.startswith("#") else "bold" if line.startswith("[") else ""
        terminal.print(Text(line, style=style), soft_wrap=True)
    for warning in [*doubts(loaded.config), *algorithm_doubts(loaded.config)]:
        console(stderr=True).print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)


@app.command(rich_help_panel="Rewards")
def score(
    data: Annotated[
        Path,
        typer.Argument(help="JSONL lines with `response` and the right answer, or a run folder."),
    ],
    options: Overrides = None,
    reward: Annotated[str, typer.Option(help="A built-in reward or module:function.")] = "boxed",
    out: Annotated[
        Path | None, typer.Option(help="File for the scored lines; default: stdout.")
    ] = None,
) -> None:
    """Run a reward over recorded responses; write one JSON line for each, in order."""
    from penstock.rollout.evaluation.score import score_file

    raise typer.Exit(score_file(data, reward, out, parse_settings(options or [])).exit_code)


sandbox_app = typer.Typer(no_args_is_help=True, help="Run untrusted code in a sandbox.")
app.add_typer(sandbox_app, name="sandbox", rich_help_panel="Rewards")
app.command(rich_help_panel="Look")(dashboard)
app.command("eval", rich_help_panel="Run")(evaluate)
app.command(rich_help_panel="Look")(generate)
app.command(rich_help_panel="Look")(chat)
app.command(rich_help_panel="Run")(serve)


@sandbox_app.command("check")
def sandbox_check(options: Overrides = None) -> None:
    """Print which layers of isolation work on this machine; exit 1 if code would be refused."""
    from penstock.reward.sandbox.self_check import check
    from penstock.reward.sandbox.settings import SandboxSettings

    result = check(_section(SandboxSettings, options))
    for line in result.lines():
        say(line)
    raise typer.Exit(0 if result.ok else 1)


@sandbox_app.command("serve")
def sandbox_serve(
    options: Overrides = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but loopback needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8080,
    token_variable: Annotated[
        str, typer.Option(help="Environment variable that holds the bearer token of clients.")
    ] = "PENSTOCK_SANDBOX_TOKEN",
) -> None:
    """Serve code verification over HTTP: POST /check_correctness."""
    from penstock.reward.sandbox.serve import ServerSettings, serve

    serve(host, port, token_variable, _section(ServerSettings, options))


agent_app = typer.Typer(no_args_is_help=True, help="Try agents before they are trained.")
app.add_typer(agent_app, name="agent", rich_help_panel="Rewards")


@agent_app.command("check")
def agent_check(arguments: Arguments = None, trust: Trust = False) -> None:
    """Play the config's agents against a made-up policy, and say what would go wrong; exit 1 if anything."""
    import asyncio

    from penstock.run.check import check_agents

    verdicts = asyncio.run(check_agents(_trusted_config(arguments, trust=trust, with_tasks=False)))
    for task, findings in verdicts.items():
        for finding in findings:
            why = f": {finding.detail}" if finding.detail else ""
            say(f"{finding.verdict:<4} {task}: {finding.name}{why}")
    has_failed = any(
        finding.verdict == "FAIL" for findings in verdicts.values() for finding in findings
    )
    raise typer.Exit(has_failed)


S = TypeVar("S", bound=Section)


def _section(kind: type[S], options: list[str] | None) -> S:
    try:
        return kind.model_validate(parse_settings(options or []))
    except ValidationError as error:
        raise UserError(explain(error, kind)) from None


app.command(rich_help_panel="Look")(simulate)
_DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
# typer brings its own copy of click or uses the installed one: take the class from what it exports
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main() -> None:
    """Run the command line; print a PenstockError as one line and exit with its code."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would break up our display
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if (code := app(prog_name="penstock", standalone_mode=False) or 0) == 130:
            raise KeyboardInterrupt  # in a command: typer gives the code in its place
        raise SystemExit(code)
    except _UsageError as error:
        _fail(_usage_line(error), 2)
    except UserError as error:
        _fail(str(error), 2)
    except (StopRequested, KeyboardInterrupt, typer.Abort) as error:
        say(str(error) or "stopped", error=True)
        raise SystemExit(130) from None
    except PenstockError as error:
        _fail(str(error), 1)
    except OSError as error:
        if error.errno not in _DISK_FAULTS:
            raise
        _fail(f"{error}; what the journal holds is not lost", 1)


def _interrupt(number: int, frame: object) -> None:
    """Let SIGTERM end a command as Ctrl-C does, so that everything it started is closed."""
    raise KeyboardInterrupt


def _usage_line(error: Any) -> str:
    """What the parser refused, in one line. A command group without a command shows its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        raise SystemExit(2)
    path = error.ctx.command_path if error.ctx else "penstock"
    said = of_setting(error, Config) or error.format_message().rstrip(".")
    return f"{said} (see {path} --help)"


def _fail(message: str, code: int) -> None:
    say(f"error: {' '.join(message.split())}", error=True)
    raise SystemExit(code) from None


if __name__ == "__main__":
    main()
