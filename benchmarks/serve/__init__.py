"""Load of servers over loopback: ours beside others with the same weights."""
