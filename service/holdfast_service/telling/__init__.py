"""What people and other programs are told: notifications, and the command of `--on-event`."""
