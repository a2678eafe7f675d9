"""Batches: many requests in a file, answered when there is time, each exactly once."""
