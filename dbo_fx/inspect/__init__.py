"""Looking inside: what a program does and when, and how two of them differ."""
