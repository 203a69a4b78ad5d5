"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

JOB, CLUSTER, ANSWER = "Job", "Cluster", "Answer"

Words = Annotated[
    list[str] | None,
    Argument(
        metavar="[RECIPE] [NxGPU] [OVERRIDE]...",
        help="Short for --recipe, --num-gpus with --gpu, and --override: llama3_8b_pretrain_config 2xh100-80gb a.b=c",
        show_default=False,
    ),
]
Recipe = Annotated[str | None, Option("--recipe", help="A recipe of Megatron-Bridge", rich_help_panel=JOB)]
Module = Annotated[
    str | None, Option("--module", help="Where two modules export the recipe's name", rich_help_panel=JOB)
]
Config = Annotated[
    Path | None,
    Option("--config", help="ConfigContainer as YAML or JSON, such as run_config.yaml; - = stdin", rich_help_panel=JOB),
]
MegatronArgs = Annotated[
    Path | None,
    Option(
        "--megatron-args",
        help="Megatron-LM's arguments: the block that it prints, or a JSON or YAML mapping; - = stdin",
        rich_help_panel=JOB,
    ),
]
Overrides = Annotated[
    list[str] | None,
    Option("--override", "-o", help="a.b=c or cfg.a.b = c; again for more", rich_help_panel=JOB, show_default=False),
]
Stack = Annotated[
    list[str] | None,
    Option("--stack", help="name=version, such as megatron_core=0.19.2", rich_help_panel=JOB, show_default=False),
]
Gpu = Annotated[str | None, Option("--gpu", help="GPU by name, such as h100-80gb", rich_help_panel=CLUSTER)]
NumGpus = Annotated[int | None, Option("--num-gpus", help="GPUs of the whole job", rich_help_panel=CLUSTER)]
GpusPerNode = Annotated[int | None, Option("--gpus-per-node", help="GPUs in one host", rich_help_panel=CLUSTER)]
MemoryLimit = Annotated[
    str | None, Option("--memory-limit", help="Allocator cap, in GiB or with a unit", rich_help_panel=CLUSTER)
]
Reserved = Annotated[
    str | None, Option("--reserved", help="Taken by others on each card; GiB or with a unit", rich_help_panel=CLUSTER)
]
TotalMemory = Annotated[
    str | None, Option("--total-memory", help="Memory of a card that is not listed", rich_help_panel=CLUSTER)
]
MinFitProbability = Annotated[
    float, Option("--min-fit-probability", help="How sure the fit must be", rich_help_panel=ANSWER)
]
AsJson = Annotated[bool, Option("--json", help="Print exactly what the API answers", rich_help_panel=ANSWER)]
PipelineRank = Annotated[
    int | None, Option("--pipeline-rank", help="This pipeline stage instead of the worst", rich_help_panel=ANSWER)
]
Survival = Annotated[bool, Option("--survival/--no-survival", help="Also follow the allocator", rich_help_panel=ANSWER)]
Allow = Annotated[
    list[str] | None,
    Option("--allow", help="Families of changes to allow, with commas", rich_help_panel=ANSWER, show_default=False),
]
MaxRecommendations = Annotated[
    int, Option("--max-recommendations", help="How many to look for", rich_help_panel=ANSWER)
]
Log = Annotated[
    Path | None, Option("--log", help="The failed run's log or OOM text; - = stdin", rich_help_panel=ANSWER)
]
Show = Annotated[int, Option("--show", help="Which recommendation to print in full; 0 = all", rich_help_panel=ANSWER)]
