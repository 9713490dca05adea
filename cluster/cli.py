"""The command line. It parses, calls one function and turns errors into one line and an exit code.

Exit codes: 0 done; 1 the run is incomplete or a dump is bad; 2 the user's error.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from storage.errors import ConfigError, HsdumpError, UserError

app = typer.Typer(
    name="hsdump",
    help="Collect the hidden states of large language models as zarr datasets. "
    "--debug, anywhere on the line, shows tracebacks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunFile = Annotated[str, typer.Argument(metavar="RUN.yaml", help="Run file, see examples/.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the run file, e.g. engine.gpus=0."),
]
DumpUrl = Annotated[str, typer.Argument(metavar="DUMP", help="The dump: a folder or any fsspec URL.")]


@app.command()
def collect(
    run_file: RunFile,
    overrides: Overrides = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster to use, `auto` for the one of this machine; default: start a local one."
        ),
    ] = None,
    json_logs: Annotated[
        bool, typer.Option("--json-logs", help="Print every line as a JSON object, for programs.")
    ] = False,
) -> None:
    """Run the prompts through the model and leave a dump. Again on the same output: resume."""
    from cluster.collect import collect as run

    run(run_file, overrides or (), address=address, start=Path.cwd(), json_logs=json_logs)


@app.command()
def plan(
    run_file: RunFile,
    overrides: Overrides = None,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster to plan for, `auto` for the one of this machine.")
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="TOKENS/S", help="Speed of one engine, for the time that it takes."),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Start an engine, prove its capture and measure its speed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a run will do and take, and why it can't work, before anything is spent."""
    from cluster.plan import make_plan
    from cluster.plan_view import print_plan

    made = make_plan(
        run_file, overrides or (), address=address, start=Path.cwd(), tokens_per_s=speed, start_engine=probe
    )
    print_plan(made, as_json)
    if made.problems:
        raise typer.Exit(2)


@app.command()
def verify(
    dump: DumpUrl,
    reference: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Recompute N samples with Hugging Face, the longest among them."
        ),
    ] = 0,
    model: Annotated[
        str | None, typer.Option(help="Folder of the model, where it isn't the one that the dump names.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Run Python code that comes with the model.")
    ] = False,
    address: Annotated[str | None, typer.Option(help="Spread the work over this Ray cluster.")] = None,
    sample_fraction: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, metavar="F", help="Read this share of the samples, chosen at random."),
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the choice of samples.")] = 0,
) -> None:
    """Check a dump: the account, every byte, and on request the states themselves."""
    from cluster.verify import verify as run

    run(
        dump,
        reference=reference,
        model=model,
        trust_remote_code=trust_remote_code,
        address=address,
        sample_fraction=sample_fraction,
        seed=seed,
    )


@app.command()
def export(
    dump: DumpUrl,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Folder or fsspec URL to write to.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT", help="specforge, speculators, modelopt, eagle, angelslim or deepspec."
        ),
    ],
    boundaries: Annotated[
        str | None, typer.Option(metavar="B,B,B", help="Which of the dump's boundaries, e.g. 2,15,27.")
    ] = None,
    split: Annotated[
        float, typer.Option(metavar="F", help="Hold this share of the samples out, in DEST/eval.")
    ] = 0.0,
    max_samples: Annotated[int | None, typer.Option(metavar="N", help="Only the first N samples.")] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option(metavar="V", help="Make d2t and t2d for a drafter with V tokens.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Tokens of the target, where its config.json isn't at hand.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it takes, write nothing.")] = False,
    address: Annotated[str | None, typer.Option(help="Spread the work over this Ray cluster.")] = None,
) -> None:
    """Write a dump as the files of a drafter's trainer. Again on the same DEST: what is missing."""
    from cluster.export import export as run
    from storage.export.plan import ExportOptions

    options = ExportOptions(_numbers(boundaries), split, max_samples, draft_vocab_size, vocab_size)
    run(dump, to, dest, options, dry_run=dry_run, address=address, cwd=Path.cwd())


@app.command()
def rehearse(
    run_file: RunFile,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, max=1024, help="Engines, one a node.")] = 4,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Generate so many rows; default: the run's own prompts.")
    ] = None,
    tokens_per_s: Annotated[
        float, typer.Option(min=0.0, help="Speed of each engine; 0 is as fast as it can.")
    ] = 0.0,
    clean: Annotated[bool, typer.Option("--clean", help="Remove what was written.")] = False,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster to use; default: start --nodes nodes on this machine.")
    ] = None,
) -> None:
    """Run everything but the model, with made-up states: measures a cluster and its storage."""
    from cluster.rehearse import rehearse as run

    run(
        run_file,
        overrides or (),
        address=address,
        nodes=nodes,
        rows=rows,
        tokens_per_s=tokens_per_s,
        clean=clean,
        start=Path.cwd(),
    )


@app.command()
def status(
    address: Annotated[
        str | None, typer.Option(help="Ray cluster to look at; default: the one of this machine.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Again every two seconds, to the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    job: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Exit with the exit code of this Ray job: 0, 1, 2, or 3 while it runs."
        ),
    ] = None,
) -> None:
    """Show the runs that go on on a cluster: rows by state, speed, time to go, engines, permits."""
    if job is not None:
        from cluster.job_status import job_status

        line, code = job_status(job)
        print(line)
        raise typer.Exit(code)
    from cluster.status import status as run

    run(address, watch_s=2.0 if watch else None, as_json=as_json)


@app.command()
def repair(
    dump: DumpUrl,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the leftovers, remove nothing.")] = False,
) -> None:
    """Remove what dead writers left behind, and nothing else. A resume does it by itself."""
    from cluster.repair import repair as run

    run(dump, dry_run=dry_run)


@app.command()
def report(
    dump: DumpUrl,
    output: Annotated[
        str | None, typer.Option(help="File to write; default: report.html in the dump.")
    ] = None,
) -> None:
    """Write one HTML page about a dump, which needs no network."""
    from cluster.page.build import report as run

    run(dump, output)


@app.command()
def inspect(
    dump: DumpUrl,
    sample: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Show this sample's text and mask.")
    ] = None,
) -> None:
    """Show what a dump holds, or one sample of it."""
    from cluster.inspect import inspect as run

    run(dump, sample)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--boundaries {text}: write numbers with commas between, such as 2,15,27"
        ) from None


def run_cli(arguments: list[str]) -> int:
    """Runs one command and gives its exit code; never raises.

    Args:
        arguments: the command line without the program's name.
    """
    debug = "--debug" in arguments
    try:
        app(args=[a for a in arguments if a != "--debug"], prog_name="hsdump")
    except SystemExit as end:
        return int(end.code or 0)
    except HsdumpError as error:
        _say(str(error), debug)
        return 2 if isinstance(error, UserError) else 1
    except Exception as error:  # the last resort: a bug, which must not look like a user's error
        _say(f"internal error: {type(error).__name__}: {error}; --debug shows where", debug)
        return 1
    return 0


def _say(line: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"hsdump: error: {line}", file=sys.stderr)
