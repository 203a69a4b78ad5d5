"""The service around the estimator: HTTP, command line, SQL."""
