"""One change list in every form that a user pastes: Python, command line, YAML, environment, launch, harness."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from estimator.changes import Change
from estimator.job.settings import Stack
from estimator.render.advice import Advice, Note, advise
from estimator.render.assignments import assignments
from estimator.render.forms import hydra_arguments, hydra_form, python_form, yaml_form
from estimator.render.launch import Cluster, ClusterLike, harness_form, slurm_text, torchrun_text

__all__ = ["Advice", "Cluster", "ClusterLike", "Note", "Override", "advise", "render_override"]


@dataclass(frozen=True, slots=True)
class Override:
    """The forms of one change list. A form that cannot express it is None, and ``reasons`` says why, by form.

    ``cli`` is one shell-quoted line of Hydra overrides, ``cli_arguments`` the same as separate arguments. ``env`` gives
    each variable's value, None to unset it; ``launch`` has "torchrun" and "slurm".
    """

    python: str | None
    cli: str | None
    yaml: str | None
    env: Mapping[str, str | None]
    launch: Mapping[str, str]
    harness: str | None
    reasons: Mapping[str, str]
    cli_arguments: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The override as the API answers it."""
        return {
            "python": self.python,
            "cli": self.cli,
            "cli_arguments": list(self.cli_arguments),
            "yaml": self.yaml,
            "env": dict(self.env),
            "launch": dict(self.launch),
            "harness": self.harness,
            "reasons": dict(self.reasons),
        }


def render_override(
    changes: Iterable[Change],
    values: Mapping[str, Any],
    cluster: ClusterLike | Mapping[str, Any],
    stack: Stack | None = None,
) -> Override:
    """The changes of the job ``values`` in every form, written so that Bridge does not undo them (rules O1, O2).

    ``cluster`` has ``num_gpus`` and ``gpus_per_node`` (attributes or keys), the GPUs after the changes.
    """
    work = assignments(changes, values)
    python, no_python = python_form(work)
    cli, no_cli = hydra_form(work)
    fragment, no_yaml = yaml_form(work)
    harness, no_harness = harness_form(work, values, (stack or Stack()).megatron_bridge)
    reasons = {"python": no_python, "cli": no_cli, "yaml": no_yaml, "harness": no_harness}
    return Override(
        python=python,
        cli=cli,
        yaml=fragment,
        env=dict(work.env),
        launch={"torchrun": torchrun_text(work.env, cli, cluster), "slurm": slurm_text(work.env, cli, cluster)},
        harness=harness,
        reasons={form: reason for form, reason in reasons.items() if reason is not None},
        cli_arguments=hydra_arguments(work)[0],
    )
