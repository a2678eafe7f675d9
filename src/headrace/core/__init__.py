"""What decides: requests, blocks, scheduling. Standard library only; time is passed in."""
