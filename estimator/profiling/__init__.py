"""Measures the memory of real training steps on a GPU: one rank of a job of any size, or every rank of a real one.

The only part of this project that may import torch, and it does so inside functions, so that grids, sweeps and records
can be handled on any machine. A GPU machine needs torch, megatron-core, Transformer Engine and numpy, nothing more.
"""

from estimator.profiling import bare  # noqa: F401  # before anything of estimator.job is imported
from estimator.profiling.job import ProfileJob, job_from_dict, job_to_dict, settings_from_dict, settings_to_dict
from estimator.profiling.runner import run_one

__all__ = ["ProfileJob", "job_from_dict", "job_to_dict", "run_one", "settings_from_dict", "settings_to_dict"]
