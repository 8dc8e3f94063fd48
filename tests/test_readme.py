"""The examples in the documents run."""

import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = {
    f"{path.relative_to(ROOT)}-{number}": text
    for path in (ROOT / "README.md", *sorted((ROOT / "reversible_trainer").glob("*/README.md")))
    for number, text in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL))
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name, monkeypatch):
    module = types.ModuleType("example")  # where classes in it say they are from
    monkeypatch.setitem(sys.modules, "example", module)
    exec(compile(EXAMPLES[name], name, "exec"), vars(module))
