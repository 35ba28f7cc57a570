"""Faults of trainings that save checkpoints: each is continued, and has to end as without it."""
