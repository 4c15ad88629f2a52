"""Exams that every implementation of a seam takes."""

import pytest

pytest.register_assert_rewrite("tests.suites.tier_suite")
