"""Metrics; a leaf."""
