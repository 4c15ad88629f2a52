"""The adapter for PEFT, with the real one."""
