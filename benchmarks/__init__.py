"""Measurements of lychee_local through its public API. Data sets are passed by path and are no part of this project."""
