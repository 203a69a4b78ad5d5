"""Other questions that people ask of the estimate: how much fits, and what made two jobs differ."""

from estimator.questions.capacity import CAPACITY_QUESTIONS, capacity_answer
from estimator.questions.compare import compare_answer

__all__ = ["CAPACITY_QUESTIONS", "capacity_answer", "compare_answer"]
