"""What tests of several folders share: fixtures, a clock, the ranks of a launch."""
