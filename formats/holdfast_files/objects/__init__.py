"""Object storage as client and service use it: addresses, settings, and the only client of S3."""
