import sys

import gin
import numpy as np
import pytest

from reversible_trainer.data import (
    DataSet,
    ImageData,
    Text,
    TextData,
    copy_task,
    digits,
    shakespeare,
    shakespeare_works,
)
from reversible_trainer.data.corpus import HELD_OUT


@pytest.fixture(scope="module")
def data():
    return shakespeare()


@pytest.fixture
def small():
    return TextData(np.arange(100, dtype=np.uint8), np.arange(100, 137, dtype=np.uint8))


def test_works_are_whole():
    works = shakespeare_works()
    assert len(works) == 42
    assert sum(map(len, works.values())) == 5_057_198
    assert all(
        text.startswith(title.encode()) and text.count(b"by William Shakespeare") == 1 for title, text in works.items()
    )


def test_held_out_plays_are_whole_and_unseen(data):
    works, train = shakespeare_works(), data.train.tobytes()
    assert data.held_out.tobytes() == b"".join(works[title] for title in HELD_OUT)
    assert 0.05 < len(data.held_out) / (len(data.train) + len(data.held_out)) < 0.08
    for title in HELD_OUT:
        assert works[title][:100] not in train and works[title][-100:] not in train


def test_plays_to_hold_out_can_be_chosen_by_title():
    assert shakespeare(held_out=["MACBETH"]).held_out.tobytes() == shakespeare_works()["MACBETH"]
    with pytest.raises(ValueError, match="no work is called 'MACDUFF'. The works are: ALL'S WELL"):
        shakespeare(held_out=["MACDUFF"])


def test_a_batch_is_a_function_of_seed_and_step(small):
    batch = small.batch(3, 5, 4, 8)
    for x, y in zip(batch, small.batch(3, 5, 4, 8), strict=True):
        np.testing.assert_array_equal(x, y)
    for seed, step in [(3, 6), (4, 5)]:
        assert not np.array_equal(batch[0], small.batch(seed, step, 4, 8)[0])


def test_a_batch_is_windows_of_the_training_part_with_the_next_byte_as_target(small):
    tokens, targets, mask = small.batch(0, 0, 200, 8)
    assert tokens.dtype == targets.dtype == np.int32 and mask.dtype == bool and mask.all()
    np.testing.assert_array_equal(targets, tokens + 1)
    assert tokens.min() == 0 and targets.max() == 99  # both ends are reached, nothing of the held-out part is


def test_a_window_longer_than_the_text_is_refused(small):
    small.batch(0, 0, 1, 99)
    with pytest.raises(ValueError, match="length \\+ 1 = 101 tokens .* training part of 100"):
        small.batch(0, 0, 1, 100)


@pytest.mark.parametrize("batch_size, length", [(1, 37), (1, 36), (2, 5), (4, 10), (50, 3)])
def test_evaluation_covers_every_token_once(small, batch_size, length):
    tokens, targets, mask = map(np.concatenate, zip(*small.eval_batches(batch_size, length), strict=True))
    assert tokens.shape == targets.shape == mask.shape == (len(tokens), length) and len(tokens) % batch_size == 0
    np.testing.assert_array_equal(targets[mask], small.held_out)
    np.testing.assert_array_equal(tokens[mask], [ord("\n"), *small.held_out[:-1]])


def test_text_is_bytes(data):
    assert data.vocab_size == 256
    assert data.decode(data.encode("ROMEO: naïve")) == "ROMEO: naïve"
    assert data.decode([82, 255]) == "R\N{REPLACEMENT CHARACTER}"


def test_data_sets_are_known_by_their_methods(small, images):
    assert isinstance(small, Text) and isinstance(small, DataSet)
    for data in (images, copy_task()):
        assert isinstance(data, DataSet) and not isinstance(data, Text)
    assert not isinstance(digits, DataSet)  # @digits without parentheses


@pytest.fixture(scope="module")
def images():
    """Every pixel of an image is its number, from 1; so are the labels, from 0."""
    numbered = np.broadcast_to(np.arange(1, 11, dtype=np.float32)[:, None, None, None], (10, 4, 5, 1))
    labels = np.arange(10, dtype=np.int32)
    return ImageData(numbered[:3], labels[:3], numbered[3:], labels[3:], shift=1)


def test_digits_are_split_once_and_for_all():
    data = digits()
    assert data.images.shape == (1437, 8, 8, 1) and data.test_images.shape == (360, 8, 8, 1) and data.vocab_size == 10
    for part, labels in ((data.images, data.labels), (data.test_images, data.test_labels)):
        assert part.dtype == np.float32 and labels.dtype == np.int32
        assert part.min() == 0 and part.max() == 1 and set(labels) == set(range(10))
    from sklearn.datasets import load_digits

    np.testing.assert_array_equal(data.test_images[..., 0] * 16, load_digits().images[-360:])
    gin.parse_config("digits.shift = 0")
    assert digits().shift == 0


def test_without_scikit_learn_digits_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match="pip install scikit-learn"):
        digits()


