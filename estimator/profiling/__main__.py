"""``python -m estimator.profiling``: the profiler where the service's command line is not installed."""

import sys

from estimator.profiling.cli import main

sys.exit(main())
