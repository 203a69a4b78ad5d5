"""One training step of one rank as a timeline."""

from estimator.step.compose import StepTimeline, step_timeline

__all__ = ["StepTimeline", "step_timeline"]
