"""Analytic GPU memory estimates for Megatron-Bridge training jobs, and the changes that make them fit."""

ESTIMATOR_VERSION = "0.1.0"
SCHEMA_VERSION = "1"
