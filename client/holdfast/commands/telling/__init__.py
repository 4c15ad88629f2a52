"""Commands about what people are told."""
