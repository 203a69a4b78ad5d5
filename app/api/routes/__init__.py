"""Routers, one a resource."""
