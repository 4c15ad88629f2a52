"""Routes: alerts, targets of notifications, and watched daemons."""
