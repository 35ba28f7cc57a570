"""The tasks of `wagma train`: those of `--task`, and a user's own script.

Each is a `contract.Task`, which holds the functions that the training calls.
"""
