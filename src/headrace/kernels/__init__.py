"""Attention over paged KV storage, and its slow oracle."""
