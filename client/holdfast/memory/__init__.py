"""Raw memory: native copies and checks, large pages. No torch."""
