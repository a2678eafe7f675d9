"""Answers what has not been run: replays a trace through the engine's own scheduler, and searches for the best settings."""
