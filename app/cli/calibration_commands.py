"""``oombudsman calibrate`` and ``oombudsman calibrations``: the commands; what they do is in ``calibrations``."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from app.cli import options as o
from app.cli.failures import explained

commands = typer.Typer(help="Calibrations: versions, and which of them answer.", no_args_is_help=True)


def calibrate(
    gpu: Annotated[str, typer.Option("--gpu", help="Its family is calibrated")] = "h200-141gb",
    stack: o.Stack = None,
    activate: Annotated[bool, typer.Option("--activate", help="Answer with it from now on")] = False,
    processes: Annotated[
        int, typer.Option("--processes", min=1, max=256, help="For predicting runs; 0.1 to 1 s each")
    ] = os.cpu_count() or 1,
    files: Annotated[
        list[Path] | None,
        typer.Option("--from", help="The profiler's records instead of the database; with --write"),
    ] = None,
    write: Annotated[Path | None, typer.Option("--write", help="A file instead of the database; with --from")] = None,
    as_json: o.AsJson = False,
) -> None:
    """Fit the stored runs of a GPU family and stack. The new version answers only once it is activated."""
    from app.cli.calibrations import of_database, of_files, print_calibration
    from app.cli.inputs import refusal

    gc.enable()
    with explained(as_json):
        if (files is None) != (write is None):
            raise refusal("--from", "goes with --write, and the other way round", "--from FILE... --write OUT.json")
        if files is not None and write is not None:
            document = of_files(files, gpu)
            write.write_text(json.dumps(document, separators=(",", ":")) + "\n")
        else:
            document = of_database(gpu, stack or (), activate, processes)
    if as_json:
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        print_calibration(document)


@commands.command("list")
def list_versions(
    limit: Annotated[int, typer.Option(min=1, max=500)] = 20,
    as_json: o.AsJson = False,
) -> None:
    """Versions, newest first; the shipped ones answer where none is active."""
    from app.cli.calibrations import print_versions
    from app.cli.database import opened
    from app.services import calibrations

    with explained(as_json), opened() as database:
        items = calibrations.page(database, limit, None)
    if as_json:
        sys.stdout.write(json.dumps({"items": items}) + "\n")
        return
    print_versions(items)


@commands.command("show")
def show(calibration_id: Annotated[str, typer.Argument(metavar="ID")], as_json: o.AsJson = False) -> None:
    """One version: coefficients, held-out errors, coverage, runs that were left out."""
    from app.cli.calibrations import print_calibration
    from app.cli.database import opened
    from app.cli.inputs import refusal
    from app.services import calibrations

    with explained(as_json):
        with opened() as database:
            found = calibrations.get(database, calibration_id)
        if found is None:
            raise refusal("ID", f"no calibration has the id {calibration_id!r}", "oombudsman calibrations list")
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        print_calibration(found)


@commands.command("activate")
def activate_version(calibration_id: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Answer with this version from now on, for its stack and GPU family."""
    from app.cli.database import opened
    from app.cli.inputs import refusal
    from app.services import calibrations

    with explained(as_json=False):
        with opened() as database:
            done = calibrations.activate(database, calibration_id)
        if not done:
            raise refusal("ID", f"no stored calibration has the id {calibration_id!r}", "oombudsman calibrations list")
    typer.echo(f"{calibration_id} is active")


@commands.command("deactivate")
def deactivate_version(calibration_id: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Answer with the shipped calibration again."""
    from app.cli.database import opened
    from app.cli.inputs import refusal
    from app.services import calibrations

    with explained(as_json=False):
        with opened() as database:
            done = calibrations.deactivate(database, calibration_id)
        if not done:
            raise refusal("ID", f"{calibration_id!r} is not active", "oombudsman calibrations list")
    typer.echo(f"{calibration_id} is no longer active")
