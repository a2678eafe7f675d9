"""What can only be measured inside a process: parts of a step, blocks, paths of a model."""
