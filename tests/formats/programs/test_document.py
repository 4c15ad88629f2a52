"""A program's file is read with all that it says, or refused with the key or the line that is wrong."""

from __future__ import annotations

import pytest

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.rules.expressions import sizes_for
from holdfast_formats.programs import read_program

TEXT = """
name = "mine"
from = "hf"
to = "ours"
model_types = ["llama"]
statements = '''
a -> b, slice=[0:{head_dim}]
'''

[sizes]
heads = "num_attention_heads"
head_dim = "head_dim ?? hidden_size // num_attention_heads"

[inverse]
statements = "b -> a, pad_to={heads}"
"""


def test_a_program_says_everything() -> None:
    """Names, sizes by config.json, statements, and the way back by hand."""
    program = read_program(TEXT)
    assert (program.name, program.source, program.target, program.model_types) == ("mine", "hf", "ours", ("llama",))
    assert program.back is not None and len(program.statements) == len(program.back) == 1
    assert sizes_for(program.sizes, {"hidden_size": 64, "num_attention_heads": 4}) == {"heads": 4, "head_dim": 16}
    assert sizes_for(program.sizes, {"text_config": {"head_dim": 8}}) == {"head_dim": 8}
    with pytest.raises(InvalidRequest, match="num_attention_heads = 'x', which is not a valid size"):
        sizes_for(program.sizes, {"num_attention_heads": "x"})
    with pytest.raises(InvalidRequest, match="size 'head_dim' for this config: division by zero"):
        sizes_for(program.sizes, {"hidden_size": 64, "num_attention_heads": 0})


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('from = "hf"', "", "missing required field `from`"),
        ('to = "ours"', 'too = "ours"', "`too`"),
        ('name = "mine"', 'name = "Mine!"', r"at `\$.name`"),
        ("a -> b,", "a = b,", "program 'mine': line 1, column 3"),
        ("b -> a,", "b -> ,", r"program 'mine': \[inverse\] line 1, column 6"),
        ('heads = "num_attention_heads"', 'heads = "num_attention_heads +"', "incomplete"),
        ("a -> b, slice=[0:{head_dim}]", "# none", "there are no statements"),
        ("name =", "name ==", "not valid"),
    ],
)
def test_what_is_wrong_is_named(old: str, new: str, what: str) -> None:
    """By key, or by line and column of the statement."""
    assert old in TEXT
    with pytest.raises(InvalidRequest, match=what):
        read_program(TEXT.replace(old, new))
