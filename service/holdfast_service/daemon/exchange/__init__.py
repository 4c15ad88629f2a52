"""Bytes of slots between nodes: each node serves those of its ranks to the nodes that write them."""
