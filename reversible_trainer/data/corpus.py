"""The plays and poems of William Shakespeare, inside the package (see `NOTICE`)."""

from __future__ import annotations

import hashlib
import importlib.resources
import lzma
import re
from collections.abc import Sequence

import gin
import numpy as np

from reversible_trainer.data.text import TextData

_SHA256 = "da68ca4e8201d41a12c1d5e82d967bda85105f1dabe823d5735138bccabdd387"
# Works follow each other without a line break: a title may be glued to the `[Exeunt.]` or `THE END` before it.
_TITLE = re.compile(rb"(?:THE END)?([A-Z][A-Z ,;']*)\n+by William Shakespeare")

HELD_OUT = ("THE LIFE OF KING HENRY V", "THE MERCHANT OF VENICE", "THE LIFE OF TIMON OF ATHENS")


def shakespeare_works() -> dict[str, bytes]:
    """The 42 works by title, in the order of the file; together they are the whole file."""
    packed = importlib.resources.files("reversible_trainer.data").joinpath("shakespeare.txt.xz").read_bytes()
    text = lzma.decompress(packed)
    found = hashlib.sha256(text).hexdigest()
    if found != _SHA256:
        raise ValueError(f"shakespeare.txt.xz: expected sha256 {_SHA256}, got {found}. Install the package again.")
    titles = list(_TITLE.finditer(text))
    edges = [0, *(title.start(1) for title in titles[1:]), len(text)]
    return {title[1].decode(): text[a:b] for title, a, b in zip(titles, edges[:-1], edges[1:], strict=True)}


@gin.configurable
def shakespeare(held_out: Sequence[str] = HELD_OUT) -> TextData:
    """Shakespeare's works as bytes, whole plays held out.

    Args:
      held_out: Titles of the plays to evaluate on. By default a history, a comedy and a
        tragedy, 7.6 % of the bytes; a 5-gram model of all other works gives them 1.62 nats a
        byte, and that is also its average over the works, each predicted from all others.

    Example:
      >>> data = shakespeare()
      >>> len(data.train), len(data.held_out)
      (4672894, 384304)
      >>> data.decode(data.held_out[:24])
      'THE LIFE OF KING HENRY V'
    """
    works = shakespeare_works()
    if isinstance(held_out, str) or not isinstance(held_out, Sequence):
        raise TypeError(f"shakespeare.held_out must be a list of titles; got {held_out!r}.")
    for title in held_out:
        if title not in works:
            raise ValueError(f"shakespeare.held_out: no work is called {title!r}. The works are: {', '.join(works)}.")
    train = b"".join(text for title, text in works.items() if title not in held_out)
    rest = b"".join(text for title, text in works.items() if title in held_out)
    return TextData(np.frombuffer(train, np.uint8), np.frombuffer(rest, np.uint8))
