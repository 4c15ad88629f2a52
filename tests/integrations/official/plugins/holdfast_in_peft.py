"""Saves PEFT's adapters with Holdfast, and gives PEFT the committed files to load: a pytest plugin."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel

from holdfast import Checkpointer
from holdfast.integrations.peft import GROUP, adapter, adapter_config

AT = os.environ["HOLDFAST_OFFICIAL"]
_counted = itertools.count()


def save_pretrained(
    model: PeftModel, save_directory: str | os.PathLike[str], *_: Any, selected_adapters: Any = None, **options: Any
) -> None:
    """Save each adapter in a run of its own, and copy what was committed to where PEFT writes it. The card is PEFT's."""
    os.makedirs(save_directory, exist_ok=True)
    model.create_or_update_model_card(os.fspath(save_directory))
    for name in selected_adapters or list(model.peft_config):
        run, link = f"adapter-{os.getpid()}-{next(_counted)}", Path(f"{save_directory}.link")
        with Checkpointer(run, {GROUP: adapter(model, name)}, at=AT, assets=[adapter_config(model, name)]) as checkpointer:
            checkpointer.link(checkpointer.save(1, wait="durable"), link)
        directory = Path(save_directory, "" if name == "default" else name)
        directory.mkdir(parents=True, exist_ok=True)
        for file in [*link.glob(f"{GROUP}*"), link / "adapter_config.json"]:
            shutil.copyfile(file, directory / file.name)
        link.unlink()


@pytest.fixture(autouse=True)
def holdfast_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeftModel, "save_pretrained", save_pretrained)
