"""The Python code of README and the pages of the documentation."""

import re

from patching_trees import ROOT

DOCS = ROOT / "torch_ext_bucketing" / "docs"


def code_of(page: str) -> list[str]:
    """Return the Python blocks of ``docs/{page}.md``, or of ``README``."""
    path = ROOT / "README.md" if page == "README" else DOCS / f"{page}.md"
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
