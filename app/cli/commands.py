"""The commands."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli import options as o
from app.cli.calibration_commands import calibrate
from app.cli.calibration_commands import commands as calibration_commands
from app.cli.failures import Failure, explained, warn
from app.cli.inputs import Options, build, read_log

application = typer.Typer(
    name="oombudsman",
    help="Says why a Megatron-Bridge job ran out of GPU memory, and hands back settings that fit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
database_commands = typer.Typer(help="The database.", no_args_is_help=True)
application.add_typer(database_commands, name="db")
key_commands = typer.Typer(help="API keys; required as soon as one exists.", no_args_is_help=True)
application.add_typer(key_commands, name="keys")
run_commands = typer.Typer(help="Measured runs.", no_args_is_help=True)
application.add_typer(run_commands, name="runs")


@application.command()
def recommend(
    words: o.Words = None,
    recipe: o.Recipe = None,
    module: o.Module = None,
    config: o.Config = None,
    megatron_args: o.MegatronArgs = None,
    override: o.Overrides = None,
    stack: o.Stack = None,
    gpu: o.Gpu = None,
    num_gpus: o.NumGpus = None,
    gpus_per_node: o.GpusPerNode = None,
    memory_limit: o.MemoryLimit = None,
    reserved: o.Reserved = None,
    total_memory: o.TotalMemory = None,
    min_fit_probability: o.MinFitProbability = 0.99,
    allow: o.Allow = None,
    max_recommendations: o.MaxRecommendations = 5,
    log: o.Log = None,
    show: o.Show = 1,
    as_json: o.AsJson = False,
) -> None:
    """Why the job runs out of memory, and which settings fit, cheapest first."""
    from app.cli.database import active_calibrations
    from app.schemas import RecommendBody
    from app.services import answers

    with explained(as_json):
        more: dict[str, Any] = {
            "min_fit_probability": min_fit_probability,
            "constraints": {"max_recommendations": max_recommendations},
        }
        if allow is not None:
            more["constraints"]["allow"] = [name.strip() for item in allow for name in item.split(",") if name.strip()]
        if log is not None:
            more["evidence"] = {"log": read_log(log)}
        typed = Options(
            words or (), recipe, module, config, override or (), stack or (), gpu, num_gpus, gpus_per_node,
            memory_limit, reserved, total_memory, more, megatron_args,
        )  # fmt: skip
        body = build(typed, RecommendBody)
        answer = answers.recommend(body, calibrations=active_calibrations())
        content = answers.encode(answer)
    if as_json:
        _print_json(content)
    else:
        from app.cli.report import print_recommendation

        print_recommendation(answer, body.model_dump(exclude_unset=True), show)
    kept = _keep(body, answer)
    if kept and not as_json:
        typer.echo(f"Kept as {answer['id']}: oombudsman show {answer['id']}")


@application.command()
def estimate(
    words: o.Words = None,
    recipe: o.Recipe = None,
    module: o.Module = None,
    config: o.Config = None,
    megatron_args: o.MegatronArgs = None,
    override: o.Overrides = None,
    stack: o.Stack = None,
    gpu: o.Gpu = None,
    num_gpus: o.NumGpus = None,
    gpus_per_node: o.GpusPerNode = None,
    memory_limit: o.MemoryLimit = None,
    reserved: o.Reserved = None,
    total_memory: o.TotalMemory = None,
    min_fit_probability: o.MinFitProbability = 0.99,
    pipeline_rank: o.PipelineRank = None,
    survival: o.Survival = True,
    as_json: o.AsJson = False,
) -> None:
    """Memory of a job, by moment and component, and whether it fits."""
    from app.cli.database import active_calibrations
    from app.schemas import EstimateBody
    from app.services import answers

    with explained(as_json):
        more = {"min_fit_probability": min_fit_probability, "pipeline_rank": pipeline_rank, "survival": survival}
        typed = Options(
            words or (), recipe, module, config, override or (), stack or (), gpu, num_gpus, gpus_per_node,
            memory_limit, reserved, total_memory, more, megatron_args,
        )  # fmt: skip
        body = build(typed, EstimateBody)
        answer = answers.estimate(body, active_calibrations())
        content = answers.encode(answer)
    if as_json:
        _print_json(content)
        return
    from app.cli.report import print_estimate

    print_estimate(answer, body.model_dump(exclude_unset=True))


@application.command()
def capacity(
    words: o.Words = None,
    question: Annotated[
        str, typer.Option("--of", help="micro_batch_size, seq_length or num_gpus")
    ] = "micro_batch_size",
    recipe: o.Recipe = None,
    module: o.Module = None,
    config: o.Config = None,
    override: o.Overrides = None,
    stack: o.Stack = None,
    gpu: o.Gpu = None,
    num_gpus: o.NumGpus = None,
    gpus_per_node: o.GpusPerNode = None,
    memory_limit: o.MemoryLimit = None,
    reserved: o.Reserved = None,
    total_memory: o.TotalMemory = None,
    min_fit_probability: o.MinFitProbability = 0.99,
    as_json: o.AsJson = False,
) -> None:
    """The largest micro batch or sequence that fits, or the fewest GPUs, with everything else as it is."""
    from app.cli.database import active_calibrations
    from app.schemas import CapacityBody
    from app.services import answers

    with explained(as_json):
        typed = Options(
            words or (), recipe, module, config, override or (), stack or (), gpu, num_gpus, gpus_per_node,
            memory_limit, reserved, total_memory, {"question": question, "min_fit_probability": min_fit_probability},
        )  # fmt: skip
        answer = answers.capacity(build(typed, CapacityBody), active_calibrations())
    if as_json:
        _print_json(answers.encode(answer))
    else:
        from app.cli.questions import print_capacity

        print_capacity(answer)


@application.command("diff")
def difference(
    job_a: Annotated[str, typer.Argument(metavar="JOB_A", help="A recipe, or a file such as run_config.yaml")],
    job_b: Annotated[str, typer.Argument(metavar="JOB_B", help="The same, of the other job")],
    gpu: o.Gpu = None,
    num_gpus: o.NumGpus = None,
    overrides_a: Annotated[list[str] | None, typer.Option("--a", help="Override of JOB_A; again for more")] = None,
    overrides_b: Annotated[list[str] | None, typer.Option("--b", help="Override of JOB_B; again for more")] = None,
    num_gpus_b: Annotated[int | None, typer.Option(help="GPUs of JOB_B, if they differ")] = None,
    as_json: o.AsJson = False,
) -> None:
    """What makes two jobs differ in memory: "it OOMs since we changed the configuration"."""
    from app.cli.database import active_calibrations
    from app.cli.questions import compare_body, print_difference
    from app.services import answers

    with explained(as_json):
        body = compare_body(job_a, job_b, gpu, num_gpus, num_gpus_b, overrides_a or [], overrides_b or [])
        answer = answers.compare(body, active_calibrations())
    if as_json:
        _print_json(answers.encode(answer))
    else:
        print_difference(answer)


@application.command()
def explain(
    recommendation_id: Annotated[str, typer.Argument(metavar="ID", help="As printed when it was made")],
) -> None:
    """An earlier recommendation in words: what fills the card when, what to change and why, what it costs."""
    from app.cli.database import find
    from app.cli.inputs import refusal
    from app.cli.questions import print_explanation

    with explained(as_json=False):
        row = find(recommendation_id)
        if row is None:
            raise refusal("ID", f"no recommendation has the id {recommendation_id!r}")
    print_explanation(row.result)


@application.command()
def diagnose(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Logs, error texts, memory snapshots")],
    recipe: o.Recipe = None,
    module: o.Module = None,
    config: o.Config = None,
    override: o.Overrides = None,
    stack: o.Stack = None,
    gpu: o.Gpu = None,
    num_gpus: o.NumGpus = None,
    gpus_per_node: o.GpusPerNode = None,
    as_json: o.AsJson = False,
) -> None:
    """Why a run failed, from its log, error text or memory snapshot; the job is read from the log where it is there."""
    from app.cli.diagnosis import answer_of, known_body, print_diagnosis
    from app.services import answers

    with explained(as_json):
        known = known_body(recipe, module, config, override, stack, gpu, num_gpus, gpus_per_node)
        found = [(path, answer_of(path, known)) for path in files]
    for path, answer in found:
        if as_json:
            _print_json(answers.encode(answer))
        else:
            print_diagnosis(str(path), answer)


@application.command("show")
def show_kept(
    recommendation_id: Annotated[str, typer.Argument(metavar="ID", help="As printed when it was made")],
    show: o.Show = 1,
    as_json: o.AsJson = False,
) -> None:
    """A recommendation that was made before, from the database."""
    from app.cli.database import find
    from app.cli.inputs import refusal
    from app.services import answers

    with explained(as_json):
        row = find(recommendation_id)
        if row is None:
            raise refusal("ID", f"no recommendation has the id {recommendation_id!r}")
    if as_json:
        _print_json(answers.encode(row.result))
        return
    from app.cli.report import print_recommendation

    print_recommendation(row.result, row.request, show)


@application.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; OOMBUDSMAN_HOST")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; OOMBUDSMAN_PORT")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; OOMBUDSMAN_WORKERS")] = None,
) -> None:
    """Serve the API. Creates a new embedded database; refuses one that is not at the newest migration."""
    from app.cli.database import prepare_or_exit

    gc.enable()
    settings = prepare_or_exit()
    import uvicorn

    uvicorn.run(
        "app.api:create_app",
        factory=True,
        host=host or settings.host,
        port=settings.port if port is None else port,
        workers=workers or settings.workers,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=30,
        server_header=False,
    )


@application.command()
def slackbot() -> None:
    """Run the Slack bot: docs/slack.md says how to install it. It speaks to the service over HTTP only."""
    from pydantic import ValidationError

    from app.problems import of_validation_error
    from app.slackbot.settings import BotSettings

    try:
        settings = BotSettings()
    except ValidationError as error:
        problems = of_validation_error(error, BotSettings).errors
        for problem in problems:
            name = f"OOMBUDSMAN_SLACK_{problem.path.upper()} " if problem.path not in ("", "body") else ""
            typer.echo(f"error: {name}{problem.message}", err=True)
        raise typer.Exit(2) from error
    from app.slackbot.run import main as run

    run(settings)


@database_commands.command("upgrade")
def database_upgrade() -> None:
    """Create the database or bring it to the newest migration."""
    from app.cli.database import upgrade

    typer.echo(upgrade())


@application.command()
def validate(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="JSON lines of the profiler or of Megatron-LM's tests")
    ],
    as_json: o.AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table as Markdown")] = False,
) -> None:
    """How far the estimate is from runs that were measured: errors by group, and the runs furthest off."""
    from app.cli.validation import as_plain, print_summary, rows_of
    from estimator.validation import as_markdown, summarise

    with explained(as_json):
        rows = rows_of(files, progress=sys.stderr.isatty() and not as_json)
    summary = summarise(rows)
    if as_json:
        from app.services import answers

        _print_json(answers.encode(as_plain(rows, summary)))
    elif markdown:
        typer.echo(as_markdown(summary))
    else:
        print_summary(summary)


@application.command("config")
def config_command(as_json: o.AsJson = False) -> None:
    """The service's settings, where each comes from, secrets hidden; exit 2 if one cannot be used."""
    from app.cli.configuration import effective, print_settings

    with explained(as_json):
        rows = effective()
    if as_json:
        from app.services import answers

        _print_json(answers.encode({"settings": rows}))
    else:
        print_settings(rows)


