"""A run seen from outside: what its members answer about their steps, pieced together; on a screen, and in files."""
