"""What `wagma train` can learn: the digits, folders of images, and a user's own script.

Each is a `contract.Task`, three functions that the training calls; there is no other way in.
"""
