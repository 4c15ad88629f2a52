"""`make bench`: the same work for Holdfast and its peers, side by side in one run; docs/benchmarks.md says how."""
