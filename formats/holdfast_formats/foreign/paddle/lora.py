"""LoRA adapters of PaddleNLP and PaddleFormers, listed in group `adapter` as PEFT names and holds them.

Paddle's A is [in, r] and B [r, out], whatever the file says of its layout; PEFT has both transposed. Masters and optimizer
are sets as those of a unified checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from holdfast_formats.errors import StateMismatch
from holdfast_formats.foreign.kinds import ForeignKind, ReadOptions
from holdfast_formats.foreign.listing import ForeignFiles, ForeignListing, ForeignTensor, TensorKey
from holdfast_formats.foreign.paddle import leftovers
from holdfast_formats.foreign.paddle.gathering import Gathering, read_json, renamed
from holdfast_formats.foreign.paddle.pickled_dicts import read_dict, refuse_rest
from holdfast_formats.foreign.paddle.safetensors_sets import FileSet, find_set, is_of_set
from holdfast_formats.foreign.paddle.transposition import turned
from holdfast_formats.foreign.paddle.unified import MASTERS, OPTIMIZER, UnifiedReader

NAME = "paddle-lora"
CONFIG = "lora_config.json"
PICKLE = "lora_model_state.pdparams"
PEFT_CONFIG = "adapter_config.json"  # the key of its document in group `adapter`
_STEM = "peft_model"
_PREFIX = "base_model.model."
