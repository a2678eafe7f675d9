"""Finds what keeps a machine, a server or a module from its speed: one function a check, each answer with evidence and remedy."""
