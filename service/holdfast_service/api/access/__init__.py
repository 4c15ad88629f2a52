"""Authentication, authorization and limits of requests."""
