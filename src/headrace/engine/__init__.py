"""What turns the wheel."""
