"""Endpoints, one file per kind."""
