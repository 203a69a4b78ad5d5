"""What a job says, and what Megatron-Bridge makes of it."""

from estimator.job.document import JobDocument, build_document
from estimator.job.effective import EffectiveChange, EffectiveJob, effective_document
from estimator.job.overrides import read_overrides
from estimator.job.settings import Settings, Stack
from estimator.job.settings_reader import read_settings, vocab_size

__all__ = [
    "EffectiveChange",
    "EffectiveJob",
    "JobDocument",
    "Settings",
    "Stack",
    "build_document",
    "effective_document",
    "read_overrides",
    "read_settings",
    "vocab_size",
]
