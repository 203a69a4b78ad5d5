"""Order of the forwards and backwards of one pipeline stage."""

from estimator.schedule.one_f_one_b import Pass, stage_order

__all__ = ["Pass", "stage_order"]
