"""Timelines of jobs: their files are read, put on one clock, and written as one trace."""
