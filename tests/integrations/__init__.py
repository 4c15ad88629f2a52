"""The adapters of `holdfast.integrations` inside their real frameworks: `make integrations`.

Every folder is run in an environment of its own, whose packages `environments.toml` names. `make test` runs none of it.
"""
