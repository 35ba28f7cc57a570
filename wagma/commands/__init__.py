"""The commands of ``wagma``, one per module: its options, their checks, and its function."""
