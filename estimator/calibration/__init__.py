"""What measured runs teach about the estimate: small corrections, overheads, and how far answers may be off."""

from estimator.calibration.apply import Calibration, Constant
from estimator.calibration.priors import stack_key
from estimator.calibration.quantiles import QuantileTable
from estimator.calibration.shipped import choose, describe, shipped

__all__ = ["Calibration", "Constant", "QuantileTable", "choose", "describe", "shipped", "stack_key"]
