"""The tasks of `wagma train`: the digits, folders of images, and a user's own script.

Each is a `contract.Task`, which holds the functions that the training calls.
"""
