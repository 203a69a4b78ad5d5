"""Which changes make a job fit, cheapest first."""

from estimator.search.recommend import Candidate, SearchResult, search
from estimator.search.space import DEFAULT_FAMILIES

__all__ = ["DEFAULT_FAMILIES", "Candidate", "SearchResult", "search"]
