"""The commands of ``wagma``, a module each: its options, their checks, and what runs it."""
