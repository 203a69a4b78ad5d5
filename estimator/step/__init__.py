"""One training step of one rank as a timeline."""

from estimator.step.compose import StepTimeline, steady_peak, step_timeline

__all__ = ["StepTimeline", "steady_peak", "step_timeline"]
