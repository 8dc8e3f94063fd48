"""Images with labels; and the handwritten digits that come with scikit-learn."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import gin
import numpy as np

from reversible_trainer.data.base import Batch, generator

_TEST = 360  # images, a fifth


@dataclasses.dataclass(frozen=True, eq=False)  # eq: arrays do not compare to one truth value
class ImageData:
    """Images to train on and images to test on, a label for each.

    Attributes:
      images: float32 [N, H, W, C].
      labels: int32 [N], from 0.
      test_images: float32 [M, H, W, C].
      test_labels: int32 [M].
      shift: In training every image is moved, by up to so many pixels each way; zeros
        come in from the border.

    Example:
      >>> images, labels = np.ones((5, 4, 4, 1), np.float32), np.arange(5, dtype=np.int32)
      >>> data = ImageData(images[:2], labels[:2], images[2:], labels[2:])
      >>> [x.shape for x in data.batch(seed=0, step=7, batch_size=3)]
      [(3, 4, 4, 1), (3,), (3,)]
      >>> [labels[mask].tolist() for _, labels, mask in data.eval_batches(batch_size=2)]
      [[2, 3], [4]]
    """

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    shift: int = 0

    def __post_init__(self) -> None:
        least = min(self.images.shape[1:3])
        if type(self.shift) is not int or not 0 <= self.shift < least:
            raise ValueError(
                f"ImageData: shift must be a whole number of pixels, at least 0 and less than {least}; "
                f"got {self.shift!r}."
            )

    @property
    def vocab_size(self) -> int:
        """Number of classes."""
        return 1 + int(max(self.labels.max(), self.test_labels.max(initial=0)))

    def batch(self, seed: int, step: int, batch_size: int, length: int | None = None) -> Batch:
        """The batch of a step: training images at random, shifted."""
        _no(length)
        random, (height, width) = generator(seed, step), self.images.shape[1:3]
        chosen = random.integers(len(self.images), size=batch_size)
        y, x = random.integers(2 * self.shift + 1, size=(2, batch_size, 1, 1))
        border = (self.shift, self.shift)
        padded = np.pad(self.images[chosen], ((0, 0), border, border, (0, 0)))
        images = padded[np.arange(batch_size)[:, None, None], y + np.arange(height)[:, None], x + np.arange(width)]
        return images, self.labels[chosen], np.ones(batch_size, bool)

    def eval_batches(self, batch_size: int, length: int | None = None) -> Iterator[Batch]:
        """Batches in which every test image comes exactly once; what fills up the last one is masked."""
        _no(length)
        for start in range(0, len(self.test_images), batch_size):
            parts = (x[start : start + batch_size] for x in (self.test_images, self.test_labels))
            images, labels = (
                np.concatenate([x, np.zeros((batch_size - len(x), *x.shape[1:]), x.dtype)]) for x in parts
            )
            yield images, labels, np.arange(start, start + batch_size) < len(self.test_images)


def _no(length: int | None) -> None:
    if length is not None:
        raise ValueError(f"ImageData: images have no length in tokens; got {length}. Leave run.length out.")


@gin.configurable
def digits(shift: int = 1) -> ImageData:
    """The 1,797 handwritten digits of scikit-learn, 8 x 8 pixels in 17 shades of grey, scaled to [0, 1].

    The last 360 are the test images. Neighbours in the file resemble each other, as one
    hand wrote them; so these are harder than a random fifth: naming each after the most
    similar training image is right for 95.6 % of them, and for 98.8 % of random ones.

    Args:
      shift: Training images are moved by up to so many pixels each way.

    Source: Alpaydin and Kaynak 1998 (https://archive.ics.uci.edu/dataset/80).
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError(
            f"digits: the images come with scikit-learn, which cannot be imported ({error}); pip install scikit-learn."
        ) from None
    found: Any = load_digits()
    images = (found.images[..., None] / 16).astype(np.float32)
    labels = found.target.astype(np.int32)
    return ImageData(images[:-_TEST], labels[:-_TEST], images[-_TEST:], labels[-_TEST:], shift)