@key_commands.command("create")
def keys_create(
    name: Annotated[str, typer.Argument(help="Whose it is")],
    scope: Annotated[list[str] | None, typer.Option(help="read, recommend, ingest, admin; again for more")] = None,
    days: Annotated[int | None, typer.Option(help="Its life; without it no end")] = None,
) -> None:
    """Make a key. It is shown once."""
    from app.cli.keys import create

    with explained(as_json=False):
        typer.echo(create(name, scope or ["read", "recommend"], days))


@key_commands.command("list")
def keys_list() -> None:
    """All keys, with what they may do and when they were last used."""
    from app.cli.keys import print_keys

    with explained(as_json=False):
        print_keys()


@key_commands.command("revoke")
def keys_revoke(prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="oom_ and the eight characters")]) -> None:
    """Make a key worthless, at once."""
    from app.cli.keys import revoke

    with explained(as_json=False):
        revoke(prefix)
    typer.echo("revoked")


@run_commands.command("import")
def runs_import(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="The profiler's JSON lines, training logs, memory snapshots")
    ],
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Store the other rows of a batch with a bad one")
    ] = False,
    about: Annotated[
        Path | None,
        typer.Option("--about", help="Job and cluster (as POST /estimate takes them) of logs and memory snapshots"),
    ] = None,
) -> None:
    """Store measured runs; what is stored already is left alone, so that a broken-off import may be run again."""
    from app.cli.runs import import_files

    with explained(as_json=False):
        typer.echo(import_files(files, keep_going, about))


