"""Bytes of slots between nodes: each node serves its ranks' slots to the nodes that write them."""
