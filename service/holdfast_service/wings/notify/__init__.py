"""Notifications for people and other programs, and the command of `--on-event`."""
