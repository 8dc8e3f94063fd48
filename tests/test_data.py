import numpy as np
import pytest

from reversible_trainer.data import TextData, shakespeare, shakespeare_works
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
