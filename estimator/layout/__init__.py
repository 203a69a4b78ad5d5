"""What of the model a rank holds."""

from estimator.layout.pipeline import StageShare, stage_shares

__all__ = ["StageShare", "stage_shares"]
