"""Foreign Python in a process of its own, with limits and with the kernel's isolation where it has any."""
