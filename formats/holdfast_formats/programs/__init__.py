"""Mapping programs: statements that convert the tensors of one checkpoint into those of another.

A program is a TOML file (docs/programs.md). `read_program` parses it; `compile_program` computes, for the tensors of one
checkpoint and its config.json, which box of which tensor goes where.
"""

from holdfast_formats.programs.choice import AUTO, find, fitting, load, named_or_written, packaged
from holdfast_formats.programs.compilation import compile_program
from holdfast_formats.programs.compiled import Becoming, CompiledProgram, DtypeChange, LostElements
from holdfast_formats.programs.document import Program, read_program, statements_only
from holdfast_formats.programs.inversion import inverted
from holdfast_formats.programs.operations import Ranks

__all__ = [
    "AUTO",
    "Becoming",
    "CompiledProgram",
    "DtypeChange",
    "LostElements",
    "Program",
    "Ranks",
    "compile_program",
    "find",
    "fitting",
    "inverted",
    "load",
    "named_or_written",
    "packaged",
    "read_program",
    "statements_only",
]