@run_commands.command("list")
def runs_list(
    gpu: o.Gpu = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    as_json: o.AsJson = False,
) -> None:
    """The newest runs, with what this version's estimate says of them."""
    from app.cli.runs import newest, print_runs
    from app.services import answers

    with explained(as_json):
        found = newest(gpu, limit)
    if as_json:
        _print_json(answers.encode(found))
    else:
        print_runs(found)


@application.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def profile(arguments: typer.Context) -> None:
    """Measure real training steps on the GPU at hand (extra "profile"); see oombudsman profile --help."""
    from estimator.profiling.cli import main as profiler

    gc.enable()
    raise typer.Exit(profiler(arguments.args))


application.command()(calibrate)
application.add_typer(calibration_commands, name="calibrations")


@application.command()
def version(as_json: o.AsJson = False) -> None:
    """Versions of this program and of its answers."""
    from estimator import ESTIMATOR_VERSION, SCHEMA_VERSION

    if as_json:
        from app.services import answers

        versions = {
            "version": ESTIMATOR_VERSION,
            "estimator_version": ESTIMATOR_VERSION,
            "schema_version": SCHEMA_VERSION,
        }
        _print_json(answers.encode(versions))
    else:
        typer.echo(f"oombudsman {ESTIMATOR_VERSION} (answers: schema {SCHEMA_VERSION})")


def _print_json(content: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(content + b"\n")
    sys.stdout.buffer.flush()


def _keep(body: Any, answer: dict[str, Any]) -> bool:
    """Store the answer; a database that cannot be written is no reason to lose it."""
    from app.cli.database import keep

    try:
        keep(body, answer)
    except Failure as failure:
        warn(f"not kept: {failure.problem.detail}")
        return False
    return True
