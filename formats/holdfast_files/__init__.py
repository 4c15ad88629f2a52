"""The files of checkpoints, as client and service read them: below both, above holdfast_formats. No torch, no SQL."""
