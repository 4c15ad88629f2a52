"""NeMo: its archives (`.nemo`), packed or unpacked, and the directories of NeMo 2."""
