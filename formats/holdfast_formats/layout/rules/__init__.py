"""Which dimension of which tensor is cut by which axis: tables, one per family of architectures, and their decoder.

A table is a TOML file (docs/rules.md). `choose` selects one by config.json, by the tensors' names or by its own name,
and computes its sizes; `Rules` are its rules for single tensors.
"""

from holdfast_formats.layout.rules.choice import choose, packaged
from holdfast_formats.layout.rules.document import decode
from holdfast_formats.layout.rules.rules import Fusion, Rule, Rules

__all__ = ["Fusion", "Rule", "Rules", "choose", "decode", "packaged"]
