"""A tiny data set in folders: noisy squares of three colors."""

import numpy as np

COLOURS = {"blue": (40, 40, 200), "green": (40, 200, 40), "red": (200, 40, 40)}


def squares(directory, counts=(12, 12, 12), size=(20, 16), noise=40):
    """Write `counts` images of (width, height) to one folder for each color, and return it."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for (name, color), count in zip(COLOURS.items(), counts):
        (directory / name).mkdir(parents=True)
        for index in range(count):
            pixels = color + noise * generator.normal(size=(size[1], size[0], 3))
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            image.save(directory / name / f"{index}.png")
    return directory
