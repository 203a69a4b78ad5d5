"""Thin orchestration: a validated body goes to the estimator, the answer to SQL."""
