"""Exports for PaddleNLP and PaddleFormers."""
