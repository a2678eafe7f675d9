"""What computes: plain modules, weights and files."""
