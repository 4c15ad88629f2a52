"""Commands about access: tokens, quotas and the audit log."""