def test_a_batch_of_images_is_of_the_training_part_and_shifted(images):
    batch = images.batch(3, 5, 200)
    for x, y in zip(batch, images.batch(3, 5, 200), strict=True):
        np.testing.assert_array_equal(x, y)
    x, labels, mask = batch
    assert (x.shape, x.dtype, labels.dtype, mask.dtype) == ((200, 4, 5, 1), np.float32, np.int32, bool) and mask.all()
    assert not np.array_equal(labels, images.batch(3, 6, 200)[1])
    np.testing.assert_array_equal(np.unique(labels), [0, 1, 2])
    np.testing.assert_array_equal(x[:, 1, 1, 0], labels + 1)  # a pixel that is inside wherever the image is moved to
    corners = {tuple(row) for row in x[:, [0, 0, -1, -1], [0, -1, 0, -1], 0] > 0}
    assert len(corners) == 9  # all ways to move it


def test_images_are_shifted_as_a_whole():
    picture = np.arange(1.0, 13, dtype=np.float32).reshape(1, 3, 4, 1)
    data = ImageData(picture, np.zeros(1, np.int32), picture, np.zeros(1, np.int32), shift=2)
    padded = np.pad(picture[0, ..., 0], 2)
    moved = {padded[y : y + 3, x : x + 4].tobytes() for y in range(5) for x in range(5)}
    assert {image.tobytes() for image in data.batch(0, 0, 400)[0]} == moved
    with pytest.raises(ValueError, match="shift must be a whole number of pixels, at least 0 and less than 3; got 3"):
        ImageData(picture, np.zeros(1, np.int32), picture, np.zeros(1, np.int32), shift=3)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 20])
def test_evaluation_covers_every_image_once(images, batch_size):
    x, labels, mask = map(np.concatenate, zip(*images.eval_batches(batch_size), strict=True))
    assert len(x) == len(labels) == len(mask) == -(-7 // batch_size) * batch_size
    np.testing.assert_array_equal(labels[mask], np.arange(3, 10))
    np.testing.assert_array_equal(x[mask], images.test_images)


def test_a_copy_is_weighed_and_nothing_else():
    data = copy_task(symbols=5)
    tokens, targets, mask = data.batch(0, 0, 50, 12)
    assert tokens.dtype == targets.dtype == np.int32 and mask.dtype == bool and data.vocab_size == 6
    assert (tokens[:, [0, 6]] == 0).all() and set(np.unique(tokens[:, 1:6])) == {1, 2, 3, 4, 5}
    np.testing.assert_array_equal(tokens[:, :6], tokens[:, 6:])
    np.testing.assert_array_equal(targets[:, :-1], tokens[:, 1:])
    np.testing.assert_array_equal(targets[mask].reshape(50, 5), tokens[:, 1:6])
    assert not mask[:, :6].any() and mask[:, 6:11].all() and not mask[:, 11].any()
    for same, batch in [(True, data.batch(0, 0, 50, 12)), (False, data.batch(0, 1, 50, 12))]:
        assert np.array_equal(tokens, batch[0]) == same


def test_what_is_to_be_copied_grows():
    data = copy_task(symbols=5, grows_for=100)
    counts = []
    for step in (0, 50, 100, 200):
        tokens, targets, mask = data.batch(0, step, 2, 256)
        counts.append(int(mask[0].sum()))
        np.testing.assert_array_equal(tokens[:, :128], tokens[:, 128:])
        assert (targets[mask] > 0).all() and (tokens > 0).sum() == 2 * mask.sum()
    assert counts == [16, 45, 127, 127] and next(data.eval_batches(2, 256))[2][0].sum() == 127


@pytest.mark.parametrize("batch_size", [2, 5, 8])
def test_evaluation_of_copies_has_sequences_of_its_own(batch_size):
    data = copy_task(symbols=50, eval_sequences=5)
    tokens, _, mask = map(np.concatenate, zip(*data.eval_batches(batch_size, 8), strict=True))
    assert mask.sum() == 5 * 3 and not mask[5:].any()
    assert not np.array_equal(tokens[:2], data.batch(0, 0, 2, 8)[0])
    np.testing.assert_array_equal(tokens[:5], next(data.eval_batches(5, 8))[0])  # however they are cut into batches


def test_lengths_that_make_no_sense_are_refused(small, images):
    for data in (small, copy_task()):
        for ask in (lambda d: d.batch(0, 0, 1, None), lambda d: next(d.eval_batches(1, None))):
            with pytest.raises(ValueError, match="must be told how many tokens a sequence has; set run.length"):
                ask(data)
    with pytest.raises(ValueError, match="images have no length in tokens; got 8. Leave run.length out"):
        next(images.eval_batches(1, 8))
    for length in (7, 2):
        with pytest.raises(ValueError, match=f"an even number of tokens, at least 4; got run.length = {length}"):
            copy_task().batch(0, 0, 1, length)
    for wrong in ({"symbols": 0}, {"eval_sequences": 1.5}, {"grows_for": -1}):
        with pytest.raises(ValueError, match="copy_task: .* must be a whole number"):
            copy_task(**wrong)
