"""One training step of one rank as a timeline."""

from estimator.step.compose import StepTimeline, counted_peak, steady_peak, step_timeline

__all__ = ["StepTimeline", "counted_peak", "steady_peak", "step_timeline"]
