"""What of the model a rank holds."""

from estimator.layout.layout_string import parse_layout
from estimator.layout.pipeline import ChunkShare, StageShare, stage_shares

__all__ = ["ChunkShare", "StageShare", "parse_layout", "stage_shares"]
